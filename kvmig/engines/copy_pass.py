"""What one call of the copy kernels does between a KV cache and a buffer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvmig.ground.layout import Region


@dataclass(frozen=True, slots=True)
class Pass:
    """Pieces `cache_ids` of `cache` are `buffer_ids` of `buffer`."""

    cache: tuple[Region, ...]
    cache_ids: NDArray[np.int64]
    cache_blocks: int
    buffer: tuple[Region, ...]
    buffer_ids: NDArray[np.int64]
    buffer_blocks: int
