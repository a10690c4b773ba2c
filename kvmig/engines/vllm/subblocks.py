"""Parts of KV blocks that engines of different block or tensor-parallel size can exchange.

A unit is all that the model keeps for `tokens` tokens in a row: layer by layer, in a layer
head by head in the model's order, in a head strip by strip (see `strips_of`). Units of both
ends are the same bytes, however many workers hold the heads there and however many
tokens are in a block.

Unit u of a request lies in its block u // per_block, so unit ids are
`block id * per_block + place in the block`.

Example: blocks of 64 tokens, units of 32. A request in blocks [7, 3] has units [14, 15, 6, 7];
an engine with blocks of 32 has it in four blocks, which are its units.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvmig.core.errors import ConfigError, UnsupportedLayout
from kvmig.core.layout import BlockRegion
from kvmig.engines.block_copies import CopyPass


@dataclass(frozen=True, slots=True)
class BlockPage:
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
    """The KV cache of one worker: `nbytes` of memory at `address`, and what is in it.

    layers: of attention that keeps keys and values head by head; what else there is has pages only.
    """

    address: int
    nbytes: int
    pages: tuple[BlockPage, ...]
    layers: tuple[LayerCache, ...]

    def mapped_at(self, address: int) -> RankCache:
        """The same memory as another mapping of it shows it."""
        shift = address - self.address
        layers = tuple(replace(one, address=one.address + shift) for one in self.layers)
        return RankCache(address, self.nbytes, self.pages, layers)


def merged(pages: Iterable[BlockPage], num_blocks: int) -> tuple[BlockPage, ...]:
    """The pages without overlaps, and neighbours as one: a block's bytes in as few runs as can be.

    Raises UnsupportedLayout if one page's blocks lie on another's that are spaced otherwise.
    """
    runs: list[BlockPage] = []
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


def whole_blocks(ranks: Sequence[RankCache]) -> tuple[BlockRegion, ...]:
    """One region a rank and page: a scheduler's block is one run of bytes in it."""
    return tuple(
        BlockRegion(rank.address + page.offset, page.stride, page.nbytes)
        for rank in ranks
        for page in rank.pages
    )


AMX_COLUMN = 16
"""Head dimensions in one column of values."""
GRAIN = {"": 1, "vec": 1, "vec16": 1, "amx": 16}
"""Tokens that can't be separated in a strip."""


@dataclass(frozen=True, slots=True)
class BlockStrips:
    """`count` strips one after the other, each of `width` bytes per token."""

    width: int
    count: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all of them."""
        return self.width * self.count


def strips_of(layer: LayerCache) -> tuple[BlockStrips, ...]:
    """What lies inside one head of one KV block, from its first byte to its last.

    A strip of `width` bytes per token holds N tokens in one run of N * width bytes, so tokens
    t .. t + g are one run of it. On a GPU (HND) a head's block is one strip. vLLM's CPU attention
    keeps keys and values apart and in the order that its instruction set likes
    (vLLM `csrc/cpu/cpu_attn_*.hpp`, `reshape_and_cache`):

    vec, vec16: keys transposed, one strip a head dimension; values row by row, one strip.
    amx: keys in groups of 16 tokens, one strip; values in columns of 16 dimensions, each with
    tokens in pairs: one strip a column.

    Raises UnsupportedLayout.
    """
    if layer.attention not in GRAIN:
        raise UnsupportedLayout(
            f"CPU attention {layer.attention}: its order of keys and values isn't known"
        )
    if layer.attention and layer.itemsize == 1:
        raise UnsupportedLayout(f"CPU attention {layer.attention} with a KV cache of 8-bit floats")
    width = layer.shape[3] * layer.itemsize
    if layer.attention == "":
        return (BlockStrips(width, 1),)
    half = width // 2  # keys, then as much of values
    if layer.attention == "amx":
        column = AMX_COLUMN * layer.itemsize
        return (BlockStrips(half, 1), BlockStrips(column, half // column))
    return (BlockStrips(layer.itemsize, half // layer.itemsize), BlockStrips(half, 1))


@dataclass(frozen=True, slots=True)
class SubBlocks:
    """How a request's blocks are counted where requests move: `per_block` units each."""

    tokens: int
    per_block: int = 1

    def ids(self, block_ids: Sequence[int]) -> list[int]:
        """The ids of all units of these blocks, in order."""
        if self.per_block == 1:
            return list(block_ids)
        n = self.per_block
        return [unit for block in block_ids for unit in range(block * n, block * n + n)]


