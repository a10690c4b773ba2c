"""How a pause is spread over the tokens before it, as its source foretells it: pure.

The front end holds each of them back a little longer than the one before
(`kvmig.gateway.spreading`), so the request has to decode on for some steps first.
"""

from __future__ import annotations

import math
from typing import NamedTuple

MOST_STEPS = 16
"""That a suspension is put off for it; what is left of a longer pause stays one gap."""
FIRST_MS = 2.0
WEIGHT = 0.25


class Measured(NamedTuple):
    """One pause, milliseconds."""

    tail_copy_ms: float
    answered_ms: float
    """From the suspension to Committed: the copy of the tail, the commit, and Commit's way and
    the answer's, equally long."""
    commit_ms: float
    """In the destination's engine."""
    first_token_ms: float
    """From there to the end of the first step."""


class PauseTime:
    """How long clients wait longer than for a step, by the last migrations.

    busy: whether the destination makes steps of its own, which a request that comes waits for.
    """

    def __init__(self) -> None:
        self._ms: dict[bool, float] = {}

    def expected_ms(self, busy: bool) -> float:
        """Of the next one."""
        return self._ms.get(busy, FIRST_MS)

    def observe(self, busy: bool, pause: Measured, step_ms: float) -> None:
        """step_ms: from one token to the next at the source."""
        way_ms = max(0.0, pause.answered_ms - pause.tail_copy_ms - pause.commit_ms) / 2
        until_first_ms = pause.tail_copy_ms + way_ms + pause.commit_ms + pause.first_token_ms
        ms = max(0.0, until_first_ms - step_ms)
        known = self._ms.get(busy)
        self._ms[busy] = ms if known is None else known + WEIGHT * (ms - known)


class Spread(NamedTuple):
    """stretch_ms: how much later each token comes; steps: of them before the suspension."""

    pause_ms: float
    stretch_ms: float
    steps: int


def spread(pause_ms: float, step_ms: float, share: float) -> Spread | None:
    """Over how many steps of `step_ms` a pause is spread, `share` of a step for each.

    None: it isn't. Example: 5 ms, steps of 20 ms and a share of 0.1: 3 steps, 2 ms each.
    """
    stretch_ms = share * step_ms
    if stretch_ms <= 0.0 or pause_ms <= 0.0:
        return None
    steps = min(math.ceil(pause_ms / stretch_ms), MOST_STEPS)
    return Spread(min(pause_ms, steps * stretch_ms), stretch_ms, steps)
