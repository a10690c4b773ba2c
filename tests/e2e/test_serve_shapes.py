"""A server whose instances have different block and tensor-parallel sizes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from kvmig_tools.nursery import Nursery
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import SMALL, Served
from tests.conftest import NEVER_BY_ITSELF, PATIENT
from tests.support.leaks import Footprint, assert_server_is_empty, orphans
from tests.support.streams import (
    Stream,
    count_from,
    counted,
    place,
    run_moved,
    run_unmoved,
)

pytestmark = [pytest.mark.server, pytest.mark.long]

PATH = "/v1/completions"
OTHER = "--instance-flags=i1: --tensor-parallel-size=2 --block-size=64"


@pytest.fixture(scope="module")
def mixed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """i0: one worker, blocks of 32 tokens; i1: two workers, blocks of 64."""
    before = orphans()
    log = tmp_path_factory.mktemp("mixed") / "log"
    flags = [*SMALL, *PATIENT, "--instances=2", NEVER_BY_ITSELF, OTHER, "--shutdown-timeout=5"]
    flags.append("--inexact-moves")
    with Served(flags, nursery=nursery, log=log) as served:
        yield served
        footprint = Footprint.of(served)
    # vLLM's workers notice by themselves that their engine ended.
    footprint.assert_gone(SERVER_PATIENCE_S)
    assert orphans() <= before  # others' servers, beside this one, hold theirs
    ours = [line for line in served.output().splitlines() if "(Worker_TP" not in line]
    assert not [line for line in ours if "Traceback" in line]  # a killed worker's peer has one


async def test_a_call_moves_between_shapes_as_if_there_were_one(mixed: Served) -> None:
    body = count_from(17, 2500)
    unmoved = await run_unmoved(mixed, PATH, body)

    moved, reports = await run_moved(mixed, PATH, body, at=(100, 250, 400))

    assert [report["state"] for report in reports] == ["committed"] * 3, reports
    assert [report["exact"] for report in reports] == [False] * 3
    assert moved.choices[0].text == unmoved.choices[0].text
    counted(moved, 17)
    assert_server_is_empty(mixed)


async def test_an_instance_of_two_workers_is_added_to_one_of_one_worker(
    nursery: Nursery, tmp_path: Path
) -> None:
    flags = [*SMALL, *PATIENT, "--instances=1", "--max-instances=2", NEVER_BY_ITSELF]
    flags += ["--mixed-shapes", "--inexact-moves", "--shutdown-timeout=5"]
    with Served(flags, nursery=nursery, log=tmp_path / "log") as served:
        order = {"flags": "--tensor-parallel-size=2"}
        async with httpx.AsyncClient(timeout=SERVER_PATIENCE_S) as client:
            added = await client.post(
                f"{served.url}/kvmig/v1/instances",
                json=order,
                params={"wait_s": SERVER_PATIENCE_S / 2},
            )
        assert [row["state"] for row in added.json()["data"]] == ["serving"], added.text
        body = count_from(17, 1200)
        moved, reports = await run_moved(served, PATH, body, at=(100, 250))
        assert [report["state"] for report in reports] == ["committed"] * 2, reports
        counted(moved, 17)
        footprint = Footprint.of(served)
    footprint.assert_gone(SERVER_PATIENCE_S)


async def test_instances_count_in_the_same_blocks(mixed: Served) -> None:
    totals = {row["id"]: row["blocks_total"] for row in mixed.get("instances")}

    assert totals == {"i0": 599, "i1": 2 * 599}  # one block is vLLM's own


async def test_a_killed_worker_ends_its_instance_whose_stream_goes_on(mixed: Served) -> None:
    streams = [Stream(mixed, PATH, count_from(1000 * n, 4000)) for n in range(2)]
    for stream, instance in zip(streams, ("i0", "i1"), strict=True):
        await place(mixed, stream, instance)
    workers = [one for one in Footprint.of(mixed).processes if is_worker(one)]
    assert len(workers) == 2
    assert "Traceback" not in mixed.output()

    workers[1].kill()

    for n, stream in enumerate(streams):
        assert (await stream.end()).tokens == 4000
        counted(stream.answer, 1000 * n)
    gone, _ = await asyncio.to_thread(psutil.wait_procs, workers, SERVER_PATIENCE_S)
    assert gone
    async with httpx.AsyncClient(timeout=SERVER_PATIENCE_S) as client:
        shown = (await client.get(f"{mixed.url}/metrics")).text
    busy = [
        line
        for line in shown.splitlines()
        if line.startswith(("vllm:num_requests_", "vllm:kv_cache_usage_perc"))
        and not line.endswith(" 0.0")
    ]
    assert busy == []


def is_worker(process: psutil.Process) -> bool:
    """Whether vLLM has named it so."""
    return "Worker_TP" in " ".join(process.cmdline())
