"""Calls that bring more than text move over HTTP: images, LoRA adapters, with n-gram drafts.

One server has all of it: a tiny BLIP-2 with two adapters and one place for them. It is started as
kvmig's, and as vLLM's with the plugin.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvmig_tools.nursery import Nursery
from kvmig_tools.served import SMALL, Served
from tests.conftest import NEVER_BY_ITSELF, PATIENT
from tests.support import tiny_blip2, tiny_lora
from tests.support.leaks import assert_server_is_empty, leaving_nothing
from tests.support.plugin_server import plugin_server
from tests.support.retries import EndedEarly
from tests.support.streams import Stream, move_one, row_of, run_moved, run_unmoved

pytestmark = [pytest.mark.server, pytest.mark.long]

CHAT = "/v1/chat/completions"
DRAFTS = {"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 3}
ADAPTERS = ("one", "two")


@pytest.fixture(scope="module", params=["kvmig.serve", "plugin"])
def server(
    request: pytest.FixtureRequest, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("kinds")
    adapters = (
        f"{name}={tiny_lora.make(folder, number, 'language_model.')}"
        for number, name in enumerate(ADAPTERS, 1)
    )
    flags = [
        *SMALL, *PATIENT, "--data-parallel-size=2", NEVER_BY_ITSELF, "--shutdown-timeout=5",
        "--enable-lora", "--max-loras=1", "--max-cpu-loras=4", "--max-lora-rank=8",
        f"--speculative-config={json.dumps(DRAFTS)}", "--lora-modules", *adapters,
    ]  # fmt: skip
    model = folder / "blip2"
    model.mkdir()
    tiny_blip2.make(model)
    if request.param == "plugin":
        one = plugin_server(flags, folder, model)
    else:
        one = Served(flags, model=model, nursery=nursery, log=folder / "log")
    with leaving_nothing(one) as served:
        yield served


@pytest.fixture
def kinds(server: Served) -> Iterator[Served]:
    yield server
    assert_server_is_empty(server)


def picture(red: int) -> dict[str, Any]:
    """A square of one colour, as clients send it."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (tiny_blip2.PIXELS,) * 2, (red, 80, 160)).save(file, "png")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A greedy one: with drafts vLLM 0.32 gives seeded ones other tokens each time."""
    content = [*parts, {"type": "text", "text": "Count from 0042"}]
    messages = [{"role": "user", "content": content}]
    body = {"messages": messages, "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    return {**body, **fields}


@pytest.mark.parametrize("model", [{}, {"model": "one"}], ids=["plain", "adapter"])
async def test_a_chat_about_an_image_moved_twice_equals_the_one_left_alone(
    kinds: Served, model: dict[str, Any]
) -> None:
    body = chat(picture(200), logprobs=True, **model)
    unmoved = await run_unmoved(kinds, CHAT, body)
    another = await run_unmoved(kinds, CHAT, chat(picture(10), logprobs=True, **model))

    moved, reports = await run_moved(kinds, CHAT, body)

    assert [report["state"] for report in reports] == ["committed"] * 2, reports
    moved.same_as(unmoved)
    first, other = moved.choices[0], another.choices[0]
    assert first.token_logprobs != other.token_logprobs, "it was not looked at"


async def test_calls_with_adapters_and_drafts_move_while_others_want_their_place(
    kinds: Served,
) -> None:
    bodies = [chat(model=name, max_tokens=150 + 10 * n) for n in range(2) for name in ADAPTERS]
    unmoved = [await run_unmoved(kinds, CHAT, body) for body in bodies]
    assert unmoved[0].choices[0].text[:100] != unmoved[1].choices[0].text[:100]
    streams = [Stream(kinds, CHAT, body) for body in bodies]
    reports: list[dict[str, Any]] = []

    async def keep_moving(stream: Stream) -> None:
        while not stream.task.done():
            try:
                reports.append(await move_one(kinds, await row_of(kinds, stream)))
            except EndedEarly:
                return

    await asyncio.gather(*(keep_moving(stream) for stream in streams))

    for stream, alone in zip(streams, unmoved, strict=True):
        (await stream.end()).same_as(alone)
    assert any(report["state"] == "committed" for report in reports)
    refused = {report["reason"] for report in reports if report["state"] == "aborted"}
    assert refused <= {"finished", "no_batch_slot", "preempted", "started"}, reports
