"""Whether a plan of moves gains more than it delays. Pure.

All is counted in requests: what the placement serves more within a horizon, against those that
come while their model has fewer instances, or whose instance pauses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvmig.placement.moves import PlanWave, Slot

MARGIN = 1.2
"""Factor by which the gain must exceed what is delayed."""


class PlanWorth(NamedTuple):
    """What speaks for a plan, and what against it."""

    gained: float
    """Requests within the horizon."""
    delayed: float
    """Requests."""

    @property
    def it(self) -> bool:
        """Whether it is worth it."""
        return self.gained > MARGIN * self.delayed


def worth(gain: float, horizon_s: float, delayed: float) -> PlanWorth:
    """gain: requests per second."""
    return PlanWorth(gain * horizon_s, delayed)


def delayed(
    waves: Iterable[PlanWave],
    now: Mapping[Slot, float],
    then: Mapping[Slot, float],
    pause_s: float = 0.1,
) -> float:
    """Requests that wait because of it. now, then: requests per second of each instance, in the
    placement that is and in the one that comes; pause_s: of an instance's streams, while they move.

    An instance that is in neither, for a while, counts as serving nothing.
    """
    rates = {**then, **now}
    served: dict[str, float] = {}
    for (model, _), rate in now.items():
        served[model] = served.get(model, 0.0) + rate
    on = set(now)
    total = 0.0
    for wave in waves:
        gone = {(one.model, one.unit) for one in wave.steps if one.kind in ("drain", "gap")}
        left = dict.fromkeys(served, 0.0)
        for slot in on - gone:
            left[slot[0]] = left.get(slot[0], 0.0) + rates.get(slot, 0.0)
        total += wave.seconds * sum(max(0.0, rate - left[one]) for one, rate in served.items())
        total += pause_s * sum(
            rates.get((one.model, one.unit), 0.0)
            for one in wave.steps if one.kind in ("drain", "move")
        )  # fmt: skip
        on = (on - gone) | {(one.model, one.unit) for one in wave.steps if one.kind == "start"}
    return total
