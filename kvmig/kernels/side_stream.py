"""A stream for copies apart from an engine's own work, and the wait for their ends."""

from __future__ import annotations

import time

from kvmig.kernels.api import DONE_TIMEOUT_S
from kvmig.kernels.driver import CudaDriver

_SPIN_S = 200e-6
_POLL_S = 50e-6


class SideStream:
    """`handle`, a cudaStream_t; one thread queues on it. Raises KvmigError."""

    def __init__(self, device: CudaDriver, priority: int = 0) -> None:
        self._device = device
        self._end = device.new_event()
        try:
            self.handle = device.new_stream(priority)
        except BaseException:
            device.destroy_event(self._end)
            raise

    def settle(self, timeout_s: float = DONE_TIMEOUT_S) -> None:
        """Wait for all that is queued. Raises TimeoutError, and KvmigError if the device failed."""
        start = time.monotonic()
        self._device.record(self._end, self.handle)
        while not self._device.happened(self._end):
            spent = time.monotonic() - start
            if spent > timeout_s:
                raise TimeoutError(f"copies on a side stream are not done after {timeout_s:g} s")
            time.sleep(0 if spent < _SPIN_S else _POLL_S)

    def close(self) -> None:
        """Close the stream: no work may be queued any more."""
        self._device.destroy_stream(self.handle)
        self._device.destroy_event(self._end)
