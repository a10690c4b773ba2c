"""Request lengths as the Llumnix paper draws them (its Table 1).

S, M and L are truncated Zipf distributions; ShareGPT's and BurstGPT's are straight lines
in log(tokens) between the table's percentiles, with a lower tail that gives the table's mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

MOST = 6144
"""Lengths are capped here, inputs and outputs alike."""

Tokens = NDArray[np.int64]


class Lengths(Protocol):
    """A distribution of token counts."""

    def draw(self, random: RandomState, count: int) -> Tokens:
        """[count] lengths of at least 1."""
        ...


@dataclass(frozen=True)
class Zipf:
    """Ranks 1 .. 2 mean - 1 with weight k^-alpha, stretched so that the sample has `mean`."""

    mean: int
    alpha: float

    def draw(self, random: RandomState, count: int) -> Tokens:
        ranks = np.arange(1, 2 * self.mean)
        weights = ranks.astype(np.float64) ** -self.alpha
        drawn = random.choice(ranks, size=count, p=weights / weights.sum())
        stretched = np.ceil(drawn * (self.mean / drawn.mean()))
        capped: Tokens = np.minimum(stretched, MOST).astype(np.int64)
        return capped


@dataclass(frozen=True)
class Quantiles:
    """Through (share, tokens) points, straight in log(tokens), ends included.

    Below the first point the line runs to `LOW` at share 0, through a point at half of the
    first share that makes the mean `mean`.
    """

    mean: float
    points: tuple[tuple[float, float], ...]

    LOW = 2.0

    def draw(self, random: RandomState, count: int) -> Tokens:
        return self._at(random.random_sample(count), self._bend)

    def _at(self, shares: NDArray[np.float64], bend: float) -> Tokens:
        first = self.points[0]
        known: Sequence[tuple[float, float]] = (
            (0.0, self.LOW),
            (first[0] / 4, bend),
            *self.points,
        )
        logs = np.interp(shares, [x for x, _ in known], np.log([y for _, y in known]))
        tokens: Tokens = np.maximum(np.rint(np.exp(logs)), 1).astype(np.int64)
        return tokens

    @cached_property
    def _bend(self) -> float:
        """By bisection: the mean grows with it."""
        shares = (np.arange(100_000) + 0.5) / 100_000
        low, high = self.LOW, self.points[0][1]
        for _ in range(40):
            middle = (low + high) / 2
            if self._at(shares, middle).mean() < self.mean:
                low = middle
            else:
                high = middle
        return (low + high) / 2


S, M, L = Zipf(128, 2.0), Zipf(256, 1.5), Zipf(512, 1.15)
SHAREGPT_IN = Quantiles(306, ((0.5, 74), (0.8, 348), (0.95, 1484), (0.99, 3388), (1, 4200)))
SHAREGPT_OUT = Quantiles(500, ((0.5, 487), (0.8, 781), (0.95, 988), (0.99, 1234), (1, 2400)))
BURSTGPT_IN = Quantiles(830, ((0.5, 582), (0.8, 1427), (0.95, 2345), (0.99, 3549), (1, MOST)))
BURSTGPT_OUT = Quantiles(271, ((0.5, 243), (0.8, 434), (0.95, 669), (0.99, 964), (1, 2000)))
