"""Headroom of priority classes, in an instance's own KV blocks (Llumnix, section 4.4).

A class with a target keeps what the instance holds beyond the load at which a decode step
takes as long as the target: the paper's "capacity minus the ideal load" (1,600 tokens for
LLaMA-7B on an A10), found by measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import linear_regression

from kvmig.core.priorities import PriorityClass
from kvmig.engines.base import ServingEngine, StepTime

STEP_TIMES_S = 30.0
"""How long decode steps may be measured at the start, once for a model on a device."""


async def measured_headroom(
    engine: ServingEngine, classes: Sequence[PriorityClass]
) -> dict[int, float]:
    """The headroom of each priority; an engine is measured only for classes with a target."""
    targets = any(one.target_ms for one in classes)
    times = await engine.step_times(STEP_TIMES_S) if targets else []
    return headroom_blocks(classes, times, engine.load().total_blocks, engine.layout.block_tokens)


def headroom_blocks(
    classes: Sequence[PriorityClass],
    times: Sequence[StepTime],
    total_blocks: int,
    block_tokens: int,
) -> dict[int, float]:
    """Priority -> blocks to keep free; those that keep none are left out.

    times: of this instance, for the classes with a target; total_blocks: its KV cache.
    """
    capacity = total_blocks * block_tokens
    tokens = {
        one.priority: (
            capacity - min(load_within(one.target_ms, times), capacity)
            if one.target_ms
            else min(one.headroom_tokens, capacity)
        )
        for one in classes
    }
    return {priority: kept / block_tokens for priority, kept in tokens.items() if kept > 0}


def load_within(target_ms: float, times: Sequence[StepTime]) -> float:
    """Tokens in a batch whose decode step takes `target_ms`; may be infinite, and is 0 if no
    load is so quick.

    By a straight line: attention reads every token once a step. With one time only, or with
    times that don't grow, as if half the tokens took half the time.

    Example: 10 ms at 1,000 tokens and 20 ms at 3,000 are 5 ms + 1 ms / 200 tokens: 15 ms at 2,000.
    """
    if not times:
        return 0.0
    slope, base = 0.0, 0.0
    if len({one.tokens for one in times}) > 1:
        slope, base = linear_regression([one.tokens for one in times], [one.ms for one in times])
    if slope <= 0 or base < 0:
        slope, base = max(one.ms / one.tokens for one in times), 0.0
    return max(target_ms - base, 0.0) / slope
