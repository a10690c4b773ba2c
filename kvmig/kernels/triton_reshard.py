# mypy: allow-untyped-decorators
"""Rows from one shard of a sequence's KV cache to another, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from kvmig.kernels.triton_copy import pointer

COLUMNS = tl.constexpr(8)
"""Of a grid in the table: source base, block, token and head stride, then the destination's."""


@triton.jit
def addresses(
    grid: tl.tensor,
    ids: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    inside: tl.tensor,
    block_tokens: tl.constexpr,
) -> tl.tensor:
    """int64 [rows]: where row `token` [rows] of `head` is, for the lanes `inside` [rows]."""
    block = tl.load(ids + token // block_tokens, mask=inside, other=0)
    return (
        tl.load(grid)
        + block * tl.load(grid + 1)
        + (token % block_tokens) * tl.load(grid + 2)
        + head * tl.load(grid + 3)
    )


@triton.jit(
    do_not_specialize=[
        *("items", "n_regions", "n_heads", "tiles", "n_src_ids"),
        *("first_token", "n_tokens", "src_head", "dst_head"),
    ]
)
def reshard_kernel(
    table: tl.tensor,
    items: tl.tensor,
    n_regions: tl.tensor,
    n_heads: tl.tensor,
    tiles: tl.tensor,
    n_src_ids: tl.tensor,
    first_token: tl.tensor,
    n_tokens: tl.tensor,
    src_head: tl.tensor,
    dst_head: tl.tensor,
    src_block_tokens: tl.constexpr,
    dst_block_tokens: tl.constexpr,
    pieces: tl.constexpr,
    piece: tl.constexpr,
    rows: tl.constexpr,
    unit: tl.constexpr,
    align: tl.constexpr,
) -> None:
    """Item by item: `rows` pieces of one head in one grid, `items` = n_regions * n_heads * tiles.

    table: int64 [n_regions * COLUMNS], then the source ids [n_src_ids], then the destination's.
    A row is `pieces` pieces of `piece` bytes, a power of two, so that no lane is masked within
    a row. src_head, dst_head: the first head, as each end counts; unit, align: as in a copy.
    """
    size: tl.constexpr = unit.primitive_bitwidth // 8
    lane = tl.arange(0, piece // size)[None, :]
    src_ids = table + n_regions * COLUMNS
    item = tl.program_id(0)
    while item < items:
        grid = table + item // tiles // n_heads * COLUMNS
        head = item // tiles % n_heads
        index = item % tiles * rows + tl.arange(0, rows)
        inside = index < n_tokens * pieces
        token = first_token + index // pieces
        within = index % pieces * piece

        source = addresses(grid, src_ids, token, src_head + head, inside, src_block_tokens)
        target = addresses(
            grid + 4, src_ids + n_src_ids, token, dst_head + head, inside, dst_block_tokens
        )
        mask = inside[:, None]
        values = tl.load(pointer(source + within, unit, align)[:, None] + lane, mask=mask)
        tl.store(pointer(target + within, unit, align)[:, None] + lane, values, mask=mask)
        item += tl.num_programs(0)
