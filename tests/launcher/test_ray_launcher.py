"""What a llumlet on a Ray node is started with: addresses, environment, its share of the node."""

from __future__ import annotations

import asyncio
import platform
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvmig.core.config import ClusterConfig, LifecycleConfig, MigrationConfig
from kvmig.core.errors import ConfigError
from kvmig.launcher.environment import GIB, part_of_memory
from kvmig.launcher.gpu_division import NoRoom
from kvmig.launcher.launch import LlumletLaunch
from kvmig.launcher.ray_environment import forwarded
from kvmig.launcher.ray_launcher import (
    LlumletActor,
    RayOrder,
    bound_to,
    node_environment,
)
from kvmig.process.supervisor import ChildProcess, Spawn
from tests.support import fake_devices
from tests.support.fake_devices import FakeMachine, FakeProcess, devices
from tests.support.inside import child_of


def order(**fields: Any) -> RayOrder:
    launch = LlumletLaunch(
        cluster="test", instance="i0", secret=b"s", config=ClusterConfig(), engine_argv=["m", "-x"]
    )
    usual: dict[str, Any] = {
        "launch": launch, "node": "n1", "workers": 1, "threads": 3, "share": 1.0, "gpu": 0.0,
        "model": "m", "kv_bytes": None, "environment": {},
    }  # fmt: skip
    return RayOrder(**{**usual, **fields})


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[LlumletLaunch]:
    """What children were told."""
    told: list[LlumletLaunch] = []

    async def start(name: str, spawn: Spawn, launch: LlumletLaunch) -> SimpleNamespace:
        told.append(launch)
        return SimpleNamespace()

    monkeypatch.setattr(ChildProcess, "start", start)
    return told


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    """Of two GPUs, of which Ray gives the second one."""
    made = FakeMachine(tmp_path)
    made.install(devices(2, 80 * GIB))
    monkeypatch.syspath_prepend(fake_devices.MODULES)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setenv(fake_devices.FOLDER, str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return made


def test_sockets_bind_to_the_nodes_own_address() -> None:
    config = bound_to(ClusterConfig(migration=MigrationConfig(max_stages=3)), "198.18.77.2")

    assert config.control_host == "198.18.77.2"
    assert config.migration.max_stages == 3


def test_the_users_settings_of_libraries_hold_on_every_node() -> None:
    mine = {"VLLM_LOGGING_LEVEL": "DEBUG", "HF_HOME": "/hf", "VLLM_HOST_IP": "10.0.0.1",
            "KVMIG_SECRET": "s", "VLLM_API_KEY": "k", "PATH": "/bin",
            "CUDA_VISIBLE_DEVICES": "3"}  # fmt: skip
    assert forwarded(mine) == {"VLLM_LOGGING_LEVEL": "DEBUG", "HF_HOME": "/hf"}


def test_a_child_knows_nothing_of_ray_and_keeps_the_nodes_paths() -> None:
    own = {"RAY_JOB_ID": "01", "PATH": "/node/bin", "OMP_NUM_THREADS": "1"}

    environment = node_environment(order(environment={"HF_HOME": "/hf"}), own)

    assert not any(name.startswith("RAY_") for name in environment)
    assert environment["PATH"] == "/node/bin"
    assert environment["HF_HOME"] == "/hf"
    assert environment["OMP_NUM_THREADS"] == "3", "its CPUs, not what Ray has set for its worker"


def test_the_users_number_of_threads_goes_before_the_nodes() -> None:
    mine = order(environment={"OMP_NUM_THREADS": "7"})
    assert node_environment(mine, {"OMP_NUM_THREADS": "1"})["OMP_NUM_THREADS"] == "7"


def test_a_child_sees_the_gpus_that_ray_gave_its_actor() -> None:
    environment = node_environment(order(gpu=2.0), {"CUDA_VISIBLE_DEVICES": "5,6"})

    assert environment["CUDA_VISIBLE_DEVICES"] == "5,6"
    assert "LD_PRELOAD" not in environment


async def test_an_instance_takes_its_share_of_the_nodes_memory(
    started: list[LlumletLaunch],
) -> None:
    await LlumletActor().start(order(), "127.0.0.1")
    await LlumletActor().start(order(kv_bytes=GIB), "127.0.0.1")

    shared, given = (launch.engine_argv for launch in started)
    assert (shared[0], shared[2:]) == ("--kv-cache-memory-bytes", ["m", "-x"])
    assert given == ["m", "-x"]


async def test_an_engine_that_divides_no_memory_gets_no_flags_for_it(
    started: list[LlumletLaunch],
) -> None:
    launch = msgspec.structs.replace(order().launch, config=ClusterConfig(engine="toy"))
    await LlumletActor().start(order(launch=launch), "198.18.77.2")
    assert started[0].engine_argv == ["m", "-x"]


async def test_instances_on_one_gpu_share_its_memory(
    started: list[LlumletLaunch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    await LlumletActor().start(order(gpu=0.5), "127.0.0.1")
    await LlumletActor().start(order(gpu=1.0), "127.0.0.1")

    assert started[0].engine_argv == ["--gpu-memory-utilization", "0.450", "m", "-x"]
    assert started[1].engine_argv == ["m", "-x"]


async def test_a_node_measures_the_gpu_that_ray_gave_one_instance_after_the_other(
    started: list[LlumletLaunch], machine: FakeMachine
) -> None:
    first, second = LlumletActor(), LlumletActor()
    await first.start(order(gpu=0.5), "127.0.0.1")
    starting = asyncio.create_task(second.start(order(gpu=0.5), "127.0.0.1"))
    await asyncio.sleep(0.3)
    assert not starting.done(), "it would count the memory that the first one takes"
    start = child_of(first).gpu_start
    assert start is not None
    start.end()
    await starting
    for one in started:
        assert one.engine_argv == ["--gpu-memory-utilization", "0.4875", "m", "-x"]
        assert one.where == f"GPU 1 of {platform.node()}"


@pytest.mark.parametrize("total", [24, 80])
async def test_an_instance_has_the_bytes_that_it_is_given_whatever_gpu_ray_gives(
    started: list[LlumletLaunch], machine: FakeMachine, total: int
) -> None:
    machine.install(devices(2, total * GIB))
    await LlumletActor().start(of_bytes(20 * GIB), "127.0.0.1")
    share, part, *_ = started[0].engine_argv
    assert share == "--gpu-memory-utilization"
    assert 19 * GIB - total * GIB / 10_000 <= float(part) * total * GIB <= 19 * GIB


async def test_bytes_of_a_gpu_are_refused_where_nvml_shows_none(
    started: list[LlumletLaunch],
) -> None:
    with pytest.raises(ConfigError, match=f"--instance-gpu-memory is {GIB}, must be left out: NV"):
        await LlumletActor().start(of_bytes(GIB), "127.0.0.1")
    assert not started


def of_bytes(each: int) -> RayOrder:
    """The order of an instance that takes so many bytes of its GPU."""
    config = ClusterConfig(lifecycle=LifecycleConfig(instance_gpu_memory=each))
    launch = msgspec.structs.replace(order().launch, config=config)
    return order(launch=launch, gpu=1.0)


async def test_what_has_no_room_on_its_nodes_gpu_is_refused_there_in_bytes(
    started: list[LlumletLaunch], machine: FakeMachine
) -> None:
    gpus = devices(2, 80 * GIB)
    gpus[1].processes = [FakeProcess(1, 79 * GIB)]
    machine.install(gpus)
    with pytest.raises(NoRoom, match=r"instance i0 doesn't fit on GPU 1 .* process 1 .* 79.00 GiB"):
        await LlumletActor().start(order(gpu=1.0), "127.0.0.1")
    assert not started


async def test_too_small_a_share_is_refused(started: list[LlumletLaunch]) -> None:
    with pytest.raises(ConfigError, match="not enough memory for 1 instances"):
        await LlumletActor().start(order(share=1e-4), "127.0.0.1")
    assert not started


def test_a_part_of_memory_is_never_more_than_is_available() -> None:
    assert 0 < part_of_memory(0.01) < part_of_memory(1.0)


def test_an_order_crosses_to_the_actor_unchanged() -> None:
    sent = order(environment={"HF_HOME": "/hf"})
    assert msgspec.json.decode(msgspec.json.encode(sent), type=RayOrder) == sent
