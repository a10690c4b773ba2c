"""How many thread blocks (CTAs) a copy between GPUs' memory takes.

Few while an engine computes on the GPU, whose SMs they are; more while none does, because a link
between GPUs takes more than these few bring.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvmig.kernels.driver import CudaDriver
from kvmig.kernels.green import under_mps

CTAS_WHILE_IDLE = 16
"""The first of 1, 2, 4, 8, 16 and 32 that gather more than 200 GB/s with checksums in each shape,
which is what NVLink should take: on an H100 259 to 313 GB/s from runs of 64 KiB, 224 and 229 from
runs of 18 KiB, where 8 bring 137 to 160, and 120 (26 November 2026, `python -m bench.gpu.gather`,
inside one GPU). Across NVLink it isn't measured."""


def copy_workers(few: int, idle: bool, sm_count: int) -> int:
    """CTAs of one copy. few: as many as a copy takes during an engine's steps; idle: nothing else
    computes on the GPU; sm_count: of the GPU.

    A step that begins during a wide copy doesn't wait for it: the copy has a stream of its own, at
    most half of the SMs, and leaves room for an engine's CTAs on these, too (docs/data-plane.md).
    It is slower meanwhile: on an H100, 16 CTAs made steps 1.08 (TMA) and 1.23 times as long. A copy
    lasts for `--chunk-ms` (2 ms) at most, and the next one finds the engine busy. By these figures
    it costs one step 0.5 ms at most; a single wide copy during a step isn't measured.
    """
    return max(few, min(CTAS_WHILE_IDLE, sm_count // 2)) if idle else few


_LOCK = threading.Lock()
_OPEN: list[CopyWidth] = []
"""Widths of all engines of this process."""


class CopyWidth:
    """One engine's part in how wide the copies on its GPU are.

    Copies are wide only while all engines of this process on that GPU are idle, and never under
    MPS, where engines of other processes compute along with them. Without MPS, other processes'
    work doesn't run at the same time.
    """

    def __init__(self, device: CudaDriver) -> None:
        """Raises KvmigError."""
        self.engine_idle: Callable[[], bool] = lambda: False
        """Whether the engine computes nothing, nor is about to; called on any thread."""
        self._device = device
        self._alone = not under_mps(device)
        with _LOCK:
            _OPEN.append(self)

    def choose_workers(self, few: int) -> int:
        """CTAs of a copy that begins now, see `copy_workers`."""
        return copy_workers(few, self._all_idle(), self._device.multiprocessors)

    def close(self) -> None:
        """No copy of this engine follows."""
        with _LOCK:
            _OPEN.remove(self)

    def _all_idle(self) -> bool:
        if not self._alone:
            return False
        with _LOCK:
            here = [one for one in _OPEN if one._device.ordinal == self._device.ordinal]
        return all(one.engine_idle() for one in here)
