"""The reasons of decisions about places, as long as they are kept. Pure.

A decision has a row for each node. Of all that were made the latest are kept, so that memory stays
bounded: the decision about an instance that came long ago may be gone.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmig.fleet.place_choice import PlaceExplanation

ROWS = 100_000
"""Rows of all decisions that are kept, at most, apart from the latest decision's."""


@dataclass(frozen=True, slots=True)
class PlacedDecision:
    """A decision that an instance was started by."""

    at: float
    """Unix time."""
    explanation: PlaceExplanation


class PlaceHistory:
    """Decisions by deployment and instance."""

    def __init__(self, rows: int = ROWS) -> None:
        """rows: that are kept."""
        self._most = rows
        self._decisions: dict[tuple[str, str], PlacedDecision] = {}
        self.rows = 0
        """How many there are."""

    def keep(
        self, deployment: str, instance: str, at: float, explanation: PlaceExplanation
    ) -> None:
        """Keep a decision. at: Unix time."""
        key = deployment, instance
        self._forget(key)
        self._decisions[key] = PlacedDecision(at, explanation)
        self.rows += len(explanation.nodes)
        while self.rows > self._most and len(self._decisions) > 1:
            self._forget(next(iter(self._decisions)))

    def decision(self, deployment: str, instance: str) -> PlacedDecision | None:
        """What was decided about an instance; None: it is not kept, or there was none."""
        return self._decisions.get((deployment, instance))

    def _forget(self, key: tuple[str, str]) -> None:
        if (gone := self._decisions.pop(key, None)) is not None:
            self.rows -= len(gone.explanation.nodes)
