"""A stream for copies apart from an engine's own work, and the wait for their ends."""

from __future__ import annotations

import time
from contextlib import ExitStack

from kvmig.kernels.api import DONE_TIMEOUT_S
from kvmig.kernels.driver import CudaDriver

_SPIN_S = 200e-6
_POLL_S = 50e-6


class SideStream:
    """`handle`, a cudaStream_t; one thread queues on it. Raises KvmigError."""

    def __init__(self, device: CudaDriver, priority: int = 0) -> None:
        self._device = device
        with ExitStack() as held:
            self._begin = device.new_event(timed=True)
            held.callback(device.destroy_event, self._begin)
            self._end = device.new_event(timed=True)
            held.callback(device.destroy_event, self._end)
            self.handle = device.new_stream(priority)
            held.callback(device.destroy_stream, self.handle)
            self._held = held.pop_all()

    def begin(self) -> None:
        """Measure what is queued from now until `settle`, without what the stream waits for now."""
        self._device.record(self._begin, self.handle)

    def settle(self, timeout_s: float = DONE_TIMEOUT_S) -> None:
        """Wait for all that is queued. Raises TimeoutError, and KvmigError if the device failed."""
        start = time.monotonic()
        self._device.record(self._end, self.handle)
        while not self._device.happened(self._end):
            spent = time.monotonic() - start
            if spent > timeout_s:
                raise TimeoutError(f"copies on a side stream are not done after {timeout_s:g} s")
            time.sleep(0 if spent < _SPIN_S else _POLL_S)

    def precede(self, stream: int) -> None:
        """Let what another stream gets from now on come after the work that the last `settle` has
        waited for."""
        self._device.wait(stream, self._end)

    def took_ms(self) -> float:
        """Time from `begin` to the end that `settle` has waited for, by the device's clock."""
        return self._device.elapsed_ms(self._begin, self._end)

    def close(self) -> None:
        """Close the stream: no work may be queued any more."""
        self._held.close()
