"""`vllm serve` of the next minor with the plugin: its own API server and engines."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from kvmig_tools.served import SMALL, Served
from scripts.check import NEXT
from tests.conftest import NEVER_BY_ITSELF, PATIENT
from tests.support.leaks import leaving_nothing
from tests.support.next_vllm import next_tree
from tests.support.plugin_server import plugin_server
from tests.support.streams import run_moved, run_unmoved

pytestmark = [pytest.mark.server, pytest.mark.long]

CALL = {
    "prompt": "Count: 0017 0018", "max_tokens": 1000, "seed": 3, "temperature": 0.8, "logprobs": 2,
    "ignore_eos": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """All its processes are of the next minor: its tree is before the installed one."""
    tree = next_tree()
    flags = [*SMALL, *PATIENT, NEVER_BY_ITSELF, "--shutdown-timeout=5", "--data-parallel-size=2"]
    folder = tmp_path_factory.mktemp("next")
    environment = {"VLLM_CACHE_ROOT": f"{tree}-cache"}
    with leaving_nothing(
        plugin_server(flags, folder, environment=environment, first=[tree])
    ) as served:
        yield served


async def test_a_stream_moved_between_ranks_of_the_next_minor_and_back_equals_one_that_stayed(
    ranks: Served,
) -> None:
    async with httpx.AsyncClient(verify=False, timeout=30) as http:
        version = (await http.get(f"{ranks.url}/version")).json()["version"]
    assert version.startswith(NEXT)
    unmoved = await run_unmoved(ranks, "/v1/completions", CALL)

    moved, reports = await run_moved(ranks, "/v1/completions", CALL)

    assert [(one["state"], one["exact"]) for one in reports] == [("committed", True)] * 2, reports
    moved.same_as(unmoved)
