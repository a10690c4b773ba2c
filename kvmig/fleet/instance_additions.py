"""When another instance of a model is tried whose last ones have not started. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from kvmig.fleet.autoscale import InstanceLoad, ScalingOrder, next_order

FIRST_PAUSE_S = 10.0
LAST_PAUSE_S = 300.0


@dataclass(eq=False)
class InstanceAdditions:
    """The additions of one model's instances, as far as they have failed."""

    failures: int = 0
    """Failed additions in a row."""
    why: str = ""
    until: float | None = None
    """Time of the next try; None: not known before the next look."""
    left_s: int = 0
    """Seconds until then, at the last look."""

    def fail(self, why: str) -> None:
        """An instance could not be added, or has failed."""
        self.failures, self.why, self.until = self.failures + 1, why, None

    def next_order(
        self, instances: Sequence[InstanceLoad], wanted: int, now: float
    ) -> ScalingOrder | None:
        """The next step from these instances; it adds none before the pause is over. now: of any
        steady clock."""
        order = next_order(instances, wanted)
        if order is None and all(one.state == "serving" for one in instances):
            self.failures, self.why, self.until, self.left_s = 0, "", None, 0
        if not self.failures:
            return order
        if self.until is None:
            self.until = now + min(FIRST_PAUSE_S * 2 ** (self.failures - 1), LAST_PAUSE_S)
        self.left_s = max(0, ceil(self.until - now))
        adds = order is not None and order.more > 0 and not order.failed
        return None if adds and self.left_s else order

    @property
    def sentence(self) -> str:
        """Why no instance is added now; empty: none has failed."""
        if not self.failures:
            return ""
        return f"no other instance starts: {self.why}; the next try is in {self.left_s} s"
