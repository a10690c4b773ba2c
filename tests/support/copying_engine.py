"""Fake engines whose copies run on a copy thread, as real engines' do: in the host's memory, or by
the CUDA kernels on a GPU of the tests' own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from kvmig.core.layout import BlockRegion
from kvmig.engines.block_copies import BlockCopies, BlockPlan, CopyBackend
from kvmig.engines.device_copies import DeviceCopies
from tests.support.fake_engine import BLOCK_BYTES, FakeEngine
from tests.support.fake_gpu import FakeGpu, FakeKernels
from tests.support.waiting import wait_until

HELD_S = 30.0
"""The longest that a copy is held: a test that forgets it fails."""


class WatchedCopies:
    """A `CopyBackend` that does what a test wants before each scatter, on the copy thread."""

    def __init__(self, by: CopyBackend, free: Callable[[], Sequence[int]]) -> None:
        """free: the engine's free blocks now."""
        self._by = by
        self._free = free
        self.before: Callable[[int], object] = lambda number: None
        """Called with the scatter's number."""
        self.change: Callable[[int, list[int]], list[int]] = lambda number, sums: sums
        """The checksums that the scatter of that number returns."""
        self.begun: list[list[int]] = []
        """Blocks of each scatter that has begun."""
        self.over = 0
        """Scatters that have ended."""
        self.strayed: list[int] = []
        """Blocks that were free while a scatter was at them."""

    def gather(self, ids: Sequence[int], out: memoryview, urgent: bool = False) -> list[int]:
        return self._by.gather(ids, out, urgent)

    def scatter(self, ids: Sequence[int], data: memoryview, urgent: bool = False) -> list[int]:
        number = len(self.begun)
        self.begun.append(list(ids))
        self._note_free(ids)
        self.before(number)
        self._note_free(ids)
        sums = self._by.scatter(ids, data, urgent)
        self._note_free(ids)
        self.over += 1
        return self.change(number, sums)

    def _note_free(self, ids: Sequence[int]) -> None:
        self.strayed += set(ids) & set(self._free())


class HeldScatter:
    """The scatter of one number, which waits on the copy thread until a test lets it go on."""

    def __init__(self, copies: WatchedCopies, number: int) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self._number = number
        self._then = copies.before
        copies.before = self._hold

    def _hold(self, number: int) -> None:
        self._then(number)
        if number == self._number:
            self.begun.set()
            assert self.go_on.wait(HELD_S)


class _HostCopies:
    def __init__(self, engine: CopyingEngine) -> None:
        self._engine = engine

    def gather(self, ids: Sequence[int], out: memoryview, urgent: bool = False) -> list[int]:
        return FakeEngine.copy_out(self._engine, ids, out)

    def scatter(self, ids: Sequence[int], data: memoryview, urgent: bool = False) -> list[int]:
        return FakeEngine.copy_in(self._engine, ids, data)


class CopyingEngine(FakeEngine):
    """In the host's memory. `close` it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.asked = 0
        """Scatters that were asked for."""
        self.inside = 0
        """Those whose callers wait."""
        self.most = 0
        """The most of them at once."""
        self.watched = WatchedCopies(self._backend(), lambda: self.free)
        self.copies = BlockCopies(self.layout, self.watched)

    def _backend(self) -> CopyBackend:
        return _HostCopies(self)

    async def gather(
        self, block_ids: Sequence[int], out: memoryview, urgent: bool = False
    ) -> list[int]:
        self.urgent.append(urgent)
        await self._enter("gather")
        return await self.copies.gather(block_ids, out, urgent)

    async def scatter(
        self, block_ids: Sequence[int], fused: memoryview, urgent: bool = False
    ) -> list[int]:
        self.urgent.append(urgent)
        await self._enter("scatter")
        self.asked += 1
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            return await self.copies.scatter(block_ids, fused, urgent)
        finally:
            self.inside -= 1

    def hold(self, number: int) -> HeldScatter:
        """Have the scatter of that number wait, and the one before it until this one is asked
        for."""

        def await_next(reached: int) -> None:
            if reached == number - 1:
                wait_until(lambda: self.asked > number, HELD_S)

        if number:
            self.watched.before = await_next
        return HeldScatter(self.watched, number)

    def close(self) -> None:
        self.copies.close()


class DeviceBytes:
    """A part of a GPU's memory that a test reads and writes like a bytearray."""

    def __init__(self, gpu: FakeGpu, nbytes: int) -> None:
        self._gpu = gpu
        self._nbytes = nbytes
        self.address = gpu.allocate(nbytes)
        gpu.write(self.address, bytes(nbytes))

    def __len__(self) -> int:
        return self._nbytes

    def __getitem__(self, part: slice) -> bytes:
        return self._gpu.read(self.address + part.start, part.stop - part.start)

    def __setitem__(self, part: slice, data: bytes) -> None:
        self._gpu.write(self.address + part.start, data)

    def free(self) -> None:
        self._gpu.free(self.address)


class GpuEngine(CopyingEngine):
    """On a GPU of the tests' own, while these are `installed`."""

    def __init__(self, device: int, **options: Any) -> None:
        self.gpu = FakeGpu(device)
        self.kernels = FakeKernels(self.gpu)
        super().__init__(**options)

    def _backend(self) -> CopyBackend:
        cache = DeviceBytes(self.gpu, len(self.memory))
        self._cache, self.memory = cache, cache  # type: ignore[assignment]
        region = BlockRegion(cache.address, BLOCK_BYTES, BLOCK_BYTES)
        self.layout = replace(self.layout, regions=(region,), gpu=self.gpu.ordinal)
        self._device_copies = DeviceCopies(BlockPlan(self.layout), self.gpu, self.kernels, False)
        return self._device_copies

    def copy_out(self, block_ids: Sequence[int], out: memoryview) -> list[int]:
        return self.copies.start_gather(block_ids, out).result(HELD_S)

    def copy_in(self, block_ids: Sequence[int], fused: memoryview) -> list[int]:
        return self.copies.start_scatter(block_ids, fused).result(HELD_S)

    def close(self) -> None:
        super().close()
        self._device_copies.close()
        self.kernels.close()
        self._cache.free()


Kind = Literal["host", "gpu"]


def engine_of(kind: Kind, device: int, **options: Any) -> CopyingEngine:
    """device: the GPU's number, if it is one."""
    return GpuEngine(device, **options) if kind == "gpu" else CopyingEngine(**options)
