"""Copies between a KV cache in a GPU's memory and buffers of fused blocks, there or on the host.

A buffer in a GPU's memory (cuda-ipc) is what the kernels write and read. One on the host
(shm, tcp) they reach by scratch memory of the GPU, from which the copy engine goes over PCIe to
the buffer; or, where the buffer's pages can't be pinned, to pinned scratch and then by the CPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

import numpy as np

from kvmig.engines.copy_pass import Pass
from kvmig.engines.step_marks import StepMarks
from kvmig.ground.errors import UnsupportedLayout
from kvmig.ground.layout import KVLayout, fused
from kvmig.kernels.arrays import Memory, memory_of
from kvmig.kernels.copy import start_copy
from kvmig.kernels.driver import Driver, current_device
from kvmig.kernels.face import Kernels, Pending
from kvmig.kernels.pinned import Pins
from kvmig.kernels.select import kernels
from kvmig.kernels.side_stream import Device, SideStream

SCRATCH_BYTES = 16 << 20
"""Of the GPU's memory, and as much pinned memory where that is needed."""
CTAS_FOR_HOST = 8
"""As many as keep PCIe busy."""
CTAS_ON_DEVICE = 32
"""As many as leave the GPU to the engine's steps."""


class Plan(Protocol):
    """Where fused blocks lie in the cache: `vllm.units.UnitMap`, or `Blocks`."""

    unit_bytes: int

    def gather(self, unit_ids: Sequence[int], address: int) -> Iterable[Pass]:
        """Copies from the cache to the buffer at `address`, [n] fused."""
        ...

    def scatter(self, unit_ids: Sequence[int], address: int) -> Iterable[Pass]:
        """Copies from the buffer to the cache."""
        ...


