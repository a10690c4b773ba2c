"""A GPU that does nothing before it is asked how far it is: streams, events and copies in the
host's memory, each stream in the order of its queue. What relies on luck with time fails on it."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable

from kvmig.ground.errors import KvmigError
from kvmig.kernels.cuda import Library
from tests.emulated_cuda import Emulated, HostDevice, library

HIGHEST = -5
"""The highest priority of a stream."""


class QueuedGpu(HostDevice):
    """`side_stream.Device`. `stuck`: nothing happens any more; `fails`: see `HostDevice`."""

    def __init__(self) -> None:
        super().__init__()
        self.stuck = False
        self.unpinnable = False
        self.streams: dict[int, list[Callable[[], object]]] = {}
        self.pinned: dict[int, int] = {}
        self.pins = 0
        self.priorities: dict[int, int] = {}
        """Of streams, those that are gone, too."""
        self.done: Counter[int] = Counter()
        self.recorded: dict[int, tuple[int, int]] = {}
        self.moved: list[tuple[str, int, int]] = []
        """Copies that were queued: upload or download, the host's address, bytes."""

    def stream_priorities(self) -> tuple[int, int]:
        return 0, HIGHEST

    def new_stream(self, priority: int = 0) -> int:
        self._call("new_stream")
        self.allocated += 1
        self.streams[self.allocated] = []
        self.priorities[self.allocated] = priority
        return self.allocated

    def destroy_stream(self, stream: int) -> None:
        assert not self.pending(stream)
        del self.streams[stream]

    def queue(self, stream: int, work: Callable[[], object]) -> None:
        self.streams[stream].append(work)

    def pending(self, stream: int) -> int:
        """What is queued and not done."""
        return len(self.streams[stream]) - self.done[stream]

    def settle(self, stream: int) -> None:
        """Do all that is queued."""
        self._run(stream, len(self.streams[stream]))

    def upload(self, device: int, pinned: int, nbytes: int, stream: int) -> None:
        self._call("upload")
        self.moved.append(("upload", pinned, nbytes))
        self.queue(stream, lambda: ctypes.memmove(device, pinned, nbytes))

    def download(self, pinned: int, device: int, nbytes: int, stream: int) -> None:
        self._call("download")
        self.moved.append(("download", pinned, nbytes))
        self.queue(stream, lambda: ctypes.memmove(pinned, device, nbytes))

    def record(self, event: int, stream: int) -> None:
        self._call("record")
        self.recorded[event] = stream, len(self.streams[stream])

    def happened(self, event: int) -> bool:
        self._call("happened")
        if not self.stuck and event in self.recorded:
            self._run(*self.recorded[event])
        return not self.stuck

    def wait(self, stream: int, event: int) -> None:
        self._call("wait")
        if event in self.recorded:
            before = self.recorded[event]
            self.queue(stream, lambda: self._run(*before))

    def destroy_event(self, event: int) -> None:
        super().destroy_event(event)
        self.recorded.pop(event, None)

    def pin(self, address: int, nbytes: int, read_only: bool) -> None:
        self._call("pin")
        if self.unpinnable or address in self.pinned:
            raise KvmigError("these pages can't be pinned")
        self.pinned[address] = nbytes
        self.pins += 1

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def empty(self) -> bool:
        """Whether nothing of it is held."""
        return not (self.buffers or self.events or self.streams or self.pinned)

    def _run(self, stream: int, upto: int) -> None:
        while self.done[stream] < upto:
            work = self.streams[stream][self.done[stream]]
            self.done[stream] += 1
            work()


class QueuedLaunches(Library):
    """The CUDA kernels, run when their turn in the stream has come."""

    def __init__(self, gpu: QueuedGpu) -> None:
        super().__init__(library())
        self._gpu = gpu
        self.fails_after = -1
        """Launches until one fails; negative: none does."""
        self.workers: list[int] = []
        self.on: list[int] = []
        """Streams of the launches, one each."""

    def copy(self, *arguments: int) -> None:
        if self.fails_after == 0:
            raise KvmigError("launch: out of luck")
        self.fails_after -= 1
        *_, stream, workers = arguments
        self.workers.append(workers)
        self.on.append(stream)
        launch = super().copy
        self._gpu.queue(stream, lambda: launch(*arguments))


class QueuedKernels(Emulated):
    """On a `QueuedGpu`. Skips the test where g++ is missing."""

    def __init__(self, gpu: QueuedGpu) -> None:
        self.launches = QueuedLaunches(gpu)
        super().__init__(self.launches, gpu)
