# mypy: allow-untyped-decorators
"""16-bit floats to float8 e4m3 and back, in Triton.

Types are converted bit by bit: sm_80 has no fp8 conversions, and Triton's interpreter doesn't
round as the hardware does. Float32 bits are sign, 8 bits of exponent (bias 127) and 23 of
mantissa; those of e4m3 are sign, 4 (bias 7) and 3, without infinities, and 0x7F is NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvmig.kernels.triton_copy import pointer


@triton.jit
def half_to_float(bits: tl.tensor, bf16: tl.constexpr) -> tl.tensor:
    """uint16 bits of a bfloat16 or float16 to float32."""
    if bf16:
        return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def float_to_half(value: tl.tensor, bf16: tl.constexpr) -> tl.tensor:
    """float32 to the uint16 bits of a bfloat16 or float16, rounded to nearest even."""
    if bf16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return tl.where(is_nan, (bits >> 16) | 0x40, rounded).to(tl.uint16)
    return value.to(tl.float16).to(tl.uint16, bitcast=True)


@triton.jit
def float_to_e4m3(value: tl.tensor) -> tl.tensor:
    """float32 to the bits of a float8 e4m3 in uint8, rounded to nearest even, saturating."""
    bits = value.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # The exponent's bias falls by 120, and 20 bits of mantissa are rounded away.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 a unit is 2^-9, which is what adding 2^14 rounds to.
    subnormal = (tl.abs(value) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, tl.minimum(normal, 0x7E))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_to_float(code: tl.tensor) -> tl.tensor:
    """uint8 bits of a float8 e4m3 to float32."""
    magnitude = code.to(tl.uint32) & 0x7F
    normal = (magnitude << 20) + (120 << 23)
    subnormal = (magnitude.to(tl.float32) * 0.001953125).to(tl.uint32, bitcast=True)
    bits = tl.where(magnitude < 8, subnormal, normal)
    bits = tl.where(magnitude == 0x7F, 0x7FC00000, bits)
    return (bits | ((code.to(tl.uint32) & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["halves", "packed", "scales", "rows"])
def pack_kernel(
    halves: tl.tensor,
    packed: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    width: tl.constexpr,
    columns: tl.constexpr,
    tile: tl.constexpr,
    bf16: tl.constexpr,
    half_align: tl.constexpr,
    packed_align: tl.constexpr,
) -> None:
    """`tile` rows at a time. Addresses: halves [rows, width] of 16-bit floats, packed [rows, width]
    bytes, scales float32 [rows]. columns: the power of two that is no less than `width`."""
    column = tl.arange(0, columns)[None, :]
    first = tl.program_id(0) * tile
    while first < rows:
        row = first + tl.arange(0, tile)
        mask = (row < rows)[:, None] & (column < width)
        place = row.to(tl.int64)[:, None] * width + column
        bits = tl.load(pointer(halves, tl.uint16, half_align) + place, mask=mask, other=0)
        value = half_to_float(bits, bf16)
        # Bits of positive floats are ordered as they are, and a NaN is the largest.
        largest = half_to_float(tl.max(bits & 0x7FFF, axis=1).to(tl.uint16), bf16)
        scale = tl.where(largest == 0, 1.0, tl.div_rn(largest, 448.0))
        code = float_to_e4m3(tl.div_rn(value, tl.broadcast_to(scale[:, None], value.shape)))
        tl.store(pointer(packed, tl.uint8, packed_align) + place, code, mask=mask)
        tl.store(pointer(scales, tl.float32, 4) + row, scale, mask=row < rows)
        first += tl.num_programs(0) * tile


@triton.jit(do_not_specialize=["halves", "packed", "scales", "rows"])
def unpack_kernel(
    halves: tl.tensor,
    packed: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    width: tl.constexpr,
    columns: tl.constexpr,
    tile: tl.constexpr,
    bf16: tl.constexpr,
    half_align: tl.constexpr,
    packed_align: tl.constexpr,
) -> None:
    """The way back, with the arguments of `pack_kernel`."""
    column = tl.arange(0, columns)[None, :]
    first = tl.program_id(0) * tile
    while first < rows:
        row = first + tl.arange(0, tile)
        mask = (row < rows)[:, None] & (column < width)
        place = row.to(tl.int64)[:, None] * width + column
        code = tl.load(pointer(packed, tl.uint8, packed_align) + place, mask=mask, other=0)
        scale = tl.load(pointer(scales, tl.float32, 4) + row, mask=row < rows, other=0.0)
        bits = float_to_half(e4m3_to_float(code) * scale[:, None], bf16)
        tl.store(pointer(halves, tl.uint16, half_align) + place, bits, mask=mask)
        first += tl.num_programs(0) * tile
