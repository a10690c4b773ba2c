"""What a Triton kernel needs around it: tables on the device, a grid, and word of the end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvmig.core.errors import KvmigError
from kvmig.kernels.api import DONE_TIMEOUT_S, FinishedWork, PendingWork

VECTOR = 16
"""Bytes of the widest load."""
CTAS_PER_SM = 2
POLL_S = 20e-6


def alignment(numbers: Iterable[int]) -> int:
    """The largest power of two, up to VECTOR, that divides every one of these bytes."""
    bits = VECTOR
    for number in numbers:
        bits |= number
    return bits & -bits


def power_of_two(number: int) -> int:
    """The smallest power of two that is no less than `number` (at least 1)."""
    return 1 << max(number - 1, 0).bit_length()


class TritonLauncher:
    """One device: a GPU, or the CPU where Triton's interpreter stands in for one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ctas = 2
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self._ctas = CTAS_PER_SM * properties.multi_processor_count

    def on(self, stream: int) -> contextlib.AbstractContextManager[object]:
        """Everything inside is queued on this cudaStream_t; the kernels that torch and Triton
        launch take their stream from torch."""
        if self._device.type == "cpu":
            return contextlib.nullcontext()
        if stream:
            return torch.cuda.stream(torch.cuda.ExternalStream(stream, self._device))
        return torch.cuda.stream(torch.cuda.default_stream(self._device))

    def grid(self, workers: int, items: int) -> tuple[int]:
        """CTAs for `items` items, `workers` at most (0: as many as fill the device)."""
        return (min(workers or self._ctas, items),)

    def upload(self, *tables: NDArray[np.int64]) -> torch.Tensor:
        """The tables one after the other, flat int64, on the device."""
        host = torch.from_numpy(np.concatenate([np.ravel(table) for table in tables]))
        if self._device.type == "cpu":
            return host
        return host.pin_memory().to(self._device, non_blocking=True)

    def sums(self, n: int) -> torch.Tensor:
        """Bits of uint64 [n] in int64 (torch does more with that), zeros, on the device."""
        return torch.zeros(n, dtype=torch.int64, device=self._device)

    def pending(self, sums: torch.Tensor | None = None) -> PendingWork:
        """The work queued so far, and these sums."""
        if self._device.type == "cpu":
            return FinishedWork([] if sums is None else _numbers(sums))
        host = None
        if sums is not None:
            host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            host.copy_(sums, non_blocking=True)
        end = torch.cuda.Event()
        end.record()
        return QueuedWork(end, host)


@dataclass(frozen=True, slots=True)
class QueuedWork:
    """Work on a CUDA stream. `sums`: pinned host memory, whole once `end` has come."""

    end: torch.cuda.Event
    sums: torch.Tensor | None

    def done(self) -> bool:
        try:
            return bool(self.end.query())
        except RuntimeError as error:
            raise KvmigError(f"a Triton kernel failed: {error}") from error

    def wait(self, timeout_s: float = DONE_TIMEOUT_S) -> list[int]:
        deadline = time.monotonic() + timeout_s
        while not self.done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"a Triton kernel is not done after {timeout_s} s")
            time.sleep(POLL_S)
        return [] if self.sums is None else _numbers(self.sums)


def _numbers(sums: torch.Tensor) -> list[int]:
    return list(map(int, sums.numpy().view(np.uint64)))
