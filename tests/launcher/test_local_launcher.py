"""Where the launcher of this host puts llumlets: GPUs are shared, and free again when one ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import msgspec
import pytest

from kvmig.core.config import ClusterConfig
from kvmig.core.devices import GIB, DeviceInventory, DeviceRecord
from kvmig.core.errors import ConfigError, StartupError
from kvmig.launcher import local
from kvmig.launcher.gpu_division import divide
from kvmig.launcher.gpu_starts import GpuStarts
from kvmig.launcher.launch import LlumletLaunch, PlannedInstance
from kvmig.launcher.local import LocalHost, LocalLauncher, LocalLlumlet
from kvmig.process.supervisor import ChildProcess, ProcessPort, Spawn


class FakeProcess:
    """A process that never was."""

    def __init__(self, gpus: str) -> None:
        self.gpus = gpus
        self.pid = 0
        self.returncode: int | None = None


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[FakeProcess]:
    """The children that were started, in order."""
    children: list[FakeProcess] = []

    def run(module: str, environment: Mapping[str, str], title: str = "") -> Spawn:
        async def spawn(stdin: int, announced: int) -> ProcessPort:
            if environment.get("BROKEN"):
                raise StartupError(f"{module} can't be started")
            children.append(FakeProcess(environment.get("CUDA_VISIBLE_DEVICES", "")))
            return cast("ProcessPort", children[-1])

        return spawn

    monkeypatch.setattr(local, "running", run)
    return children


def launch(name: str) -> LlumletLaunch:
    return LlumletLaunch(
        cluster="test", instance=name, secret=b"s", config=ClusterConfig(), engine_argv=[]
    )


def devices(*gpus: int) -> tuple[DeviceRecord, ...]:
    """GPUs of these numbers."""
    return tuple(
        DeviceRecord(id=str(one), index=one, uuid=f"GPU-{one}", name="H100", total=80 * GIB)
        for one in gpus
    )


def launcher_on(*gpus: int, **environment: str) -> LocalLauncher:
    """Of a host with these GPUs, which nobody has planned yet."""
    return LocalLauncher("test", GpuStarts(divide(devices(*gpus), {})), 1, environment)


async def test_each_worker_has_a_gpu_until_there_are_no_more(started: list[FakeProcess]) -> None:
    launcher = launcher_on(4, 5, 6)

    for name, workers in (("i0", 1), ("i1", 2), ("i2", 1)):
        await launcher.llumlet(launch(name), workers)

    assert [child.gpus for child in started] == ["4", "5,6", "4"]


async def test_the_gpu_of_an_instance_that_ended_is_free_again(started: list[FakeProcess]) -> None:
    launcher = launcher_on(4, 5)
    for name in ("i0", "i1"):
        await launcher.llumlet(launch(name), 1)
    started[1].returncode = 0

    await launcher.llumlet(launch("i1"), 1)

    assert [child.gpus for child in started] == ["4", "5", "5"]


async def test_a_start_that_failed_holds_no_gpu(started: list[FakeProcess]) -> None:
    broken = launcher_on(4, 5, BROKEN="1")
    with pytest.raises(StartupError, match="llumlet_main can't be started"):
        await broken.llumlet(launch("i0"), 1)

    assert started == []
    del broken._environment["BROKEN"]
    await broken.llumlet(launch("i1"), 1)
    assert started[0].gpus == "4"


async def test_on_a_cpu_there_is_no_gpu_to_see(started: list[FakeProcess]) -> None:
    await launcher_on().llumlet(launch("i0"), 2)

    assert started[0].gpus == ""


async def test_what_a_killed_instance_shared_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[bool] = []

    async def stop(child: ChildProcess, timeout_s: float) -> None:
        raise OSError("even then")

    monkeypatch.setattr(ChildProcess, "stop", stop)
    monkeypatch.setattr("kvmig.launcher.local.sweep", lambda: swept.append(True))
    with pytest.raises(OSError, match="even then"):
        await LocalLlumlet.__new__(LocalLlumlet).stop()
    assert swept == [True]


async def test_an_instance_runs_on_the_gpus_that_it_is_given(started: list[FakeProcess]) -> None:
    launcher = launcher_on(4, 5, 6)

    await launcher.llumlet(msgspec.structs.replace(launch("i0"), gpus=("6", "5")), 2)
    await launcher.llumlet(launch("i1"), 1)

    assert [child.gpus for child in started] == ["6,5", "4"]


@pytest.mark.parametrize(
    ("gpus", "sentence"),
    [
        (["7"], "gpus has 7, allowed are 4, 5"),
        (["4", "5"], "gpus has 2, must be one for each of 1 workers"),
    ],
)
def test_gpus_that_do_not_suit_are_refused(gpus: list[str], sentence: str) -> None:
    launcher = launcher_on(4, 5)
    with pytest.raises(ConfigError, match=sentence):
        launcher.check_room([PlannedInstance("i0", 1, [])], gpus)


@pytest.mark.parametrize(
    ("threads", "gpus", "all_cores"), [("", 0, True), ("2", 0, False), ("", 1, False)]
)
def test_instances_take_all_cores_where_nobody_set_their_threads(
    threads: str, gpus: int, all_cores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "ForkServerPool", lambda *_: None)
    monkeypatch.setattr(
        local, "read_devices", lambda _: DeviceInventory(devices=devices(*range(gpus)))
    )
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert LocalHost("vllm", 1).all_cores == all_cores
