"""kvmig.serve without a flag about memory, on GPUs of the tests' own whose memory counts: instances
that share one start one after the other, and what doesn't fit is refused in bytes."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import pytest

from kvmig.core.errors import StartupError
from kvmig.process.nvml import read_devices
from kvmig_tools.nursery import Nursery
from kvmig_tools.served import Served
from tests.e2e.test_serve_gpus import FLAGS, OVERLAPPING, PATH, nursery_in
from tests.e2e.test_serve_units import Agent
from tests.support import fake_devices, gpu_nursery
from tests.support.fake_devices import FOLDER, GIB, STEPS, FakeMachine, FakeProcess, devices
from tests.support.gpu_nursery import Orders
from tests.support.streams import count_from, run_unmoved

pytestmark = pytest.mark.server

GPU_BYTES = 10 * GIB
OTHERS = GIB // 2
"""Of a process that is none of ours."""
NOBODY = 2**22 + 7
"""No process can have that id."""


class OneGpu:
    """A server of two instances on one GPU, of which somebody else has a part."""

    def __init__(self, nursery: Nursery, folder: Path, *flags: str, number: int = 1) -> None:
        self.folder = Path(nursery.environment[FOLDER])
        made = devices(number, GPU_BYTES + OTHERS)
        for one in made:
            one.processes = [FakeProcess(NOBODY, OTHERS)]
        FakeMachine(self.folder).install(made)
        Orders(folder).environment({})
        visible = ",".join(str(at) for at in range(number))
        self.environment = {**nursery.environment, "CUDA_VISIBLE_DEVICES": visible}
        self.served = Served(
            [*FLAGS, OVERLAPPING, *flags],
            nursery=nursery,
            environment=self.environment,
            log=folder / "log",
        )

    def held(self) -> dict[int, int]:
        """Bytes of each process of ours on the first GPU."""
        device = read_devices(self.environment | os.environ).devices[0]
        return {one.pid: one.used or 0 for one in device.processes if one.pid != NOBODY}


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with nursery_in(tmp_path_factory.mktemp("orders")) as made:
        yield made


@pytest.fixture
def sees(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process sees the GPUs, too."""
    monkeypatch.syspath_prepend(fake_devices.MODULES)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setenv(FOLDER, nursery.environment[FOLDER])


def folder_of(nursery: Nursery) -> Path:
    """Where its orders are."""
    return Path(nursery.environment[gpu_nursery.ORDERS])


@pytest.mark.long
def test_two_instances_share_a_gpu_without_a_flag_and_a_third_is_refused_in_bytes(
    nursery: Nursery, sees: None
) -> None:
    gpu = OneGpu(nursery, folder_of(nursery))
    with gpu.served as served:
        rows = served.get("instances")
        assert [row["gpus"] for row in rows] == [["0"], ["0"]]
        assert {row["host"] for row in rows} == {os.uname().nodename}
        held = gpu.held()
        assert held.keys() == {row["pid"] for row in rows}
        first, second = held.values()
        assert abs(first - second) < GPU_BYTES // 1_000  # neither has counted the other's memory
        assert first > 3.3 * GIB  # half of what was free, but for working memory and CUDA

        said = served.output()
        assert f"i0, i1, 4.89 GiB each of 10.50 GiB; 0.50 GiB are in use: process {NOBODY}" in said
        assert "waits until another one's start has measured its memory on GPU 0" in said
        title = " ".join(psutil.Process(rows[1]["pid"]).cmdline())
        assert f"i1 of {served.model} at {served.url}" in title
        assert f"on GPU 0 of {os.uname().nodename}" in title

        scraped = httpx.get(f"{served.url}/metrics", timeout=10).text
        for row in rows:
            assert (
                f'kvmig_instance_info{{gpus="0",host="{row["host"]}",instance="{row["id"]}",'
                f'model="{row["model"]}",pid="{row["pid"]}"}} 1.0'
            ) in scraped

        third = httpx.post(f"{served.url}/kvmig/v1/instances", json={"count": 1}, timeout=10)
        assert third.status_code == 409
        assert "instance i2 doesn't fit on GPU 0 " in third.text
        assert re.search(r"of 10\.50 GiB [01] bytes \(0\.00 GiB\) are free for it", third.text)
        assert "; i0 has 4.89 GiB, i1 has 4.89 GiB, process 4194311 has 0.50 GiB" in third.text

        (gpu.folder / STEPS).unlink()
        asyncio.run(answers(served))
    steps = [line.split()[1:] for line in (gpu.folder / STEPS).read_text().splitlines()]
    assert len({pid for pid, _, _ in steps}) == 2
    spans = sorted((float(began), float(ended)) for _, began, ended in steps)
    assert all(ended <= begins for (_, ended), (begins, _) in pairwise(spans))


