# mypy: allow-untyped-decorators
"""Copies of KV blocks with the checksum of csrc/kvmig.h, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

COLUMNS = tl.constexpr(6)
"""Columns of a region in the table: source base and stride, destination base and stride, run, and
the number of its first word in the block."""


@triton.jit
def mix64(z: tl.tensor) -> tl.tensor:
    """splitmix64's finaliser of uint64 `z`, element by element."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def pointer(address: tl.tensor, unit: tl.constexpr, align: tl.constexpr) -> tl.tensor:
    """`address` (int64) as a pointer to `unit`. A hint on the integer would not reach the load."""
    return tl.multiple_of(address.to(tl.pointer_type(unit)), align)


@triton.jit
def as_words(values: tl.tensor, unit: tl.constexpr) -> tl.tensor:
    """Unsigned `values` [n] of a type of `unit` as their little-endian 64-bit words."""
    if unit == tl.uint64:
        return values
    bits: tl.constexpr = unit.primitive_bitwidth
    parts: tl.constexpr = 64 // bits
    places = tl.arange(0, parts).to(tl.uint64) * bits
    parted = tl.reshape(values, [values.shape[0] // parts, parts]).to(tl.uint64)
    return tl.sum(parted << places[None, :], axis=1)


@triton.jit(do_not_specialize=["items", "n", "n_regions", "tiles"])
def copy_kernel(
    table: tl.tensor,
    checksums: tl.tensor,
    items: tl.tensor,
    n: tl.tensor,
    n_regions: tl.tensor,
    tiles: tl.tensor,
    tile: tl.constexpr,
    unit: tl.constexpr,
    align: tl.constexpr,
    writes: tl.constexpr,
    sums: tl.constexpr,
) -> None:
    """Item by item: one tile of one run of one block, `items` = n * n_regions * tiles. A program's
    items are neighbours, so that few programs read and write few places at once.

    table: int64 [n_regions * COLUMNS], then the source ids [n], then the destination ids [n].
    checksums: uint64 [n], zeros at the start. tile: bytes; unit: the unsigned type that is
    loaded; align: of every address and run, in bytes. `writes`: copy; `sums`: add to checksums.
    """
    size: tl.constexpr = unit.primitive_bitwidth // 8
    lane = tl.arange(0, tile // size)
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    item = (program * items // programs).to(tl.int32)
    end = ((program + 1) * items // programs).to(tl.int32)
    while item < end:
        start = (item % tiles).to(tl.int64) * tile
        block = item // tiles // n_regions
        region = table + item // tiles % n_regions * COLUMNS
        ids = table + n_regions * COLUMNS + block

        left = tl.minimum(tl.load(region + 4) - start, tile).to(tl.int32) // size
        inside = lane < tl.multiple_of(left, align // size)
        source = tl.load(region) + tl.load(ids) * tl.load(region + 1) + start
        values = tl.load(pointer(source, unit, align) + lane, mask=inside, other=0)
        if writes:
            target = tl.load(region + 2) + tl.load(ids + n) * tl.load(region + 3) + start
            tl.store(pointer(target, unit, align) + lane, values, mask=inside)
        if sums:
            place = tl.arange(0, tile // 8)
            number = (tl.load(region + 5) + start // 8 + place + 1).to(tl.uint64)
            terms = mix64(as_words(values, unit) + number * 0x9E3779B97F4A7C15)
            # The last word of a run is padded with the zeros that masked lanes load.
            inside_words = place < (left * size + 7) // 8
            total = tl.sum(tl.where(inside_words, terms, 0))
            tl.atomic_add(checksums + block, total, sem="relaxed")
        item += 1
