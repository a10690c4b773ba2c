"""The layout of a KV cache in memory: regions of equally spaced runs.

A block of KV cache is one run of bytes in each region (one region a layer in
vLLM's LBHNC order). Its fused form is these runs one after the other.

Example: 2 layers, 3 blocks of 8 bytes in each layer. Layer 0 at address 1000, layer 1
at 2000: `KVLayout((BlockRegion(1000, 8, 8), BlockRegion(2000, 8, 8)), 3, 16)`. Block 2 is
then bytes 1016..1023 and 2016..2023, and 16 bytes when fused.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class BlockRegion:
    """Block b is the `run` bytes at `base + b * block_stride`."""

    base: int
    block_stride: int
    run: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The regions of one engine's KV cache.

    num_blocks: blocks per region; block_tokens: tokens per block; model: a fingerprint
    of everything that must agree for two caches to be exchanged (see `matches`); tables:
    block tables of a request, where some layers keep other tokens than others; weights: the
    identity of those that the cache is computed with (`kvmig.engines.identity`); gpu: the device
    of this process in whose memory it lies, None: in the host's.
    """

    regions: tuple[BlockRegion, ...]
    num_blocks: int
    block_tokens: int
    model: str = ""
    tables: int = 1
    weights: str = ""
    gpu: int | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all regions: its size when fused."""
        return sum(region.run for region in self.regions)

    @property
    def fingerprint(self) -> str:
        """Model, weights, block tokens and the runs of a block: readable, and exact by its hash.

        Blocks may be exchanged between two engines whose fingerprints are equal.
        """
        runs = ",".join(str(region.run) for region in self.regions)
        digest = blake2b(f"{self.model}|{runs}".encode(), digest_size=8).hexdigest()
        shape = f"{self.block_tokens} tokens in {self.block_bytes} bytes, {digest}"
        return f"{shape}, weights {self.weights}" if self.weights else shape

    def matches(self, other: KVLayout) -> bool:
        """Whether fused blocks of one may be scattered into the other."""
        return (
            self.block_tokens == other.block_tokens
            and self.model == other.model
            and self.tables == other.tables
            and self.weights == other.weights
            and tuple(r.run for r in self.regions) == tuple(r.run for r in other.regions)
        )


def fused(base: int, layout: KVLayout) -> tuple[BlockRegion, ...]:
    """The regions of a contiguous buffer at `base` that holds `layout`'s fused blocks."""
    stride = layout.block_bytes
    regions: list[BlockRegion] = []
    offset = 0
    for region in layout.regions:
        regions.append(BlockRegion(base + offset, stride, region.run))
        offset += region.run
    return tuple(regions)
