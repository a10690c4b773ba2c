"""What one request has seen of its instances' ends, and whether it may run again. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

PATIENCE_S = 12.0
"""Longest wait for word of what became of missing instances: a launcher ends a silent one
after 10 s."""

Verdict = Literal["run", "wait", "poison"]


@dataclass(slots=True)
class Crashes:
    """Instances that went while the request ran there.

    An instance is missing when its connection is lost or it is silent, hung or failed: it
    may come back. Only whoever sees its process knows that it crashed.
    """

    crashed: list[str] = field(default_factory=list)
    """Names, in the order of their crashes; a restarted one may be in it again."""
    missing: dict[str, float] = field(default_factory=dict)
    """Name -> since when."""

    def missed(self, instance: str, now: float) -> None:
        """It is missing, and the request ran there."""
        self.missing.setdefault(instance, now)

    def returned(self, instance: str) -> None:
        """It was not the request's fault. Unknown ones are ignored."""
        self.missing.pop(instance, None)

    def confirmed(self, instance: str) -> None:
        """It has crashed. Ignored if it wasn't missing: the request didn't run there."""
        if self.missing.pop(instance, None) is not None:
            self.crashed.append(instance)

    def verdict(self, now: float, most: int) -> Verdict:
        """Whether it may run on a further instance; `most` crashes make it poison.

        With as many missing as would make it poison, it waits until their fate is known,
        so that it takes no further instance along; but no longer than PATIENCE_S.
        """
        if len(self.crashed) >= most:
            return "poison"
        if not self.missing or len(self.crashed) + len(self.missing) < most:
            return "run"
        return "wait" if now - max(self.missing.values()) < PATIENCE_S else "run"
