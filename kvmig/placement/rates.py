"""Rates of models as they are measured, and whether they have changed. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

LEAST_RATE = 0.01
"""Requests per second of a model that has hardly any: plans divide by rates."""
DEVIATIONS = 3.0
"""Standard deviations of a count of random arrivals by which a rate must differ."""


class MeasuredRates:
    """Means that forget: what came `span_s` ago counts a third of what came just now."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._seconds = 0.0
        """Time that counts: grows to span_s."""
        self._arrivals: dict[str, float] = {}

    def add(self, arrivals: Mapping[str, float], seconds: float) -> None:
        """Add what came in the last `seconds`, by model."""
        keeps = math.exp(-seconds / self._span_s)
        self._seconds = self._seconds * keeps + self._span_s * (1 - keeps)
        gained = self._span_s * (1 - keeps) / seconds
        for name in self._arrivals.keys() | arrivals.keys():
            before = self._arrivals.get(name, 0.0) * keeps
            self._arrivals[name] = before + arrivals.get(name, 0.0) * gained

    @property
    def settled(self) -> bool:
        """Whether enough was seen to decide by."""
        return self._seconds >= 0.6 * self._span_s

    def rates(self) -> dict[str, float]:
        """Requests per second, by model."""
        if not self._seconds:
            return {}
        return {
            name: max(LEAST_RATE, count / self._seconds) for name, count in self._arrivals.items()
        }

    def changed(self, planned: Mapping[str, float], change: float) -> list[str]:
        """Models whose rate is another than planned, by the part `change` and by more than chance
        explains; none before anything was seen."""
        now = self.rates()
        if not now:
            return []
        return [
            name
            for name, before in planned.items()
            if abs(now.get(name, LEAST_RATE) - before)
            > max(change * before, self._chance(max(before, now.get(name, LEAST_RATE))))
        ]

    def _chance(self, rate: float) -> float:
        """How far a rate of random arrivals may be off, as it is measured here."""
        unseen = 1 - self._seconds / self._span_s
        return DEVIATIONS * math.sqrt(rate * (1 + unseen) / (1 - unseen) / (2 * self._span_s))
