"""The GPU's path without a GPU: calls that end late, or fail, and give their memory back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from kvmig.core.errors import KernelUnavailable, KvmigError
from kvmig.core.layout import BlockRegion
from kvmig.kernels import cuda, nvrtc
from kvmig.kernels.api import BlockCopy, PendingWork
from kvmig.kernels.call_memory import SMALLEST
from kvmig.kernels.gpu import GpuKernels
from tests.support import fake_gpu
from tests.support.fake_gpu import FakeGpu
from tests.support.inside import forget_driver

pytestmark = pytest.mark.usefixtures("gpus")
"""Which see that all comes back."""

REGIONS = (BlockRegion(4096, 64, 64),)


class Launches:
    """A `gpu.Launcher` that launches nothing; `fails`: it refuses."""

    name = "cuda"

    def __init__(self) -> None:
        self.fails = False

    def launch(self, *arguments: int) -> None:
        if self.fails:
            raise KvmigError("launch: out of luck")

    copy = copy_tma = checksum = launch


class World:
    def __init__(self) -> None:
        self.device = FakeGpu()
        self.launches = Launches()
        self.kernels = GpuKernels(self.launches, self.device)

    def start(self, n: int = 2) -> PendingWork:
        ids: NDArray[np.int64] = np.arange(n, dtype=np.int64)
        return self.kernels.copy(BlockCopy(REGIONS, REGIONS, ids, ids), checksums=True)

    def close(self) -> None:
        """Once nothing fails or is late any more."""
        fake_gpu.library().fakegpu_mend()
        self.device.finish(0)
        self.kernels.close()


@pytest.fixture
def world(gpus: None) -> Iterator[World]:
    world = World()
    yield world
    world.close()


def calls_with_memory() -> int:
    """For how many calls there is memory now."""
    held = fake_gpu.held()
    assert held["memory"] == held["pinned"] == held["events"]
    return held["memory"]


def test_a_call_is_done_when_its_event_happens(world: World) -> None:
    world.device.stick()
    call = world.start()
    assert [call.done() for _ in range(3)] == [False, False, False]
    world.device.stick(False)
    assert len(call.wait()) == 2
    assert call.done()


def test_a_call_that_never_ends_is_a_timeout(world: World) -> None:
    world.device.stick()
    with pytest.raises(TimeoutError, match=r"not done after 0\.01 s"):
        world.start().wait(timeout_s=0.01)


def test_calls_one_after_the_other_use_the_same_memory(world: World) -> None:
    for _ in range(5):
        world.start().wait()
    assert calls_with_memory() == 1


def test_calls_that_nobody_waits_for_give_their_memory_back(world: World) -> None:
    for _ in range(5):
        world.start()
        world.device.finish(0)
    assert calls_with_memory() == 1


def test_calls_in_flight_have_memory_of_their_own(world: World) -> None:
    world.device.stick()
    calls = [world.start(), world.start()]
    assert calls_with_memory() == 2
    assert not any(call.done() for call in calls)


def test_a_large_call_gets_more_memory(world: World) -> None:
    world.start(1).wait()
    world.start(SMALLEST).wait()
    assert fake_gpu.sizes() == [SMALLEST, 32 * SMALLEST]


@pytest.mark.parametrize(
    "step",
    [
        *("cuCtxSetCurrent", "cuMemAlloc_v2", "cuMemHostAlloc", "cuEventCreate"),
        *("cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"),
    ],
)
def test_a_call_that_fails_on_its_way_gives_its_memory_back(world: World, step: str) -> None:
    fake_gpu.fail(step)
    with pytest.raises(KvmigError, match=f"{step}: invalid argument"):
        world.start()


def test_the_memory_of_a_refused_launch_is_kept_until_its_upload_is_over(world: World) -> None:
    world.device.stick()
    world.launches.fails = True
    with pytest.raises(KvmigError, match="launch: out of luck"):
        world.start()
    world.launches.fails = False
    world.start()
    assert calls_with_memory() == 2


def test_memory_of_a_call_whose_end_is_not_marked_is_nobody_elses_until_the_end(
    world: World,
) -> None:
    fake_gpu.fail("cuEventRecord")
    with pytest.raises(KvmigError, match="cuEventRecord"):
        world.start()
    fake_gpu.fail("")
    world.start().wait()
    assert calls_with_memory() == 2


def test_a_device_that_fails_meanwhile_is_an_error_of_the_call(world: World) -> None:
    call = world.start()
    fake_gpu.fail("cuEventQuery")
    with pytest.raises(KvmigError, match="cuEventQuery"):
        call.wait()


def test_empty_lists_launch_nothing(world: World) -> None:
    world.launches.fails = True
    none = np.zeros(0, np.int64)
    assert world.kernels.copy(BlockCopy(REGIONS, REGIONS, none, none), checksums=True).wait() == []
    assert world.kernels.copy(BlockCopy((), (), none, none), checksums=False).wait() == []
    assert world.kernels.checksum((), np.zeros(2, np.int64)).wait() == [0, 0]


@pytest.mark.parametrize(
    "region", [BlockRegion(8, 64, 64), BlockRegion(64, 72, 64), BlockRegion(64, 64, 60)]
)
def test_the_tma_refuses_what_is_not_on_its_boundaries(world: World, region: BlockRegion) -> None:
    ids = np.zeros(1, np.int64)
    with pytest.raises(KernelUnavailable, match="not on 16-byte boundaries"):
        world.kernels.copy_tma(BlockCopy(REGIONS, (region,), ids, ids), checksums=False)


@pytest.mark.parametrize("module", [cuda, nvrtc])
def test_without_a_gpu_the_kernels_say_so(module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    load = module.load  # type: ignore[attr-defined]
    forget_driver()
    with monkeypatch.context() as patch:
        patch.setenv("KVMIG_FAKE_NO_GPU", "1")
        with pytest.raises(KernelUnavailable, match="no NVIDIA"):
            load("cuda")
    forget_driver()


@pytest.mark.parametrize("module", [cuda, nvrtc])
def test_memory_of_the_host_is_not_for_the_gpus_kernels(module: object) -> None:
    load = module.load  # type: ignore[attr-defined]
    with pytest.raises(KernelUnavailable, match="not for memory of the cpu"):
        load("cpu")
