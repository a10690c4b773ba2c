"""vLLM's own server command, with the plugin installed and KVMIG=1."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import SMALL, Served
from tests.support.plugin_server import plugin_server
from tests.support.streams import count_from, counted, run_moved, run_unmoved, start_streams
from tests.support.waiting import until_yes

pytestmark = [pytest.mark.server, pytest.mark.long]

KEY = "an admin key"
CALL = {"prompt": "Count: 0017 0018", "max_tokens": 200, "seed": 3, "temperature": 0.8}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`vllm serve` of two data parallel ranks."""
    flags = [*SMALL, "--data-parallel-size=2", "--policy=freeness", "--shutdown-timeout=5"]
    flags += ["--max-num-seqs=32", "--num-gpu-blocks-override=1500"]  # one rank has room for 20
    with plugin_server(flags, tmp_path_factory.mktemp("plugin"), admin_key=KEY) as served:
        yield served


async def test_a_stream_moved_between_ranks_and_back_equals_one_that_stayed(ranks: Served) -> None:
    body = {**CALL, "logprobs": 2, "ignore_eos": True}
    unmoved = await run_unmoved(ranks, "/v1/completions", body)

    moved, reports = await run_moved(ranks, "/v1/completions", body)

    assert [report["state"] for report in reports] == ["committed"] * 2, reports
    moved.same_as(unmoved)


def test_ranks_are_shown_beside_vllms_routes_to_the_admin_key_alone(ranks: Served) -> None:
    assert [row["id"] for row in ranks.get("instances")] == ["i0", "i1"]

    path = f"{ranks.url}/kvmig/v1/instances"
    assert httpx.get(path, verify=False).status_code == 401
    assert httpx.get(f"{ranks.url}/version", verify=False).json().keys() == {"version"}


def state(served: Served, rank: str) -> str:
    rows = [row for row in served.get("instances") if row["id"] == rank]
    return str(rows[0]["state"]) if rows else ""


async def test_a_ranks_streams_go_on_at_the_other_where_it_is_drained_and_where_it_is_killed(
    ranks: Served,
) -> None:
    firsts = [400 * number for number in range(20)]
    bodies = [count_from(first, 2000) for first in firsts]
    streams = await start_streams(ranks, bodies, 20)
    drain = f"{ranks.url}/kvmig/v1/instances/i1/drain"
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(verify=False, timeout=SERVER_PATIENCE_S, headers=headers) as http:
        assert (await http.post(drain)).is_success
        await until_yes(lambda: {row["instance"] for row in ranks.get("requests")} == {"i0"})
        assert (await http.delete(drain)).is_success
    await until_yes(lambda: state(ranks, "i1") == "serving")
    (pid,) = (row["pid"] for row in ranks.get("instances") if row["id"] == "i0")

    os.kill(pid, signal.SIGKILL)

    answers = await asyncio.gather(*(stream.end() for stream in streams))
    for answer, first in zip(answers, firsts, strict=True):
        assert answer.tokens == 2000
        counted(answer, first)
    await until_yes(lambda: state(ranks, "i0") == "serving")
