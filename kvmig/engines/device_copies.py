"""Copies between a KV cache in a GPU's memory and buffers of fused blocks, there or on the host.

A buffer in a GPU's memory (cuda-ipc), which may be another one's, is what the kernels write and
read: through the TMA where there is one, else as they copy anything. To one on the host (shm,
tcp) blocks of long runs go straight from the cache by the copy engines, which take no SM. The copy
engines are slow with short runs, so the kernels fuse those in scratch memory of the GPU first.
Where the buffer's pages can't be pinned, pinned scratch and the CPU come between.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvmig.core.errors import KvmigError, UnsupportedLayout
from kvmig.engines.block_copies import CopyPass, CopyPlan
from kvmig.kernels.api import Kernels, PendingWork
from kvmig.kernels.arrays import ArrayMemory, memory_of
from kvmig.kernels.copy import checked, start_copy
from kvmig.kernels.driver import CudaDriver
from kvmig.kernels.gpu import GpuKernels
from kvmig.kernels.pinned import PinnedMemory
from kvmig.kernels.select import kernels
from kvmig.kernels.side_stream import SideStream

SCRATCH_BYTES = 16 << 20
"""Scratch of the GPU's memory, and as much pinned memory where that is needed."""
CTAS_FOR_HOST = 8
"""Thread blocks of a copy to or from the host: as many as keep PCIe busy."""
CTAS_FOR_SUMS = 2
"""Thread blocks that sum what the copy engines copy: as many as keep up with PCIe."""
LONG_RUN = 28 << 10
"""Bytes from which on the copy engines reach an H100's PCIe with many runs (vLLM #42212)."""
CTAS_OF_TMA = 4
"""Thread blocks of a copy between GPUs, or on one, through the TMA: as few as leave the SMs to the
engine's steps, and keep a link busy."""
CTAS_ON_DEVICE = 8
"""The same without the TMA, and for blocks of runs that are too short for it."""
TMA_RUN = 8 << 10
"""Bytes from which on a run goes through the TMA: one thread orders all of a CTA's."""
_TMA_GRAIN = 16


