"""Copies between a KV cache in a GPU's memory and buffers of fused blocks, there or on the host.

The kernels themselves write and read the buffer: one in a GPU's memory (cuda-ipc), which may be
another one's, or a mapping of the host's whose pages are pinned (shm, tcp, nixl), across PCIe. They
go through the TMA where there is one, and sum the blocks on their way. Where a buffer's pages can't
be pinned, pinned scratch and the CPU come between: one half is the CPU's while the other is the
GPU's.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvmig.core.errors import KvmigError, UnsupportedLayout
from kvmig.engines.base import CopySums
from kvmig.engines.block_copies import CopyPass, CopyPlan
from kvmig.engines.copy_width import CopyWidth
from kvmig.kernels.api import CopyKernels, PendingWork
from kvmig.kernels.arrays import ArrayMemory, memory_of
from kvmig.kernels.copy import checked, start_copy
from kvmig.kernels.driver import CudaDriver
from kvmig.kernels.gpu import GpuKernels
from kvmig.kernels.pinned import PinnedMemory
from kvmig.kernels.select import kernels
from kvmig.kernels.side_stream import SideStream

SCRATCH_BYTES = 16 << 20
"""Pinned scratch memory, in two halves, for buffers that can't be pinned."""
CTAS_OF_TMA = 4
"""Thread blocks of a copy through the TMA while the engine isn't idle (`copy_width`): as few as
leave the SMs to the engine's steps, and keep a link busy. An H100's PCIe takes as much from 4 as
from 32 (50 GB/s; 2 bring 31 GB/s from the host), and its own memory 70 GB/s."""
CTAS_WITHOUT_TMA = 8
"""The same without the TMA, and for blocks of runs that are too short for it."""
TMA_RUN = 8 << 10
"""Bytes from which on a run goes through the TMA: one thread orders all of a CTA's."""
_TMA_GRAIN = 16


