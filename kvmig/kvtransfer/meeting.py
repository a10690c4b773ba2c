"""When to suspend a request, so that it reaches the destination just before a step begins there.

What comes in the middle of a step waits for its end. Both ends' steps run on by themselves, each
at its own pace, and the request decodes on meanwhile: to wait for a better moment costs it nothing.
"""

from __future__ import annotations

from kvmig.engines.base import Cadence

NEAR = 0.3
"""Of a step: so long a wait at the destination is good enough."""
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


def put_off_ms(here: Cadence, there: Cadence, lead_ms: float) -> float:
    """How long to let the request decode on; 0: ask for its suspension now, which happens when the
    step that runs here ends. Only that step is foreseen: of later ones too little is known.

    Example: steps of 10 ms; here one ended just now, there one ended 3 ms ago, and a request is
    2 ms on its way. It would come 12 ms from now, 5 ms before a step ends there: too long a wait.
    In 11 ms, when the next step runs here, it is time to ask again. Had the one there ended
    6 ms ago, the request would wait 2 ms: now.
    """
    if not here.step_ms or not there.step_ms:
        return 0.0
    ends_ms = here.step_ms - here.since_ms % here.step_ms
    waits_ms = -(there.since_ms + ends_ms + lead_ms) % there.step_ms
    return 0.0 if waits_ms <= NEAR * there.step_ms else ends_ms + LATER * here.step_ms
