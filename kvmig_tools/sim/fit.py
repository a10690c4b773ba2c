"""Fits a cost model to measured times, and says how far off it is. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvmig_tools.sim.cost import Copy, Decode, Prefill


class PromptTime(NamedTuple):
    """A prompt of so many tokens, alone: its first token came after `ms`."""

    tokens: int
    ms: float


class StepTime(NamedTuple):
    """A step of so many sequences with `context` tokens together."""

    sequences: int
    context: float
    ms: float


class StageTime(NamedTuple):
    """A copy stage of so many bytes."""

    nbytes: int
    ms: float


class Error(NamedTuple):
    """Of the model at the measured points, as shares of what was measured."""

    mean: float
    """Root of the mean square."""
    most: float


def fit_prefill(times: Sequence[PromptTime]) -> tuple[Prefill, Error]:
    """base + per_token n + per_token_squared n^2."""
    tokens = np.array([one.tokens for one in times], dtype=np.float64)
    terms = np.stack([np.ones_like(tokens), tokens, tokens**2], axis=1)
    found, error = _fit(terms, np.array([one.ms for one in times]))
    return Prefill(*found), error


def fit_decode(times: Sequence[StepTime]) -> tuple[Decode, Error]:
    """base + per_sequence B + per_context_token T."""
    terms = np.array([[1.0, one.sequences, one.context] for one in times])
    found, error = _fit(terms, np.array([one.ms for one in times]))
    return Decode(*found), error


def fit_copy(times: Sequence[StageTime], bytes_per_token: int, hop_ms: float) -> tuple[Copy, Error]:
    """stage + bytes / bandwidth; one whose time doesn't grow is as quick as 1 TB/s."""
    terms = np.array([[1.0, one.nbytes] for one in times])
    found, error = _fit(terms, np.array([one.ms for one in times]))
    bandwidth = 1e3 / found[1] if found[1] > 1e-9 else 1e12
    return Copy(found[0], bytes_per_token, bandwidth, hop_ms), error


def _fit(terms: NDArray[np.float64], ms: NDArray[np.float64]) -> tuple[list[float], Error]:
    """Least squares of relative errors, no coefficient below 0: the worst is left out, again."""
    columns = list(range(terms.shape[1]))
    while True:
        weighted = terms[:, columns] / ms[:, None]
        scale = np.abs(weighted).max(axis=0)
        found, *_ = np.linalg.lstsq(weighted / scale, np.ones_like(ms), rcond=None)
        if found.min() >= 0 or len(columns) == 1:
            break
        del columns[int(found.argmin())]
    coefficients = np.zeros(terms.shape[1])
    coefficients[columns] = np.maximum(found, 0) / scale
    off = terms @ coefficients / ms - 1
    error = Error(float(np.sqrt((off**2).mean())), float(np.abs(off).max()))
    return [float(one) for one in coefficients], error