class DeviceCopies:
    """`Copies` on a GPU, on streams of its own, of which the urgent one has the device's highest
    priority; one thread copies, one at a time.

    When a copy returns or raises, the GPU has left its blocks and its buffer, except after a
    TimeoutError. Raises KvmigError when the device fails.
    """

    def __init__(
        self,
        plan: CopyPlan,
        device: CudaDriver,
        by: Kernels,
        steps_overlap: bool,
        scratch_bytes: int = SCRATCH_BYTES,
    ) -> None:
        """steps_overlap: of the engine, see `StepMarks`; scratch_bytes: room for one block
        is there in any case. Raises UnsupportedLayout if a plan needs several copies."""
        _check(plan)
        self.gpu = device.ordinal
        self._plan = plan
        self._device = device
        self._by = by
        self._fit = max(1, scratch_bytes // plan.unit_bytes)
        self._nbytes = self._fit * plan.unit_bytes
        self._tma = by if isinstance(by, GpuKernels) and by.has_tma and _fits_tma(plan) else None
        self._unsettled: list[memoryview] = []
        """Buffers whose copy hasn't ended in time: never freed, for the device may be at it."""
        self._straight = device.copies_blocks and _least_run(plan) >= LONG_RUN
        self._pinned = self._scratch = 0
        with ExitStack() as held:
            self._marks = StepMarks(device, steps_overlap)
            held.callback(self._marks.close)
            self._streams: list[SideStream] = []
            for priority in (0, device.stream_priorities()[1]):
                self._streams.append(SideStream(device, priority))
                held.callback(self._streams[-1].close)
            self._stream = self._streams[0]
            if not self._straight:
                self._scratch = device.allocate(self._nbytes)
                held.callback(device.free, self._scratch)
            self._pins = PinnedMemory(device)
            held.callback(self._pins.close)
            self._held = held.pop_all()

    def after_step(self, stream: int) -> None:
        """Record a step, on the engine's thread; `stream`: where it queued its work."""
        self._marks.stepped(stream)

    def gather(self, ids: Sequence[int], out: memoryview, urgent: bool = False) -> list[int]:
        """Blocks [n] to `out` [n * unit_bytes]; their n checksums."""
        memory, gather = self._checked(ids, out), self._plan.gather
        with self._settled(urgent, out) as pendings:
            if memory.device == "cuda":
                pendings.append(self._on_gpus(gather(ids, memory.address), memory.address))
            else:
                pinned = self._pins.has(out)
                for part, address in self._parts(ids, memory.address):
                    to = address if pinned else self._pinned_scratch()
                    pendings.append(self._to_host(part, to))
                    if not pinned:
                        self._stream.settle()
                        ctypes.memmove(address, to, len(part) * self._plan.unit_bytes)
        return _sums(pendings)

    def scatter(self, ids: Sequence[int], data: memoryview, urgent: bool = False) -> list[int]:
        """`data` [n * unit_bytes] to blocks [n]; n checksums of what came there."""
        memory, scatter = self._checked(ids, data), self._plan.scatter
        with self._settled(urgent, data) as pendings:
            if memory.device == "cuda":
                pendings.append(self._on_gpus(scatter(ids, memory.address), memory.address))
            else:
                pinned = self._pins.has(data)
                for part, address in self._parts(ids, memory.address):
                    source = address if pinned else self._pinned_scratch()
                    if not pinned:
                        self._stream.settle()  # the last part may still be read from there
                        ctypes.memmove(source, address, len(part) * self._plan.unit_bytes)
                    pendings.append(self._from_host(part, source))
        return _sums(pendings)

    def try_out(self) -> None:
        """Bring one block out and back the same, in every way: what is made at the first use is
        made before requests move. Raises KvmigError, also where its checksums differ."""
        self._device.settle()  # the cache may still be filled with zeros
        mapping, found = mmap.mmap(-1, self._plan.unit_bytes), list[list[int]]()
        for buffer in (memoryview(mapping), memoryview(bytearray(self._plan.unit_bytes))):
            for urgent in (False, True):
                found += [self.gather([0], buffer, urgent), self.scatter([0], buffer, urgent)]
        self._pins.close()
        address = self._device.allocate(self._plan.unit_bytes)
        try:
            with self._settled(False, memoryview(b"")) as pendings:
                pendings.append(self._on_gpus(self._plan.gather([0], address), address))
                pendings.append(self._on_gpus(self._plan.scatter([0], address), address))
            found += [one.wait() for one in pendings]
        finally:
            self._device.free(address)
        if any(sums != found[0] for sums in found):
            raise KvmigError(f"a copy on GPU {self.gpu} and back isn't the same block")

    def close(self) -> None:
        """Free everything; no copy and no step may follow."""
        for stream in self._streams:
            stream.settle()
        self._held.close()

    def _checked(self, ids: Sequence[int], buffer: memoryview) -> ArrayMemory:
        memory, needed = memory_of(buffer), len(ids) * self._plan.unit_bytes
        if memory.nbytes < needed:
            raise ValueError(
                f"{len(ids)} blocks are {needed} bytes, but the buffer {memory.nbytes}"
            )
        return memory

    @contextmanager
    def _settled(self, urgent: bool, buffer: memoryview) -> Iterator[list[PendingWork]]:
        """Copies inside come after the engine's steps, and are over when it is left."""
        self._device.enter()
        self._stream = self._streams[urgent]
        self._marks.precede(self._stream.handle)
        try:
            yield []
        finally:  # after a failure too: the caller frees the memory next
            try:
                self._stream.settle()
            except TimeoutError:
                self._unsettled.append(buffer)
                raise

    def _parts(self, ids: Sequence[int], address: int) -> Iterator[tuple[Sequence[int], int]]:
        """Parts of as many ids as the scratch holds, and where their bytes are in the buffer."""
        for first in range(0, len(ids), self._fit):
            yield ids[first : first + self._fit], address + first * self._plan.unit_bytes

    def _start(self, passes: Iterable[CopyPass], workers: int) -> PendingWork:
        (one,) = passes
        return start_copy(self._by, *one, stream=self._stream.handle, workers=workers)

    def _on_gpus(self, passes: Iterable[CopyPass], buffer: int) -> PendingWork:
        """A copy to or from a buffer in a GPU's memory."""
        if self._tma is None or buffer % _TMA_GRAIN:
            return self._start(passes, CTAS_ON_DEVICE)
        (one,) = passes
        stream = self._stream.handle
        return self._tma.copy_tma(checked(*one), checksums=True, stream=stream, workers=CTAS_OF_TMA)

    def _to_host(self, ids: Sequence[int], pinned: int) -> PendingWork:
        """Blocks [n] to pinned memory, fused."""
        if self._straight:
            (one,) = self._plan.gather(ids, pinned)
            return self._by_engines(one, summed_at_source=True)
        pending = self._start(self._plan.gather(ids, self._scratch), CTAS_FOR_HOST)
        nbytes = len(ids) * self._plan.unit_bytes
        self._device.download(pinned, self._scratch, nbytes, self._stream.handle)
        return pending

    def _from_host(self, ids: Sequence[int], pinned: int) -> PendingWork:
        """Fused blocks [n] of pinned memory to the cache."""
        if self._straight:
            (one,) = self._plan.scatter(ids, pinned)
            return self._by_engines(one, summed_at_source=False)
        nbytes = len(ids) * self._plan.unit_bytes
        self._device.upload(self._scratch, pinned, nbytes, self._stream.handle)
        return self._start(self._plan.scatter(ids, self._scratch), CTAS_FOR_HOST)

    def _by_engines(self, one: CopyPass, summed_at_source: bool) -> PendingWork:
        """The copy engines copy, few CTAs sum the blocks in the cache."""
        stream = self._stream.handle
        blocks = checked(*one)
        self._device.copy_blocks(*blocks, stream)
        source, target = (blocks.src, blocks.src_ids), (blocks.dst, blocks.dst_ids)
        summed = source if summed_at_source else target
        return self._by.checksum(*summed, stream=stream, workers=CTAS_FOR_SUMS)

    def _pinned_scratch(self) -> int:
        if not self._pinned:
            self._pinned = self._device.allocate_pinned(self._nbytes)
            self._held.callback(self._device.free_pinned, self._pinned)
        return self._pinned


class StepMarks:
    """Which of an engine's steps a copy of its KV cache must come after. Raises KvmigError.

    A copy is asked for blocks that steps have filled whose outputs are known. The host learns of a
    step's tokens when they are sampled; what the step queues after that (a draft model writes KV,
    too) may still run. So each step leaves an event on the engine's stream, behind all it queued.

    When steps overlap (async scheduling), a call of vLLM's `step_with_batch_queue` launches one
    step and returns the outputs of one that an earlier call launched. What it has launched writes
    nothing that a copy reads, and to wait for that would hold the copy up for nothing: the event
    of the call before is the right one.
    """

    def __init__(self, device: CudaDriver, overlap: bool) -> None:
        self._device = device
        self._events: deque[int] = deque()
        for _ in range(2 if overlap else 1):
            try:
                self._events.append(device.new_event())
            except BaseException:
                self.close()
                raise

    def stepped(self, stream: int) -> None:
        """Record a call, on the engine's thread; `stream`: where it queued its work."""
        self._device.record(self._events[0], stream)
        self._events.rotate(-1)

    def precede(self, stream: int) -> None:
        """Let what `stream` gets from now on come after all steps whose outputs are known.

        From any thread: an event that is recorded again meanwhile is only a later one.
        """
        self._device.wait(stream, self._events[0])

    def close(self) -> None:
        """No step and no copy may follow."""
        while self._events:
            self._device.destroy_event(self._events.pop())


def load(plan: CopyPlan, gpu: int, steps_overlap: bool) -> DeviceCopies:
    """Copies on a GPU of this process, tested before the engine's first step. Raises
    KernelUnavailable with the reason if that can't be."""
    device = CudaDriver(gpu)
    device.enter()
    copies = DeviceCopies(plan, device, kernels("cuda"), steps_overlap)
    try:
        copies.try_out()
    except BaseException:
        copies.close()
        raise
    return copies


def _least_run(plan: CopyPlan) -> int:
    (one,) = plan.gather((), 1)
    return min((region.run for region in one.src if region.run), default=0)


def _fits_tma(plan: CopyPlan) -> bool:
    (one,) = plan.gather((), _TMA_GRAIN)
    bits = (end.base | end.block_stride | end.run for end in (*one.src, *one.dst))
    return _least_run(plan) >= TMA_RUN and not any(some % _TMA_GRAIN for some in bits)


def _check(plan: CopyPlan) -> None:
    for passes in (plan.gather((), 1), plan.scatter((), 1)):
        if (n := len(list(passes))) != 1:
            raise UnsupportedLayout(f"on a GPU a block is one copy of the kernels, not {n}")


def _sums(pendings: Sequence[PendingWork]) -> list[int]:
    return [checksum for pending in pendings for checksum in pending.wait()]