async def answers(served: Served) -> None:
    """Of both instances at once."""
    bodies = [count_from(number, 20) for number in (100, 200, 300, 400)]
    await asyncio.gather(*(run_unmoved(served, PATH, body) for body in bodies))


def test_more_instances_than_a_gpu_holds_are_refused_before_anything_loads(
    nursery: Nursery,
) -> None:
    gpu = OneGpu(nursery, folder_of(nursery), "--instances=9")
    with pytest.raises(StartupError, match=r"instance i0 doesn't fit on GPU 0 ") as refused:
        gpu.served.start()
    assert "it needs 1344213248 bytes (1.25 GiB)" in str(refused.value)
    assert "starts" not in gpu.served.output()


@pytest.mark.long
def test_instances_take_the_bytes_that_they_are_given_on_gpus_of_different_sizes(
    nursery: Nursery, sees: None
) -> None:
    given = ["--instance-gpu-memory=6GiB", "--instance-gpus=i0: 0", "--instance-gpus=i1: 1"]
    gpu = OneGpu(nursery, folder_of(nursery), *given, number=2)
    small, large = devices(2, 8 * GIB)
    large.total = 24 * GIB
    FakeMachine(gpu.folder).install([small, large])
    with gpu.served as served:
        assert [row["gpus"] for row in served.get("instances")] == [["0"], ["1"]]
        held = [one.used for one in read_devices(gpu.environment | os.environ).devices]
        most = int(
            4.5 * GIB
        )  # 1 GiB is for CUDA, half of it taken; 1 GiB of working memory is free
        assert all(most - GIB // 100 < one <= most for one in held), held
        assert abs(held[0] - held[1]) < large.total // 1_000
        asyncio.run(answers(served))


@pytest.mark.long
def test_an_instance_of_two_workers_has_both_gpus_and_a_second_one_shares_them(
    nursery: Nursery, sees: None
) -> None:
    gpu = OneGpu(nursery, folder_of(nursery), "--tensor-parallel-size=2", number=2)
    with gpu.served as served:
        rows = served.get("instances")
        assert [row["gpus"] for row in rows] == [["0", "1"], ["0", "1"]]
        sizes = list(gpu.held().values())
        assert len(sizes) == 2  # a worker of each instance
        assert abs(sizes[0] - sizes[1]) < GPU_BYTES // 1_000
        asyncio.run(answers(served))


def test_an_instance_whose_unit_leaves_it_no_room_is_refused_before_anything_loads(
    nursery: Nursery, tmp_path: Path
) -> None:
    path = tmp_path / "unit"
    gpu = OneGpu(nursery, folder_of(nursery), f"--unit={path}", "--instances=1")
    with Agent(path, 9 * GIB), pytest.raises(StartupError, match=r"instance i0 ") as refused:
        gpu.served.start()
    assert "doesn't fit on GPU 0 " in str(refused.value)
    assert f"9.00 GiB are kept for KV cache of unit {path}, process {NOBODY}" in str(refused.value)
    assert "starts" not in gpu.served.output()
