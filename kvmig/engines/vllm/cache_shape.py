"""What a worker tells of its KV cache: plain numbers that a llumlet's process can use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvmig.ground.errors import UnsupportedLayout
from kvmig.ground.layout import Region


@dataclass(frozen=True, slots=True)
class Page:
    """One run of bytes of each block: block b is `nbytes` at `offset + b * stride`.

    Layers of different KV cache groups may lie on the same page, since a block is one
    group's at a time.
    """

    offset: int
    stride: int
    nbytes: int


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
    """All of one worker's KV cache: `nbytes` of memory at `address`, and what is in it.

    layers: of attention that keeps keys and values head by head; what else there is has pages only.
    """

    address: int
    nbytes: int
    pages: tuple[Page, ...]
    layers: tuple[LayerCache, ...]

    def mapped_at(self, address: int) -> RankCache:
        """The same memory as another mapping of it shows it."""
        shift = address - self.address
        layers = tuple(replace(one, address=one.address + shift) for one in self.layers)
        return RankCache(address, self.nbytes, self.pages, layers)


def merged(pages: Iterable[Page], num_blocks: int) -> tuple[Page, ...]:
    """The pages without overlaps, and neighbours as one: a block's bytes in as few runs as can be.

    Raises UnsupportedLayout if one page's blocks lie on another's that are spaced otherwise.
    """
    runs: list[Page] = []
    for page in sorted(set(pages), key=lambda one: (one.offset, -one.nbytes)):
        for run in runs:
            if run.stride != page.stride and page.offset < run.offset + run.stride * num_blocks:
                raise UnsupportedLayout(
                    f"KV cache groups share memory in blocks of {run.stride}"
                    f" and {page.stride} bytes"
                )
        last = runs[-1] if runs else page
        end = max(last.offset + last.nbytes, page.offset + page.nbytes)
        joins = page.offset <= last.offset + last.nbytes and end - last.offset <= last.stride
        if runs and joins and last.stride == page.stride:
            runs[-1] = replace(last, nbytes=end - last.offset)
        else:
            runs.append(page)
    return tuple(runs)


def kernel_blocks(layer: LayerCache, num_blocks: int) -> int:
    """Blocks of vLLM's attention in one of the scheduler's `num_blocks`."""
    if layer.shape[0] % num_blocks:
        raise UnsupportedLayout(f"{layer.shape[0]} kernel blocks for {num_blocks} blocks")
    return layer.shape[0] // num_blocks


def whole_blocks(ranks: Sequence[RankCache]) -> tuple[Region, ...]:
    """One region a rank and page: a scheduler's block is one run of bytes in it."""
    return tuple(
        Region(rank.address + page.offset, page.stride, page.nbytes)
        for rank in ranks
        for page in rank.pages
    )
