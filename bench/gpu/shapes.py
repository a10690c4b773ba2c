"""KV caches of real models in one device's memory, and ids in them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvmig.core.layout import BlockRegion, KVLayout, fused
from kvmig.kernels.api import Ids


@dataclass(frozen=True, slots=True)
class Shape:
    """Blocks of 16 tokens: `run` bytes in each of `regions`."""

    name: str
    run: int
    regions: int

    @property
    def block_bytes(self) -> int:
        return self.run * self.regions

    def blocks(self, nbytes: int) -> int:
        """As many as there is room for; one at least."""
        return max(1, nbytes // self.block_bytes)

    def layout(self, base: int, blocks: int) -> KVLayout:
        """A cache of that many blocks at an address: layer after layer, as vLLM's LBHNC."""
        regions = (
            BlockRegion(base + layer * blocks * self.run, self.run, self.run)
            for layer in range(self.regions)
        )
        return KVLayout(tuple(regions), blocks, 16)

    def staged(self, base: int) -> tuple[BlockRegion, ...]:
        """Fused blocks at an address."""
        return fused(base, self.layout(base, 1))


SHAPES = (
    Shape("LLaMA-7B", 256 * 1024, 32),
    Shape("Llama-3-8B", 64 * 1024, 32),
    Shape("MLA", 18432, 61),
    Shape("Llama-3-8B, block whole", 2 * 1024 * 1024, 1),
)


def ids(order: str, n: int, blocks: int) -> Ids:
    """`n` of `blocks`: `contiguous` or `random`, the same in every run."""
    if order == "contiguous":
        return np.arange(n, dtype=np.int64)
    return np.random.default_rng(0).permutation(blocks)[:n].astype(np.int64)