def units_of(block_tokens: int, unit_tokens: int) -> SubBlocks:
    """`unit_tokens` 0: a unit is a block. Raises ConfigError if they don't fill a block."""
    if not unit_tokens:
        return SubBlocks(block_tokens)
    if block_tokens % unit_tokens:
        raise ConfigError(
            f"--block-size is {block_tokens}, must be a multiple of {unit_tokens}:"
            " instances exchange that many tokens at a time"
        )
    return SubBlocks(unit_tokens, block_tokens // unit_tokens)


@dataclass(frozen=True, slots=True)
class _Part:
    """The strips of one width: one region for each layer and head, cut in one unit's tokens."""

    strips: BlockStrips
    piece: int
    """Bytes of one strip in one unit."""
    copies: tuple[tuple[BlockRegion, ...], ...]
    """Regions of each copy of the heads; pieces follow each other from the first block on."""
    kernel_block: int
    """Pieces from one kernel block to the next."""
    strip: int
    """Pieces from one strip to the next."""
    in_head: int
    """Bytes of a head's unit before these strips."""


class UnitMap:
    """A `block_copies.Plan`: where the units of one engine lie.

    ranks: the workers' caches as this process sees them; heads: all KV heads of the model.
    A worker has an equal share of the heads, or there are copies of each (vLLM does so
    when there are more workers than heads). Raises UnsupportedLayout.
    """

    sums_by_copy = False

    def __init__(
        self,
        ranks: Sequence[RankCache],
        heads: int,
        num_blocks: int,
        units: SubBlocks,
        order: str = "",
    ) -> None:
        first = _common(ranks, heads, order)
        self._units = units
        self._heads = heads
        self._layers = len(ranks[0].layers)
        self._split = kernel_blocks(first, num_blocks)
        self._blocks = first.shape[0]
        tokens, strips = first.shape[2], strips_of(first)
        if tokens % units.tokens or units.tokens % GRAIN[first.attention]:
            raise UnsupportedLayout(
                f"units of {units.tokens} tokens in attention's blocks of {tokens}"
            )
        self._in_kernel_block = tokens // units.tokens
        self._head_bytes = units.tokens * sum(one.token_bytes for one in strips)
        self.unit_bytes = self._layers * heads * self._head_bytes
        self._parts = [
            _part(ranks, heads, units.tokens, strips, index) for index in range(len(strips))
        ]

    @property
    def wire_regions(self) -> tuple[BlockRegion, ...]:
        """One unit, fused: one run a layer and head, as both ends must have them."""
        head = self._head_bytes
        return tuple(
            BlockRegion(index * head, self.unit_bytes, head)
            for index in range(self._layers * self._heads)
        )

    def gather(self, unit_ids: Sequence[int], address: int) -> Iterator[CopyPass]:
        """Copies from the cache to the buffer at `address`, [n units] fused."""
        for part in self._parts:
            yield self._pass(part, part.copies[0], unit_ids, address)

    def scatter(self, unit_ids: Sequence[int], address: int) -> Iterator[CopyPass]:
        """Copies from the buffer to the cache, into each copy of the heads."""
        for part in self._parts:
            for regions in part.copies:
                yield self._pass(part, regions, unit_ids, address).reversed()

    def _pass(
        self, part: _Part, regions: tuple[BlockRegion, ...], unit_ids: Sequence[int], address: int
    ) -> CopyPass:
        strips = np.arange(part.strips.count, dtype=np.int64)
        block, place = np.divmod(np.asarray(unit_ids, np.int64), self._units.per_block)
        split, place = np.divmod(place, self._in_kernel_block)
        at = (block * self._split + split) * part.kernel_block + place
        cache_ids = (at[:, None] + strips * part.strip).ravel()
        unit = self.unit_bytes // part.piece
        buffer_ids = (np.arange(len(at))[:, None] * unit + strips).ravel()
        buffer = tuple(
            BlockRegion(address + index * self._head_bytes + part.in_head, part.piece, part.piece)
            for index in range(len(regions))
        )
        blocks = self._blocks * part.kernel_block
        return CopyPass(regions, buffer, cache_ids, buffer_ids, blocks, len(at) * unit)


def _part(
    ranks: Sequence[RankCache], heads: int, tokens: int, strips: Sequence[BlockStrips], index: int
) -> _Part:
    layer = ranks[0].layers[0]
    this, before = strips[index], sum(one.token_bytes for one in strips[:index])
    piece, held = tokens * this.width, layer.shape[1]
    if layer.strides[0] % piece or tokens * sum(one.token_bytes for one in strips) % piece:
        raise UnsupportedLayout(
            f"KV blocks are {layer.strides[0]} bytes apart, no multiple of {piece}"
        )
    copies = len(ranks) * held // heads

    def regions(copy: int) -> tuple[BlockRegion, ...]:
        return tuple(
            BlockRegion(
                ranks[head // held * copies + copy].layers[number].address
                + head % held * layer.strides[1]
                + layer.shape[2] * before,
                piece,
                piece,
            )
            for number in range(len(ranks[0].layers))
            for head in range(heads)
        )

    return _Part(
        strips=this,
        piece=piece,
        copies=tuple(regions(copy) for copy in range(copies)),
        kernel_block=layer.strides[0] // piece,
        strip=layer.shape[2] // tokens,
        in_head=tokens * before,
    )


def _common(ranks: Sequence[RankCache], heads: int, order: str) -> LayerCache:
    """A layer that all others are like. Raises UnsupportedLayout if they differ."""
    first = ranks[0].layers[0]
    like = {
        (one.shape, one.strides, one.dtype, one.attention) for rank in ranks for one in rank.layers
    }
    if len(like) > 1 or len({len(rank.layers) for rank in ranks}) > 1:
        raise UnsupportedLayout(
            "layers differ in their KV caches: their blocks can't be cut in units"
        )
    _, held, tokens, content = first.shape
    _, head_stride, token_stride, stride = first.strides
    row = content * first.itemsize
    if (token_stride, stride) != (row, first.itemsize) or (
        held > 1 and head_stride != tokens * row
    ):
        raise UnsupportedLayout(f"KV layout {order}: a head's tokens are not one run of bytes")
    if len(ranks) * held % heads:
        raise UnsupportedLayout(f"{len(ranks)} workers with {held} of {heads} KV heads each")
    return first
