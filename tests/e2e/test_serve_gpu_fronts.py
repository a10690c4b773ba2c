"""The front ends of a server on a GPU of the tests' own, where nobody says how many there are."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import Served
from tests.e2e.test_serve_gpu_memory import OneGpu
from tests.e2e.test_serve_gpus import PATH, nursery_in
from tests.support.gpu_nursery import CORES
from tests.support.leaks import Footprint
from tests.support.streams import count_from, counted, run_unmoved

pytestmark = [pytest.mark.server, pytest.mark.long]

STORE = "VLLM_ENABLE_RESPONSES_API_STORE"
CALLS = 12
"""Each over a connection of its own: with three front ends hardly all at one."""


def front_ends(served: Served) -> int:
    """In processes of their own; a single one is in the server's."""
    return len(Footprint.of(served).named("kvmig.frontend.process_main"))


async def all_count(served: Served) -> None:
    numbers = range(100, 100 * (CALLS + 1), 100)
    answers = (run_unmoved(served, PATH, count_from(number, 20)) for number in numbers)
    for number, answer in zip(numbers, await asyncio.gather(*answers), strict=True):
        counted(answer, number)


def test_one_gpu_and_16_cores_make_three_front_ends_that_answer_alike(tmp_path: Path) -> None:
    with nursery_in(tmp_path, **{CORES: "16"}) as nursery:
        gpu = OneGpu(nursery, tmp_path, "--instances=1")
        with gpu.served as served:
            assert front_ends(served) == 3
            asyncio.run(all_count(served))


def test_with_stored_responses_there_is_one_front_end_which_finds_each_by_its_id(
    tmp_path: Path,
) -> None:
    with nursery_in(tmp_path, **{CORES: "16", STORE: "1"}) as nursery:
        gpu = OneGpu(nursery, tmp_path, "--instances=1")
        with gpu.served as served:
            assert front_ends(served) == 0
            assert f"one front end instead of 3: {STORE} is '1'" in served.output()
            body = {"model": served.model, "input": "Hi", "max_output_tokens": 4, "store": True}
            made = httpx.post(
                f"{served.url}/v1/responses", json=body, timeout=SERVER_PATIENCE_S
            ).json()
            for _ in range(CALLS):
                found = httpx.get(
                    f"{served.url}/v1/responses/{made['id']}", timeout=SERVER_PATIENCE_S
                )
                assert found.json()["id"] == made["id"]
