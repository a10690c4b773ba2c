"""The GPU's path without a GPU: calls that end late, or fail, and give their memory back."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kvmig.ground.errors import KernelUnavailable, KvmigError
from kvmig.ground.layout import Region
from kvmig.kernels import cuda, driver, ipc, nvrtc
from kvmig.kernels.call_memory import SMALLEST
from kvmig.kernels.face import Pending
from kvmig.kernels.gpu import GpuKernels
from tests.emulated_cuda import HostDevice

REGIONS = (Region(4096, 64, 64),)


class Launches:
    """A `gpu.Launcher` that launches nothing; `fails`: it refuses."""

    name = "cuda"

    def __init__(self) -> None:
        self.fails = False

    def launch(self, *arguments: int) -> None:
        if self.fails:
            raise KvmigError("launch: out of luck")

    copy = copy_tma = checksum = reshard = pack_fp8 = unpack_fp8 = launch


class World:
    def __init__(self, late: int = 0) -> None:
        self.device = HostDevice(late)
        self.launches = Launches()
        self.kernels = GpuKernels(self.launches, self.device)

    def start(self, n: int = 2) -> Pending:
        ids: NDArray[np.int64] = np.arange(n, dtype=np.int64)
        return self.kernels.copy(REGIONS, REGIONS, ids, ids, checksums=True)

    def assert_all_comes_back(self) -> None:
        """Once nothing is late any more."""
        self.device.fails = ""
        self.device.events = dict.fromkeys(self.device.events, 0)
        self.kernels.close()
        assert self.device.buffers == {}
        assert self.device.events == {}


def test_a_call_is_done_when_its_event_happens() -> None:
    world = World(late=3)
    call = world.start()
    assert [call.done() for _ in range(4)] == [False, False, False, True]
    assert len(call.wait()) == 2
    world.assert_all_comes_back()


def test_a_call_that_never_ends_is_a_timeout() -> None:
    world = World(late=1 << 40)
    with pytest.raises(TimeoutError, match=r"not done after 0\.01 s"):
        world.start().wait(timeout_s=0.01)
    world.assert_all_comes_back()


def test_calls_one_after_the_other_use_the_same_memory() -> None:
    world = World()
    for _ in range(5):
        world.start().wait()
    assert len(world.device.buffers) == 2
    world.assert_all_comes_back()


def test_calls_that_nobody_waits_for_give_their_memory_back() -> None:
    world = World()
    for _ in range(5):
        world.start()
    assert len(world.device.buffers) == 2
    world.assert_all_comes_back()


def test_calls_in_flight_have_memory_of_their_own() -> None:
    world = World(late=1 << 40)
    calls = [world.start(), world.start()]
    assert len(world.device.buffers) == 4
    assert not any(call.done() for call in calls)
    world.assert_all_comes_back()


def test_a_large_call_gets_more_memory() -> None:
    world = World()
    world.start(1).wait()
    world.start(SMALLEST).wait()
    sizes = sorted(len(buffer) for buffer in world.device.buffers.values())
    assert sizes == [SMALLEST, SMALLEST, 32 * SMALLEST, 32 * SMALLEST]
    world.assert_all_comes_back()


@pytest.mark.parametrize(
    "step", ["enter", "allocate", "allocate_pinned", "new_event", "upload", "download"]
)
def test_a_call_that_fails_on_its_way_gives_its_memory_back(step: str) -> None:
    world = World()
    world.device.fails = step
    with pytest.raises(KvmigError, match=f"{step}: out of luck"):
        world.start()
    world.assert_all_comes_back()


def test_the_memory_of_a_refused_launch_is_kept_until_its_upload_is_over() -> None:
    world = World(late=1)
    world.launches.fails = True
    with pytest.raises(KvmigError, match="launch: out of luck"):
        world.start()
    world.launches.fails = False
    world.start()
    assert len(world.device.buffers) == 4
    world.assert_all_comes_back()


def test_memory_of_a_call_whose_end_is_not_marked_is_nobody_elses_until_the_end() -> None:
    world = World()
    world.device.fails = "record"
    with pytest.raises(KvmigError, match="record: out of luck"):
        world.start()
    world.device.fails = ""
    world.start().wait()
    assert len(world.device.buffers) == 4
    world.assert_all_comes_back()


def test_a_device_that_fails_meanwhile_is_an_error_of_the_call() -> None:
    world = World(late=1)
    call = world.start()
    world.device.fails = "happened"
    with pytest.raises(KvmigError, match="happened: out of luck"):
        call.wait()


def test_empty_lists_launch_nothing() -> None:
    world = World()
    world.launches.fails = True
    none = np.zeros(0, np.int64)
    assert world.kernels.copy(REGIONS, REGIONS, none, none, checksums=True).wait() == []
    assert world.kernels.copy((), (), none, none, checksums=False).wait() == []
    assert world.kernels.checksum((), np.zeros(2, np.int64)).wait() == [0, 0]
    world.assert_all_comes_back()


@pytest.mark.parametrize("region", [Region(8, 64, 64), Region(64, 72, 64), Region(64, 64, 60)])
def test_the_tma_refuses_what_is_not_on_its_boundaries(region: Region) -> None:
    ids = np.zeros(1, np.int64)
    with pytest.raises(KernelUnavailable, match="not on 16-byte boundaries"):
        World().kernels.copy_tma(REGIONS, (region,), ids, ids, checksums=False)


def no_gpu() -> bool:
    try:
        driver.version()
        driver.Driver(0)
    except KernelUnavailable:
        return True
    return False


without_gpu = pytest.mark.skipif(not no_gpu(), reason="there is a GPU here")


@without_gpu
@pytest.mark.parametrize("module", [cuda, nvrtc])
def test_without_a_gpu_the_kernels_say_so(module: object) -> None:
    load = module.load  # type: ignore[attr-defined]
    with pytest.raises(KernelUnavailable, match="no NVIDIA"):
        load("cuda")


@pytest.mark.parametrize("module", [cuda, nvrtc])
def test_memory_of_the_host_is_not_for_the_gpus_kernels(module: object) -> None:
    load = module.load  # type: ignore[attr-defined]
    with pytest.raises(KernelUnavailable, match="not for memory of the cpu"):
        load("cpu")


def test_a_handle_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="IPC handle of 3 bytes, not 64"):
        ipc.import_ipc(ipc.IpcHandle(b"abc", 0))
