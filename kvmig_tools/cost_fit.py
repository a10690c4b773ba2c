"""Fits a model's step times on shares of a device, as `kvmig.placement` computes with them. Pure.

Each coefficient is at least 0, and the sum of squared relative errors is the least there is
(non-negative least squares, by SciPy).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvmig.core.errors import ConfigError
from kvmig.placement.step_costs import SATURATED, FitErrors, StepCost
from kvmig_tools.sim.fit import PromptTime, StepTime

LEAST_STEP_MS = 1e-3
"""A decode step's constant part at least: the placement wants it above 0."""


class ShareTimes(NamedTuple):
    """What was measured on one share of the device."""

    share: float
    """Above 0, at most 1."""
    prompts: Sequence[PromptTime]
    steps: Sequence[StepTime]


def fit_step_cost(times: Sequence[ShareTimes]) -> StepCost:
    """The coefficients, and the errors at the measured points in percent.

    Raises ConfigError where SciPy isn't installed.
    """
    prompts = [(1 / one.share, time) for one in times for time in one.prompts]
    steps = [(1 / one.share, time) for one in times for time in one.steps]
    prefill, prefill_errors = _fit(
        [
            [1.0, time.tokens / 1e3 * x, time.tokens / 1e3, time.tokens**2 / 1e6]
            for x, time in prompts
        ],
        [time.ms for _, time in prompts],
    )
    decode, decode_errors = _fit(
        [
            [
                1.0,
                max(0.0, x - SATURATED),
                time.sequences,
                time.sequences * x,
                time.context / 1e3,
                time.context / 1e3 * x,
            ]
            for x, time in steps
        ],
        [time.ms for _, time in steps],
    )
    p0, p1, p2, p3 = prefill
    d0, d1, d2, d3, d4, d5 = decode
    return StepCost(
        (p0, p1, p2, p3),
        (max(LEAST_STEP_MS, d0), d1, d2, d3, d4, d5),
        FitErrors(prefill_errors, decode_errors),
    )


def _fit(
    terms: Sequence[Sequence[float]], ms: Sequence[float]
) -> tuple[list[float], tuple[float, float]]:
    """Coefficients of the terms, and (median, 90th percentile) of the errors in percent."""
    try:
        from scipy.optimize import nnls
    except ImportError as error:
        raise ConfigError(
            'SciPy is not installed, which fits costs: pip install "kvmig[profile]"'
        ) from error
    wanted: NDArray[np.float64] = np.array(ms, dtype=np.float64)
    weighted = np.array(terms, dtype=np.float64) / wanted[:, None]
    scale = weighted.max(axis=0)
    scale[scale == 0] = 1.0  # no point has this term
    found, _ = nnls(weighted / scale, np.ones_like(wanted))
    coefficients = found / scale
    off = 100 * np.abs(weighted @ coefficients - 1)
    median, high = np.percentile(off, [50, 90])
    return [float(one) for one in coefficients], (round(float(median), 2), round(float(high), 2))
