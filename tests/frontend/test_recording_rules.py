"""A recording that is resampled takes little more than what it gives, and is as vLLM makes it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.frontend.recording_rules import (
    MOST_BYTES,
    SAMPLE_BYTES,
    ResamplingTooLarge,
    check_resampling,
)

RATES = (8_000, 11_025, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000)


def test_ten_minutes_at_16_khz_are_the_most() -> None:
    assert check_resampling(600, 1, 16_000, phases=False) == 9_600_000
    with pytest.raises(ResamplingTooLarge, match=r"takes 41600000 bytes.*allowed are 40000000"):
        check_resampling(650, 1, 16_000, phases=False)


@pytest.mark.parametrize("rate", RATES)
def test_usual_rates_are_resampled_by_every_resampler(rate: int) -> None:
    for wanted in (16_000, 24_000):
        assert check_resampling(rate, rate, wanted, phases=True) == wanted


def test_a_rate_that_has_nothing_in_common_with_the_models_is_refused_where_it_needs_weights() -> (
    None
):
    with pytest.raises(ResamplingTooLarge, match="655349 samples a second can't be resampled"):
        check_resampling(10, 655_349, 16_000, phases=True)
    assert check_resampling(655_349, 655_349, 16_000, phases=False) == 16_000


@given(st.integers(0, 10**9), st.integers(1, 655_350), st.integers(1, 192_000))
def test_no_resampled_recording_takes_more_than_it_may(
    samples: int, rate: int, wanted: int
) -> None:
    try:
        made = check_resampling(samples, rate, wanted, phases=True)
    except ResamplingTooLarge:
        return
    assert made * SAMPLE_BYTES <= MOST_BYTES
    assert made >= samples * wanted / rate
