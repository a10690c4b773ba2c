"""What a worker tells of its KV cache: plain numbers that a llumlet's process can use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvmig.ground.errors import UnsupportedLayout
from kvmig.ground.layout import Region


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's KV cache, [kernel blocks, heads, tokens, content]; strides in bytes.

    attention: the instruction set of vLLM's CPU attention, which orders what is inside a
    head of a block; empty elsewhere.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str
    attention: str = ""


@dataclass(frozen=True, slots=True)
class RankCache:
    """All of one worker's KV cache: `nbytes` of memory at `address`, and the layers in it."""

    address: int
    nbytes: int
    layers: tuple[LayerCache, ...]

    def mapped_at(self, address: int) -> RankCache:
        """The same memory as another mapping of it shows it."""
        shift = address - self.address
        layers = tuple(replace(one, address=one.address + shift) for one in self.layers)
        return RankCache(address, self.nbytes, layers)


def kernel_blocks(layer: LayerCache, num_blocks: int) -> int:
    """Blocks of vLLM's attention in one of the scheduler's `num_blocks`."""
    if layer.shape[0] % num_blocks:
        raise UnsupportedLayout(f"{layer.shape[0]} kernel blocks for {num_blocks} blocks")
    return layer.shape[0] // num_blocks


def whole_blocks(ranks: Sequence[RankCache], num_blocks: int, order: str) -> tuple[Region, ...]:
    """One region a rank and layer: a scheduler's block is one run of bytes in it.

    order: vLLM's name of the KV layout, for the error. Raises UnsupportedLayout.
    """
    regions: list[Region] = []
    for rank in ranks:
        for layer in rank.layers:
            split = kernel_blocks(layer, num_blocks)
            run = _bytes(layer)
            if not _dense(layer) or (split > 1 and layer.strides[0] != run):
                raise UnsupportedLayout(
                    f"KV layout {order}: a layer's block is not one run of bytes"
                )
            regions.append(Region(layer.address, layer.strides[0] * split, run * split))
    return tuple(regions)


def _bytes(layer: LayerCache) -> int:
    """Of one kernel block."""
    size = layer.itemsize
    for length in layer.shape[1:]:
        size *= length
    return size


def _dense(layer: LayerCache) -> bool:
    """Whether a kernel block's bytes are one run, in whatever order of dimensions."""
    expected = layer.itemsize
    for stride, size in sorted(zip(layer.strides[1:], layer.shape[1:], strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
