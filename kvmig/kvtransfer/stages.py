"""When live copying has done enough (what goes into one chunk: see `chunks`)."""

from __future__ import annotations

from kvmig.engines.base import Pace

TAIL_BLOCKS = 1
"""So few full blocks left go with the tail: another stage would cost more than it saves."""


def enough(full_blocks: int, stage: int, max_stages: int) -> bool:
    """Whether to suspend now instead of copying `full_blocks` more in live stage `stage`.

    Example: stages of 100, 4 and 1 new full blocks: the first two are copied live, the
    last block goes with the tail. With `max_stages` 0 all blocks go with it.
    """
    return full_blocks <= TAIL_BLOCKS or stage >= max_stages


FOLLOW_LEAST, FOLLOW_MOST = 3, 16
"""Answers of a following destination before which its caches are cold, and after which the request
is switched, come what may."""
NEAR = 0.2
"""Of a step: a destination that takes tokens so soon after they came is in step."""


def in_step(answers: int, pace: Pace, wait_ms: float, step_ms: float) -> bool:
    """Whether to switch to a following destination now.

    The client waits for the destination's next step, and for what is left of the one that runs
    there when the last token comes. If none runs that is nothing. If other requests run there,
    it is about what the token before waited: as long as steps take equally long at both ends it
    stays the same; if they don't, a better moment comes.
    """
    if answers < FOLLOW_LEAST:
        return False
    near = pace.others > 0 and pace.computing <= 2 and wait_ms <= NEAR * step_ms
    return near or pace.computing == 0 or answers >= FOLLOW_MOST
