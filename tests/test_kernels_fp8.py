from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvmig.kernels.face import Half, Kernels
from kvmig.kernels.fp8 import packed_bytes, start_pack, start_unpack
from tests.kernel_backends import BACKENDS, ORACLE, WORKERS, loaded
from tests.poisoned import GUARD, POISON

TYPES = {Half.BF16: torch.bfloat16, Half.FP16: torch.float16}
HALVES = pytest.mark.parametrize("half", list(Half))

Bytes = NDArray[np.uint8]


def guarded(nbytes: int) -> tuple[Bytes, Bytes]:
    """Poison, and the part of it that may be written."""
    whole = np.full(nbytes + 2 * GUARD, POISON, np.uint8)
    return whole, whole[GUARD : GUARD + nbytes]


def pack(
    by: Kernels, values: Bytes, half: Half, width: int, workers: int = 0
) -> tuple[Bytes, Bytes]:
    """Packed values and scales; nothing around them was written."""
    sizes = packed_bytes(values.nbytes // 2 // width, width)
    (codes, packed), (factors, scales) = (guarded(size) for size in sizes)
    start_pack(by, values, packed, scales, half, width, workers=workers).wait()
    for whole in (codes, factors):
        assert (whole[:GUARD] == POISON).all()
        assert (whole[-GUARD:] == POISON).all()
    return packed, scales


def unpack(
    by: Kernels, packed: Bytes, scales: Bytes, half: Half, width: int, workers: int = 0
) -> Bytes:
    """The values; nothing around them was written."""
    whole, values = guarded(2 * packed.nbytes)
    start_unpack(by, packed, scales, values, half, width, workers=workers).wait()
    assert (whole[:GUARD] == POISON).all()
    assert (whole[-GUARD:] == POISON).all()
    return values


def bits(values: torch.Tensor) -> Bytes:
    """The bytes of a tensor."""
    return values.contiguous().view(torch.uint8).flatten().numpy()


def finite(bits_: NDArray[np.uint16], half: Half) -> NDArray[np.uint16]:
    """Without the codes of infinities and NaN."""
    exponent = 0x7F80 if half is Half.BF16 else 0x7C00
    return np.where((bits_ & exponent) == exponent, bits_ & ~np.uint16(exponent), bits_)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("backend", BACKENDS)
@HALVES
@settings(deadline=None, max_examples=30)
@given(rows=st.integers(0, 9), width=st.integers(1, 70) | st.just(576), seed=st.integers(0, 999))
def test_any_finite_values_are_packed_and_unpacked_as_by_the_reference(
    backend: str, workers: int, half: Half, rows: int, width: int, seed: int
) -> None:
    """Any bits: of all exponents, subnormal ones too."""
    any_bits = np.random.default_rng(seed).integers(0, 1 << 16, rows * width, np.uint16)
    values = finite(any_bits, half).view(np.uint8)
    wanted = pack(ORACLE, values, half, width)
    packed = pack(loaded(backend), values, half, width, workers)
    assert [one.tolist() for one in packed] == [one.tolist() for one in wanted]
    back = unpack(loaded(backend), *packed, half, width, workers)
    assert np.array_equal(back, unpack(ORACLE, *wanted, half, width))


@pytest.mark.parametrize("backend", BACKENDS)
@HALVES
def test_every_code_comes_back_as_torch_reads_it(backend: str, half: Half) -> None:
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    scales = np.array([0.37], np.float32)
    back = unpack(loaded(backend), codes, scales.view(np.uint8), half, len(codes))
    read = torch.from_numpy(codes).view(torch.float8_e4m3fn).float() * torch.from_numpy(scales)
    assert back.tolist() == bits(read.to(TYPES[half])).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@HALVES
def test_all_values_of_a_type_are_rounded_as_torch_rounds(backend: str, half: Half) -> None:
    """With a largest value of 448, the scale is 1."""
    exponents = finite(np.arange(1 << 16, dtype=np.uint16), half)
    values = torch.from_numpy(exponents.view(np.int16)).view(TYPES[half])
    values = torch.where(values.abs() > 448, 448.0, values.float()).to(TYPES[half])
    packed, scales = pack(loaded(backend), bits(values), half, len(values))
    assert scales.view(np.float32).tolist() == [1.0]
    rounded = values.float().to(torch.float8_e4m3fn).view(torch.uint8)
    assert packed.tolist() == rounded.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@HALVES
def test_what_comes_back_is_near(backend: str, half: Half) -> None:
    values = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).to(TYPES[half])
    kernels = loaded(backend)
    packed, scales = pack(kernels, bits(values), half, 128)
    back = torch.from_numpy(unpack(kernels, packed, scales, half, 128))
    error = (back.view(TYPES[half]).view(64, 128).float() - values.float()).abs()
    tiny = torch.from_numpy(scales.view(np.float32))[:, None] / 1024
    # A little more than 1/16: the way back rounds once more.
    assert bool((error <= torch.maximum(values.float().abs() * 0.066, tiny * 1.01)).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_of_zeros_has_the_scale_one(backend: str) -> None:
    packed, scales = pack(loaded(backend), bits(torch.zeros(2, 8).half()), Half.FP16, 8)
    assert scales.view(np.float32).tolist() == [1.0, 1.0]
    assert not packed.any()


@pytest.mark.parametrize("backend", BACKENDS)
@HALVES
def test_what_is_no_number_does_not_come_back_as_one(backend: str, half: Half) -> None:
    values = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0]]).to(TYPES[half])
    kernels = loaded(backend)
    packed, scales = pack(kernels, bits(values), half, 2)
    back = torch.from_numpy(unpack(kernels, packed, scales, half, 2)).view(TYPES[half])
    assert bool(back.view(2, 2).isnan().any(1).all())


VALUES, PACKED, SCALES = np.zeros(64, np.uint8), np.zeros(32, np.uint8), np.zeros(16, np.uint8)


@pytest.mark.parametrize(
    ("values", "packed", "scales", "width", "message"),
    [
        (VALUES, PACKED, SCALES, 0, "width is 0"),
        (VALUES, PACKED, SCALES, 7, "values: 64 bytes are no rows of 7 16-bit floats"),
        (VALUES, PACKED[1:], SCALES, 8, "packed has 31 bytes, should have 32"),
        (VALUES, PACKED, SCALES[4:], 8, "scales has 12 bytes, should have 16"),
        (np.zeros(65, np.uint8)[1:], PACKED, SCALES, 8, "values begin at .* no multiple of 2"),
        (VALUES[::2], PACKED, SCALES, 8, "not contiguous"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    values: Bytes, packed: Bytes, scales: Bytes, width: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        start_pack(ORACLE, values, packed, scales, Half.BF16, width)
    with pytest.raises(ValueError, match=message):
        start_unpack(ORACLE, packed, scales, values, Half.BF16, width)
