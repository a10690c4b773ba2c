"""Every kind of call between two ranks of `vllm serve` with the plugin, and what else people run
with it: adapters, tools, several HTTP processes, /pause and /sleep.

tests/e2e/test_serve_kinds.py has images and drafts, test_serve_plugin_verdicts.py other flags.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import SMALL, Served
from tests.conftest import NEVER_BY_ITSELF, PATIENT
from tests.e2e.test_serve_moves import CALLS, CHAT, COMPLETIONS, chat, completion
from tests.support import tiny_lora
from tests.support.leaks import assert_server_is_empty, leaving_nothing
from tests.support.plugin_server import plugin_server
from tests.support.streams import (
    Stream,
    ask,
    other,
    row_when,
    run_moved,
    run_unmoved,
)

pytestmark = [pytest.mark.server, pytest.mark.long]

ADAPTERS = ("one", "two")
TOOL = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {"digits": {"type": "string"}},
            "required": ["digits"],
        },
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("plugin")
    adapters = (f"{name}={tiny_lora.make(folder, at)}" for at, name in enumerate(ADAPTERS))
    flags = [
        *SMALL, *PATIENT, NEVER_BY_ITSELF, "--shutdown-timeout=5",
        "--data-parallel-size=2", "--api-server-count=2",
        "--enable-auto-tool-choice", "--tool-call-parser=hermes",
        "--enable-lora", "--max-loras=2", "--max-lora-rank=8", "--lora-modules", *adapters,
    ]  # fmt: skip
    environment = {"VLLM_SERVER_DEV_MODE": "1"}  # it has /pause and /sleep
    with leaving_nothing(plugin_server(flags, folder, environment=environment)) as served:
        yield served


@pytest.fixture
def ranks(server: Served) -> Iterator[Served]:
    yield server
    assert_server_is_empty(server)


@pytest.mark.parametrize("kind", CALLS)
async def test_a_call_moved_to_the_other_rank_and_back_equals_one_that_stayed(
    ranks: Served, kind: str
) -> None:
    path, body = CALLS[kind]
    unmoved = await run_unmoved(ranks, path, body)

    moved, reports = await run_moved(ranks, path, body)

    assert [report["state"] for report in reports] == ["committed"] * len(reports), reports
    assert len(reports) == 2 * len(moved.choices)
    moved.same_as(unmoved)


async def test_calls_with_adapters_moved_between_ranks_equal_ones_that_stayed(
    ranks: Served,
) -> None:
    texts = set()
    for adapter in ADAPTERS:
        _, body = completion(temperature=0.8, seed=5, logprobs=2, model=adapter)
        unmoved = await run_unmoved(ranks, COMPLETIONS, body)

        moved, reports = await run_moved(ranks, COMPLETIONS, body)

        assert [report["state"] for report in reports] == ["committed"] * 2, reports
        moved.same_as(unmoved)
        texts.add(moved.choices[0].text)
    assert len(texts) == len(ADAPTERS), "the adapters change nothing"


async def test_a_stream_that_may_call_a_tool_moved_between_ranks_equals_one_that_stayed(
    ranks: Served,
) -> None:
    _, body = chat(temperature=0, tools=[TOOL], tool_choice="auto")
    unmoved = await run_unmoved(ranks, CHAT, body)

    moved, reports = await run_moved(ranks, CHAT, body)

    assert [report["state"] for report in reports] == ["committed"] * 2, reports
    moved.same_as(unmoved)


async def post(served: Served, path: str) -> None:
    async with httpx.AsyncClient(
        base_url=served.url, verify=False, timeout=SERVER_PATIENCE_S
    ) as http:
        answer = await http.post(path)
    assert answer.status_code == 200, answer.text


async def test_an_order_to_end_all_calls_ends_those_of_both_http_processes(ranks: Served) -> None:
    """A call's connection comes to either of them by chance: 8 come to both."""
    _, body = completion(temperature=0.8, seed=6, max_tokens=1000)
    streams = [Stream(ranks, COMPLETIONS, body) for _ in range(8)]
    for stream in streams:
        await stream.reach(3)

    async with httpx.AsyncClient(
        base_url=ranks.url, verify=False, timeout=SERVER_PATIENCE_S
    ) as http:
        answer = await http.post("/abort_requests", json={})

    assert answer.json() == {"status": "aborted", "aborted": len(streams)}
    for stream in streams:
        assert [one.finish_reason for one in (await stream.end()).choices.values()] == ["abort"]


@pytest.mark.parametrize(
    ("pause", "resume"),
    [
        ("/pause?mode=keep", "/resume"),
        ("/sleep?level=0&mode=keep", "/wake_up?tags=scheduling"),
    ],
)
async def test_a_paused_servers_stream_stands_still_where_it_is_and_goes_on_and_moves_after_it(
    ranks: Served, pause: str, resume: str
) -> None:
    _, body = completion(temperature=0.8, seed=6, logprobs=1, max_tokens=1000)
    unmoved = await run_unmoved(ranks, COMPLETIONS, body)
    stream = Stream(ranks, COMPLETIONS, body)
    await stream.reach(20)

    await post(ranks, pause)
    row = await row_when(ranks, stream, lambda _: True)
    refused = (await ask(ranks, row["id"], other(row["instance"]))).json()
    await asyncio.sleep(1)
    before = stream.answer.tokens
    await asyncio.sleep(1)
    after = stream.answer.tokens
    await post(ranks, resume)
    await stream.reach(after + 20)
    moved = (await ask(ranks, row["id"], other(row["instance"]))).json()

    assert (refused["state"], refused["detail"]) == ("aborted", "the engine is paused")
    assert before == after
    assert moved["state"] == "committed", moved
    (await stream.end()).same_as(unmoved)