class DeviceCopies:
    """`Copies` on a GPU, on streams of its own, of which the urgent one has the device's highest
    priority; one thread copies, one at a time.

    When a copy returns or raises, the GPU has left its blocks and its buffer, except after a
    TimeoutError: then the engine's next steps and the next copies wait for it on the GPU, since its
    blocks may be theirs. Raises KvmigError when the device fails.
    """

    def __init__(
        self,
        plan: CopyPlan,
        device: CudaDriver,
        by: CopyKernels,
        steps_overlap: bool,
        scratch_bytes: int = SCRATCH_BYTES,
    ) -> None:
        """steps_overlap: of the engine, see `StepMarks`; scratch_bytes: room for two blocks
        is there in any case. Raises UnsupportedLayout if a plan needs several copies."""
        _check(plan)
        self.gpu = device.ordinal
        self._plan = plan
        self._device = device
        self._by = by
        self._fit = max(1, scratch_bytes // 2 // plan.unit_bytes)
        """Blocks that half of the scratch memory holds."""
        self._tma = by if isinstance(by, GpuKernels) and by.has_tma and _fits_tma(plan) else None
        self._unsettled: list[memoryview] = []
        """Buffers whose copy hasn't ended in time: never freed, for the device may be at it."""
        self._scratch = 0
        with ExitStack() as held:
            self._marks = StepMarks(device, steps_overlap)
            held.callback(self._marks.close)
            self.width = CopyWidth(device)
            held.callback(self.width.close)
            self._streams: list[SideStream] = []
            for priority in (0, device.stream_priorities()[1]):
                self._streams.append(SideStream(device, priority))
                held.callback(self._streams[-1].close)
            self._stream = self._streams[0]
            self._pins = PinnedMemory(device)
            held.callback(self._pins.close)
            self._held = held.pop_all()

    def after_step(self, stream: int) -> None:
        """Record a step, on the engine's thread; `stream`: where it queued its work."""
        self._marks.stepped(stream)

    def gather(self, ids: Sequence[int], out: memoryview, urgent: bool = False) -> list[int]:
        """Blocks [n] to `out` [n * unit_bytes]; their n checksums."""
        memory = self._checked(ids, out)
        with self._settled(urgent, out):
            if self._reaches(memory, out):
                passes = self._plan.gather(ids, memory.address)
                sums = self._start(passes, memory.address, memory.device == "cuda").wait()
            else:
                sums = self._gather_by_scratch(ids, memory.address)
        return CopySums(sums, self._stream.took_ms())

    def scatter(self, ids: Sequence[int], data: memoryview, urgent: bool = False) -> list[int]:
        """`data` [n * unit_bytes] to blocks [n]; n checksums of what came there."""
        memory = self._checked(ids, data)
        with self._settled(urgent, data):
            if self._reaches(memory, data):
                passes = self._plan.scatter(ids, memory.address)
                sums = self._start(passes, memory.address, memory.device == "cuda").wait()
            else:
                sums = self._scatter_by_scratch(ids, memory.address)
        return CopySums(sums, self._stream.took_ms())

    def try_out(self) -> None:
        """Bring one block out and back the same, in every way: what is made at the first use is
        made before requests move. Raises KvmigError, also where its checksums differ."""
        self._device.settle()  # the cache may still be filled with zeros
        mapping, found = mmap.mmap(-1, self._plan.unit_bytes), [self._sum_block(0)]
        for buffer in (memoryview(mapping), memoryview(bytearray(self._plan.unit_bytes))):
            for urgent in (False, True):
                found += [self.gather([0], buffer, urgent), self.scatter([0], buffer, urgent)]
        self._pins.close()
        address = self._device.allocate(self._plan.unit_bytes)
        try:
            with self._settled(False, memoryview(b"")):
                for passes in (self._plan.gather([0], address), self._plan.scatter([0], address)):
                    found.append(self._start(passes, address).wait())
        finally:
            self._device.free(address)
        if any(sums != found[0] for sums in found):
            raise KvmigError(f"a copy on GPU {self.gpu} and back isn't the same block")

    def _sum_block(self, number: int) -> list[int]:
        """A block's checksum by the kernel that copies nothing."""
        (one,) = self._plan.gather([number], _TMA_GRAIN)
        blocks = checked(*one)
        with self._settled(False, memoryview(b"")):
            return self._by.checksum(blocks.src, blocks.src_ids, stream=self._stream.handle).wait()

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

    def _reaches(self, memory: ArrayMemory, buffer: memoryview) -> bool:
        """Whether the kernels can write and read the buffer: they can once it is pinned."""
        return memory.device == "cuda" or self._pins.has(buffer)

    @contextmanager
    def _settled(self, urgent: bool, buffer: memoryview) -> Iterator[None]:
        """Copies inside come after the engine's steps, are measured, and are over when it is
        left."""
        self._device.enter()
        self._stream = self._streams[urgent]
        self._marks.precede(self._stream.handle)
        self._stream.begin()
        try:
            yield
        finally:  # after a failure too: the caller frees the memory next
            try:
                self._stream.settle()
            except TimeoutError:
                self._unsettled.append(buffer)
                self._put_off(self._stream)
                raise

    def _put_off(self, stuck: SideStream) -> None:
        """Let steps and copies that may be given the blocks of its copy write them after it."""
        self._marks.put_off_steps(stuck)
        for stream in self._streams:
            if stream is not stuck:
                stuck.precede(stream.handle)

    def _start(
        self, passes: Iterable[CopyPass], buffer: int, between_gpus: bool = False
    ) -> PendingWork:
        """Queue a copy to or from a buffer that the kernels reach. between_gpus: it is a GPU's,
        which takes more than the few CTAs bring; the host's takes no more."""
        (one,) = passes
        tma = None if buffer % _TMA_GRAIN else self._tma
        stream, few = self._stream.handle, CTAS_WITHOUT_TMA if tma is None else CTAS_OF_TMA
        ctas = self.width.choose_workers(few) if between_gpus else few
        if tma is None:
            return start_copy(self._by, *one, stream=stream, workers=ctas)
        return tma.copy_tma(checked(*one), checksums=True, stream=stream, workers=ctas)

    # -- through scratch memory

    def _gather_by_scratch(self, ids: Sequence[int], address: int) -> list[int]:
        sums: list[int] = []
        filling: tuple[PendingWork, int, int, int] | None = None
        for part, to, half in self._parts(ids, address):
            pending = self._start(self._plan.gather(part, half), half)
            if filling is not None:
                sums += _empty(*filling)
            filling = pending, to, half, len(part) * self._plan.unit_bytes
        return sums if filling is None else sums + _empty(*filling)

    def _scatter_by_scratch(self, ids: Sequence[int], address: int) -> list[int]:
        sums: list[int] = []
        emptying: deque[PendingWork] = deque()
        for part, source, half in self._parts(ids, address):
            if len(emptying) == 2:  # the older one is of this half
                sums += emptying.popleft().wait()
            ctypes.memmove(half, source, len(part) * self._plan.unit_bytes)
            emptying.append(self._start(self._plan.scatter(part, half), half))
        return sums + _sums(emptying)

    def _parts(self, ids: Sequence[int], address: int) -> Iterator[tuple[Sequence[int], int, int]]:
        """Parts of as many ids as half of the scratch memory holds, where their bytes are in the
        buffer, and which half is theirs: the two take turns."""
        nbytes = self._fit * self._plan.unit_bytes
        if ids and not self._scratch:
            self._scratch = self._device.allocate_pinned(2 * nbytes)
            self._held.callback(self._device.free_pinned, self._scratch)
        for turn, first in enumerate(range(0, len(ids), self._fit)):
            start = address + first * self._plan.unit_bytes
            yield ids[first : first + self._fit], start, self._scratch + turn % 2 * nbytes


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
        self._stream: int | None = None
        """The engine's, once a step was recorded."""
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
        self._stream = stream

    def precede(self, stream: int) -> None:
        """Let what `stream` gets from now on come after all steps whose outputs are known.

        From any thread: an event that is recorded again meanwhile is only a later one.
        """
        self._device.wait(stream, self._events[0])

    def put_off_steps(self, copies: SideStream) -> None:
        """Let the steps that are launched from now on come after what `copies` has queued; from any
        thread."""
        if self._stream is not None:
            copies.precede(self._stream)

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


def _empty(filling: PendingWork, to: int, half: int, nbytes: int) -> list[int]:
    """Copy what came into a half of the scratch memory to the buffer; its checksums."""
    sums = filling.wait()
    ctypes.memmove(to, half, nbytes)
    return sums


def _sums(pendings: Iterable[PendingWork]) -> list[int]:
    return [checksum for pending in pendings for checksum in pending.wait()]
