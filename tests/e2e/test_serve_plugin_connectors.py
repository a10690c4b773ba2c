"""`vllm serve` with the plugin and a KV connector: streams move, but those that it holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import SMALL, Served
from tests.conftest import NEVER_BY_ITSELF, PATIENT
from tests.support.leaks import assert_server_is_empty, leaving_nothing
from tests.support.plugin_server import plugin_server
from tests.support.streams import (
    Stream,
    ask,
    count_from,
    counted,
    move,
    other,
    row_of,
    run_moved,
    run_unmoved,
    run_whole,
)
from tests.support.vllm_connector import nixl_alias
from tests.support.waiting import until_yes

pytestmark = [pytest.mark.server, pytest.mark.long]

PATH = "/v1/completions"
PROMPT = " ".join(f"{number:04d}" for number in range(100, 140))
"""Six blocks of 32 tokens, and some."""
READ = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
CALL = {"prompt": PROMPT, "temperature": 0.8, "seed": 3, "logprobs": 2, "ignore_eos": True}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two ranks, each of which may compute prompts for the other."""
    folder = tmp_path_factory.mktemp("plugin")
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    flags = [
        *SMALL, *PATIENT, NEVER_BY_ITSELF, "--shutdown-timeout=5", "--data-parallel-size=2",
        f"--kv-transfer-config={json.dumps(transfer)}",
    ]  # fmt: skip
    first = [nixl_alias(folder / "first")]
    environment = {"VLLM_SERVER_DEV_MODE": "1"}  # it has the route /reset_prefix_cache
    server = plugin_server(flags, folder, environment=environment, first=first)
    with leaving_nothing(server) as served:
        yield served


def only_at(ranks: Served, instance: str) -> None:
    """Let new calls go to that rank."""
    drains = f"{ranks.url}/kvmig/v1/instances/{{}}/drain"
    with httpx.Client(verify=False, timeout=SERVER_PATIENCE_S) as http:
        states = {row["id"]: row["state"] for row in ranks.get("instances")}
        if states[instance] == "draining":
            http.delete(drains.format(instance)).raise_for_status()
        http.post(drains.format(other(instance))).raise_for_status()


async def served_at(ranks: Served, instance: str) -> None:
    """The same, once it is so."""
    only_at(ranks, instance)

    def state() -> set[tuple[str, str]]:
        return {(row["id"], row["state"]) for row in ranks.get("instances")}

    await until_yes(lambda: state() == {(instance, "serving"), (other(instance), "draining")})


def serve_all(ranks: Served) -> None:
    with httpx.Client(verify=False, timeout=SERVER_PATIENCE_S) as http:
        for row in ranks.get("instances"):
            if row["state"] == "draining":
                path = f"{ranks.url}/kvmig/v1/instances/{row['id']}/drain"
                http.delete(path).raise_for_status()


async def all_serve(ranks: Served) -> None:
    serve_all(ranks)
    await until_yes(lambda: {row["state"] for row in ranks.get("instances")} == {"serving"})


async def pulled(ranks: Served, tokens: int) -> Stream:
    """A stream of the second rank, whose prompt the first one has computed."""
    async with httpx.AsyncClient(verify=False, timeout=SERVER_PATIENCE_S) as http:
        (await http.post(f"{ranks.url}/reset_prefix_cache")).raise_for_status()
    await served_at(ranks, "i0")
    first = {**CALL, "max_tokens": 1, "kv_transfer_params": READ}
    told: Any = (await run_whole(ranks, PATH, first))["kv_transfer_params"]
    assert told["do_remote_prefill"], told
    await served_at(ranks, "i1")
    stream = Stream(ranks, PATH, {**CALL, "max_tokens": tokens, "kv_transfer_params": told})
    await stream.reach(1)
    await all_serve(ranks)
    return stream


async def test_a_stream_moved_between_ranks_with_a_connector_equals_one_that_stayed(
    ranks: Served,
) -> None:
    body = {**CALL, "max_tokens": 200}
    unmoved = await run_unmoved(ranks, PATH, body)

    moved, reports = await run_moved(ranks, PATH, body)

    assert [report["state"] for report in reports] == ["committed"] * 2, reports
    moved.same_as(unmoved)
    assert_server_is_empty(ranks)


async def test_a_stream_whose_prompt_another_rank_has_computed_moves_and_equals_one_that_stayed(
    ranks: Served,
) -> None:
    stayed = await (await pulled(ranks, 600)).end()

    stream = await pulled(ranks, 600)
    reports = await move(ranks, stream)
    await stream.reach(stream.answer.tokens + 30)
    reports += await move(ranks, stream)

    assert [report["state"] for report in reports] == ["committed"] * 2, reports
    (await stream.end()).same_as(stayed)


async def test_a_stream_whose_blocks_another_engine_is_to_read_stays_by_name_and_others_move(
    ranks: Served,
) -> None:
    held = Stream(ranks, PATH, {**CALL, "max_tokens": 900, "kv_transfer_params": READ})
    beside = Stream(ranks, PATH, count_from(17, 900))
    await held.reach(10)
    await beside.reach(10)
    row = await row_of(ranks, held)

    refused = (await ask(ranks, row["id"], other(row["instance"]))).json()
    (report,) = await move(ranks, beside)

    why = "NixlConnector holds it: another engine reads its blocks when it ends"
    assert (refused["state"], refused["detail"]) == ("aborted", why)
    assert row["unmovable"] == why
    assert report["state"] == "committed"
    counted(await beside.end(), 17)
    assert (await held.end()).choices[0].finish_reason == "length"
