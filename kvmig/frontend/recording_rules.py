"""How much a recording may take once it is resampled to a model's rate. Pure."""

from __future__ import annotations

import math

SAMPLE_BYTES = 4
MOST_BYTES = 40_000_000
"""Bytes of a resampled recording: ten minutes at 16 kHz."""
MOST_WEIGHTS = 1_000_000
"""Weights of a resampler that makes one set for each phase of its output."""


class ResamplingTooLarge(ValueError):
    """A recording that may not be resampled."""


def check_resampling(samples: int, rate: int, wanted: int, *, phases: bool) -> int:
    """The number of samples that a resampled recording has. Raises ResamplingTooLarge.

    samples: of all channels. rate, wanted: samples a second, before and after. phases: whether the
    resampler has weights for each phase of its output.
    """
    made = math.ceil(samples * wanted / rate)
    if made * SAMPLE_BYTES > MOST_BYTES:
        raise ResamplingTooLarge(
            f"a recording of {samples} samples, {rate} a second, takes {made * SAMPLE_BYTES} bytes"
            f" once it has {wanted} samples a second, as the model needs it: allowed are"
            f" {MOST_BYTES}"
        )
    common = math.gcd(rate, wanted)
    weights = (rate // common) * (wanted // common)
    if phases and weights > MOST_WEIGHTS:
        raise ResamplingTooLarge(
            f"a recording of {rate} samples a second can't be resampled to {wanted}: that takes"
            f" {weights} weights, allowed are {MOST_WEIGHTS}. Send it with {wanted} a second"
        )
    return made
