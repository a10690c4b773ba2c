"""Which of an engine's steps a copy of its KV cache must come after.

A copy is asked for blocks that steps have filled whose outputs are known. The host learns of a
step's tokens when they are sampled; what the step queues after that (a draft model writes KV,
too) may still run. So each step leaves an event on the engine's stream, behind all it queued.

When steps overlap (async scheduling), a call of vLLM's `step_with_batch_queue` launches one step
and returns the outputs of one that an earlier call launched. What it has launched writes nothing
that a copy reads, and to wait for that would hold the copy up for nothing: the event of the call
before is the right one.
"""

from __future__ import annotations

from collections import deque

from kvmig.kernels.side_stream import Device


class StepMarks:
    """Events of the last call for a step, or the last two. Raises KvmigError."""

    def __init__(self, device: Device, overlap: bool) -> None:
        self._device = device
        self._events: deque[int] = deque()
        for _ in range(2 if overlap else 1):
            try:
                self._events.append(device.new_event())
            except BaseException:
                self.close()
                raise

    def stepped(self, stream: int) -> None:
        """On the engine's thread, after each call: `stream` is what it queued its work on."""
        self._device.record(self._events[0], stream)
        self._events.rotate(-1)

    def precede(self, stream: int) -> None:
        """What `stream` gets from now on comes after all steps whose outputs are known.

        From any thread: an event that is recorded anew meanwhile is only a later one.
        """
        self._device.wait(stream, self._events[0])

    def close(self) -> None:
        """No step and no copy may follow."""
        while self._events:
            self._device.destroy_event(self._events.pop())
