"""KV rows as float8 with a scale a row: half the bytes, and lossy, so only where it is asked for.

A value comes back within 1/16 of itself, or within scale / 1024 where it is smaller than
scale / 64 (e4m3 has three digits after the leading one, and its smallest step is 2^-9).
"""

from __future__ import annotations

from typing import Any

from kvmig.kernels import checks
from kvmig.kernels.arrays import Memory, memory_of
from kvmig.kernels.face import Half, Kernels, Pending

_ITEM = 2
_SCALE = 4


def packed_bytes(rows: int, width: int) -> tuple[int, int]:
    """How many bytes `packed` and `scales` take for [rows, width] values."""
    return rows * width, rows * _SCALE


def start_pack(
    by: Kernels,
    src: Any,
    packed: Any,
    scales: Any,
    dtype: Half,
    width: int,
    *,
    stream: int = 0,
    workers: int = 0,
) -> Pending:
    """`src` [rows, width] of 16-bit floats to `packed` [rows, width] bytes, `scales` [rows].

    Any contiguous arrays in memory of `by.device`; scales are float32 = max|x| / 448, or 1 for a
    row of zeros. Infinities and NaN make NaN of values of their row.
    Raises ValueError before anything is written if the sizes don't fit.
    """
    wide, narrow, factors = _checked(by, src, packed, scales, width, workers)
    return by.pack_fp8(
        *(wide.address, dtype, factors.nbytes // _SCALE, width, narrow.address, factors.address),
        stream=stream,
        workers=workers,
    )


def start_unpack(
    by: Kernels,
    packed: Any,
    scales: Any,
    dst: Any,
    dtype: Half,
    width: int,
    *,
    stream: int = 0,
    workers: int = 0,
) -> Pending:
    """The way back: `dst[r, i] = packed[r, i] * scales[r]`, rounded to nearest even in `dtype`.

    Raises ValueError before anything is written if the sizes don't fit.
    """
    wide, narrow, factors = _checked(by, dst, packed, scales, width, workers)
    return by.unpack_fp8(
        *(narrow.address, factors.address, dtype, factors.nbytes // _SCALE, width, wide.address),
        stream=stream,
        workers=workers,
    )


def _checked(
    by: Kernels, wide: Any, packed: Any, scales: Any, width: int, workers: int
) -> tuple[Memory, Memory, Memory]:
    if width <= 0:
        raise ValueError(f"width is {width}, should be 1 or more")
    checks.worker_count(workers)
    memories = memory_of(wide), memory_of(packed), memory_of(scales)
    for name, memory in zip(("values", "packed", "scales"), memories, strict=True):
        if memory.device != by.device:
            raise ValueError(f"{name} are in memory of {memory.device}, not of {by.device}")
    values, codes, factors = memories
    rows, rest = divmod(values.nbytes, width * _ITEM)
    if rest:
        raise ValueError(f"values: {values.nbytes} bytes are no rows of {width} 16-bit floats")
    for name, memory, wanted in (
        ("packed", codes, rows * width),
        ("scales", factors, rows * _SCALE),
    ):
        if memory.nbytes != wanted:
            raise ValueError(f"{name} has {memory.nbytes} bytes, should have {wanted}")
    for name, memory, item in (("values", values, _ITEM), ("scales", factors, _SCALE)):
        if memory.address % item:
            raise ValueError(f"{name} begin at {memory.address}, no multiple of {item}")
    return memories
