"""Blocks between shards that differ in tensor-parallel size, block size and order (NHD, HND).

Example: ranks 0 and 1 of TP 2 with 16 tokens a block take their heads of 100 tokens from TP 1
with 32 tokens a block (8 heads, 256 bytes a row; `grids` from `layouts`):

    whole = Shard(grids, np.array([7, 3, 5, 9]), 32)
    for rank, (its_grids, ids) in enumerate(ranks):
        to = Shard(its_grids, ids, 16, first_head=4 * rank)
        heads = range(4 * rank, 4 * rank + 4)
        start_reshard(by, whole, to, range(100), heads, 256, src_end=End(64, 8),
            dst_end=End(80, 4))
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvmig.kernels import checks
from kvmig.kernels.face import Kernels, Pending, Shard


@dataclass(frozen=True, slots=True)
class End:
    """How much there is at one end of a reshard."""

    blocks: int
    """Blocks of every grid."""
    heads: int
    """Heads of every grid."""


def start_reshard(
    by: Kernels,
    src: Shard,
    dst: Shard,
    tokens: range,
    heads: range,
    row: int,
    *,
    src_end: End,
    dst_end: End,
    stream: int = 0,
    workers: int = 0,
) -> Pending:
    """Copy rows of `row` bytes of these `heads` and `tokens`, in every grid, from src to dst.

    tokens: of the sequence; heads: of the model; each range has step 1. No written byte may be
    another row's source. Memory is that of `by.device`; `stream` and `workers` as in `face`.
    Raises ValueError before anything is written if the arguments don't fit.
    """
    if len(src.grids) != len(dst.grids):
        raise ValueError(f"{len(src.grids)} source grids, but {len(dst.grids)} destination grids")
    if row < 0:
        raise ValueError(f"row is {row} bytes, should be 0 or more")
    for name, numbers in (("tokens", tokens), ("heads", heads)):
        if numbers.step != 1 or numbers.start < 0 or numbers.stop < numbers.start:
            raise ValueError(f"{name} is {numbers}, should go from 0 or more upwards in steps of 1")
    checks.worker_count(workers)
    source = _checked(src, src_end, tokens, heads, row, "source")
    target = _checked(dst, dst_end, tokens, heads, row, "destination")
    checks.written_once(target.ids[_blocks_of(tokens, target.block_tokens)])
    return by.reshard(source, target, tokens, heads, row, stream=stream, workers=workers)


def _checked(shard: Shard, end: End, tokens: range, heads: range, row: int, side: str) -> Shard:
    if shard.block_tokens <= 0:
        raise ValueError(f"{side} block_tokens is {shard.block_tokens}, should be 1 or more")
    ids = checks.block_ids(shard.ids, end.blocks, side)
    used = _blocks_of(tokens, shard.block_tokens)
    if tokens and used.stop > len(ids):
        raise ValueError(
            f"{side}: tokens up to {tokens.stop} need {used.stop} blocks of "
            f"{shard.block_tokens}, but {len(ids)} ids are given"
        )
    held = range(shard.first_head, shard.first_head + end.heads)
    if shard.first_head < 0 or (heads and not (held.start <= heads[0] and heads[-1] < held.stop)):
        raise ValueError(f"{side} holds heads {held}, not all of {heads}")
    for number, grid in enumerate(shard.grids):
        if grid.base <= 0:
            raise ValueError(f"{side} grid {number} begins at address {grid.base}")
        for name, stride, count in (
            ("block", grid.block_stride, end.blocks),
            ("token", grid.token_stride, shard.block_tokens),
            ("head", grid.head_stride, end.heads),
        ):
            if stride < (row if count > 1 else 0):
                raise ValueError(
                    f"{side} grid {number}: rows of {row} bytes overlap at a {name} stride of "
                    f"{stride}"
                )
    return replace(shard, ids=ids)


def _blocks_of(tokens: range, block_tokens: int) -> slice:
    """Which ids of a shard these tokens lie in."""
    if not tokens:
        return slice(0, 0)
    return slice(tokens.start // block_tokens, (tokens.stop - 1) // block_tokens + 1)