class Blocks:
    """An engine's blocks as it keeps them."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self.unit_bytes = layout.block_bytes

    def gather(self, unit_ids: Sequence[int], address: int) -> Iterator[Pass]:
        """One copy of all."""
        layout, n = self._layout, len(unit_ids)
        ids, places = np.asarray(unit_ids, np.int64), np.arange(n, dtype=np.int64)
        buffer = fused(address, layout)
        yield Pass(layout.regions, ids, layout.num_blocks, buffer, places, n)

    scatter = gather


class DeviceCopies:
    """`copies.Copies` on a GPU, on streams of its own, of which the urgent one has the device's
    highest priority; one thread copies, one at a time.

    When a copy returns or raises, the GPU has left its blocks and its buffer (but for a
    TimeoutError). Raises KvmigError when the device fails.
    """

    def __init__(
        self,
        plan: Plan,
        device: Device,
        by: Kernels,
        steps_overlap: bool,
        scratch_bytes: int = SCRATCH_BYTES,
    ) -> None:
        """steps_overlap: of the engine, see `StepMarks`; scratch_bytes: room for one block
        is there in any case. Raises UnsupportedLayout if a plan needs several copies."""
        _check(plan)
        self._plan = plan
        self._device = device
        self._by = by
        self._fit = max(1, scratch_bytes // plan.unit_bytes)
        self._nbytes = self._fit * plan.unit_bytes
        self._pinned = 0
        with ExitStack() as held:
            self._marks = StepMarks(device, steps_overlap)
            held.callback(self._marks.close)
            self._streams: list[SideStream] = []
            for priority in (0, device.stream_priorities()[1]):
                self._streams.append(SideStream(device, priority))
                held.callback(self._streams[-1].close)
            self._stream = self._streams[0]
            self._scratch = device.allocate(self._nbytes)
            held.callback(device.free, self._scratch)
            self._pins = Pins(device)
            held.callback(self._pins.close)
            self._held = held.pop_all()

    def after_step(self, stream: int) -> None:
        """On the engine's thread, after each step; `stream`: what it queued its work on."""
        self._marks.stepped(stream)

    def gather(self, ids: Sequence[int], out: memoryview, urgent: bool = False) -> list[int]:
        """Blocks [n] to `out` [n * unit_bytes]; their n checksums."""
        memory = self._checked(ids, out)
        with self._settled(urgent) as pendings:
            if memory.device == "cuda":
                pendings.append(self._gather(ids, memory.address, CTAS_ON_DEVICE))
            else:
                pinned = self._pins.has(out)
                for part, address in self._parts(ids, memory.address):
                    pendings.append(self._gather(part, self._scratch, CTAS_FOR_HOST))
                    self._to_host(address, len(part) * self._plan.unit_bytes, pinned)
        return _sums(pendings)

    def scatter(self, ids: Sequence[int], data: memoryview, urgent: bool = False) -> list[int]:
        """`data` [n * unit_bytes] to blocks [n]; n checksums of what came there."""
        memory = self._checked(ids, data)
        with self._settled(urgent) as pendings:
            if memory.device == "cuda":
                pendings.append(self._scatter(ids, memory.address, CTAS_ON_DEVICE))
            else:
                pinned = self._pins.has(data)
                for part, address in self._parts(ids, memory.address):
                    self._from_host(address, len(part) * self._plan.unit_bytes, pinned)
                    pendings.append(self._scatter(part, self._scratch, CTAS_FOR_HOST))
        return _sums(pendings)

    def close(self) -> None:
        """Free everything; no copy and no step may follow."""
        for stream in self._streams:
            stream.settle()
        self._held.close()

    def _checked(self, ids: Sequence[int], buffer: memoryview) -> Memory:
        memory, needed = memory_of(buffer), len(ids) * self._plan.unit_bytes
        if memory.nbytes < needed:
            raise ValueError(
                f"{len(ids)} blocks are {needed} bytes, but the buffer {memory.nbytes}"
            )
        return memory

    @contextmanager
    def _settled(self, urgent: bool) -> Iterator[list[Pending]]:
        """Copies inside come after the engine's steps, and are over when it is left."""
        self._device.enter()
        self._stream = self._streams[urgent]
        self._marks.precede(self._stream.handle)
        try:
            yield []
        finally:  # after a failure too: the caller frees the memory next
            self._stream.settle()

    def _parts(self, ids: Sequence[int], address: int) -> Iterator[tuple[Sequence[int], int]]:
        """As many ids as the scratch holds, and where their bytes are in the buffer."""
        for first in range(0, len(ids), self._fit):
            yield ids[first : first + self._fit], address + first * self._plan.unit_bytes

    def _gather(self, ids: Sequence[int], address: int, workers: int) -> Pending:
        (one,) = self._plan.gather(ids, address)
        ends = one.cache, one.buffer, one.cache_ids, one.buffer_ids
        sizes = one.cache_blocks, one.buffer_blocks
        return start_copy(self._by, *ends, *sizes, stream=self._stream.handle, workers=workers)

    def _scatter(self, ids: Sequence[int], address: int, workers: int) -> Pending:
        (one,) = self._plan.scatter(ids, address)
        ends = one.buffer, one.cache, one.buffer_ids, one.cache_ids
        sizes = one.buffer_blocks, one.cache_blocks
        return start_copy(self._by, *ends, *sizes, stream=self._stream.handle, workers=workers)

    def _to_host(self, address: int, nbytes: int, pinned: bool) -> None:
        stream = self._stream.handle
        if pinned:
            self._device.download(address, self._scratch, nbytes, stream)
            return
        middle = self._pinned_scratch()
        self._device.download(middle, self._scratch, nbytes, stream)
        self._stream.settle()
        ctypes.memmove(address, middle, nbytes)

    def _from_host(self, address: int, nbytes: int, pinned: bool) -> None:
        stream = self._stream.handle
        if pinned:
            self._device.upload(self._scratch, address, nbytes, stream)
            return
        middle = self._pinned_scratch()
        self._stream.settle()  # the last part may still be read from there
        ctypes.memmove(middle, address, nbytes)
        self._device.upload(self._scratch, middle, nbytes, stream)

    def _pinned_scratch(self) -> int:
        if not self._pinned:
            self._pinned = self._device.allocate_pinned(self._nbytes)
            self._held.callback(self._device.free_pinned, self._pinned)
        return self._pinned


def load(plan: Plan, steps_overlap: bool) -> DeviceCopies:
    """On the calling thread's GPU. Raises KernelUnavailable with the reason if that can't be."""
    by = kernels("cuda")
    return DeviceCopies(plan, Driver(current_device()), by, steps_overlap)


def _check(plan: Plan) -> None:
    for passes in (plan.gather((), 1), plan.scatter((), 1)):
        if (n := len(list(passes))) != 1:
            raise UnsupportedLayout(f"on a GPU a block is one copy of the kernels, not {n}")


def _sums(pendings: Sequence[Pending]) -> list[int]:
    return [checksum for pending in pendings for checksum in pending.wait()]
