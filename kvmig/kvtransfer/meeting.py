"""When to suspend a request, so that it reaches the destination just as a step begins there.

What comes in the middle of a step waits for its end. Both ends' steps run on by themselves, each
at its own pace, and the request decodes on meanwhile: to wait for a better moment costs it nothing.
"""

from __future__ import annotations

from kvmig.engines.base import Cadence
from kvmig.engines.step_hold import limit_s

NEAR = 0.3
"""Of a step: so long a wait at the destination is good enough."""
NEAR_IF_HELD = 0.1
"""The same, where the destination's step waits, too."""
SURE = 2 / 3
"""Of what a step waits: a request that is expected within that comes in time, if steps vary."""
LATER = 0.1
"""Of a step, after its expected end: then it is asked again, when the next one runs surely."""
PUT_OFF_STEPS = 16
"""Own steps after which the request is suspended, come what may."""
FIRST_LEAD_MS = 2.0
WEIGHT = 0.25


class LeadTime:
    """How long a suspended request is on its way into the destination's engine, by the last ones.

    The answer's way back is in it, so that a request comes early rather than late.
    """

    def __init__(self) -> None:
        self.ms = FIRST_LEAD_MS

    def observe(self, answered_ms: float, commit_ms: float) -> None:
        """answered_ms: from the suspension to Committed; commit_ms: of it, in the engine."""
        self.ms += WEIGHT * (max(0.0, answered_ms - commit_ms) - self.ms)


def due_ms(here: Cadence, lead_ms: float) -> float:
    """When a request whose suspension is asked for now reaches the destination's engine."""
    if not here.step_ms:
        return lead_ms
    return here.step_ms - here.since_ms % here.step_ms + lead_ms


def put_off_ms(here: Cadence, there: Cadence, lead_ms: float, can_hold: bool = False) -> float:
    """How long to let the request decode on; 0: ask for its suspension now, which happens when the
    step that runs here ends. Only that step is foreseen: of later ones too little is known.

    can_hold: a step there waits for a request that comes just after it could begin.

    Example: steps of 10 ms; here one ended just now, there one ended 3 ms ago, and a request is
    2 ms on its way. It would come 12 ms from now, 5 ms before a step ends there: too long a wait.
    In 11 ms, when the next step runs here, it is time to ask again. Had the one there ended
    6 ms ago, the request would wait 2 ms: now. Had it ended just now, the request would come 2 ms
    after the end of the step: now, if the next one waits for it.
    """
    if not here.step_ms or not there.step_ms:
        return 0.0
    ends_ms = here.step_ms - here.since_ms % here.step_ms
    waits_ms = -(there.since_ms + ends_ms + lead_ms) % there.step_ms
    near_ms = (NEAR_IF_HELD if can_hold else NEAR) * there.step_ms
    late_ms = SURE * limit_s(there.step_ms / 1e3) * 1e3 if can_hold else 0.0
    if waits_ms <= near_ms or waits_ms >= there.step_ms - late_ms:
        return 0.0
    return ends_ms + LATER * here.step_ms
