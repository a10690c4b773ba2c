"""A KV cache on a GPU of the tests' own, and an engine's copies of it: one end of a transfer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvmig.engines.block_copies import BlockPlan
from kvmig.engines.device_copies import TMA_RUN, DeviceCopies
from tests.support.fake_gpu import DeviceCache, FakeGpu, FakeKernels
from tests.support.poisoned import make_cache

RUNS = (TMA_RUN, 3 * TMA_RUN + 16, 5 * TMA_RUN)
IDS, INTO = [6, 0, 3, 7], [1, 2, 5, 4]


class GpuEnd:
    """A KV cache of eight blocks on one GPU, and copies of it."""

    def __init__(self, device: int, seed: int, runs: Sequence[int] = RUNS) -> None:
        self.gpu = FakeGpu(device)
        self.kernels = FakeKernels(self.gpu)
        self.launches = self.kernels.launches
        self.host = make_cache(seed, [*runs], [16] * len(runs), 8)
        self.cache = DeviceCache(self.gpu, self.host)
        self.size = self.cache.layout.block_bytes
        self.copies = DeviceCopies(BlockPlan(self.cache.layout), self.gpu, self.kernels, False)

    def blocks(self, ids: list[int]) -> bytes:
        """Some blocks, fused, as they were at the start."""
        return b"".join(self.host.block(number) for number in ids)

    def queue_copy(self, work: Callable[[], object]) -> None:
        """Queue this where the copies' kernels run, in front of the next one."""
        self.gpu.queue(self.copies._stream.handle, work)

    def settle_copies(self) -> None:
        """Wait for the copies that were given up."""
        self.copies._stream.settle()

    def forget_copies(self) -> None:
        """Let go what the copies that were given up held."""
        self.copies._unsettled.clear()

    def close(self) -> None:
        """Give all back."""
        self.copies.close()
        self.kernels.close()
        self.cache.free()
