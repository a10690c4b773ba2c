"""Whether a session's blocks had better be copied before its turn, than be computed again. Pure.

A turn goes where its beginning is, unless that instance is so crowded that another one is better.
There the beginning is lacking: it is copied first, where that takes at most half the time of
computing it. What a copy takes is what migrations have measured, and what prompts take is what
their first tokens have shown (`PrefillRate`). Nothing is copied until both are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

MOVE_S = 0.004
"""What a session's move takes besides its bytes: messages, and steps that it waits for."""
LEAST_BLOCKS = 8
"""Fewer aren't worth a move."""
MOST_RATIO = 0.5
"""A copy that takes a larger share of the time of a prefill isn't made: it gains its turn little,
and others wait for the link (`bench.idle_sessions`)."""
KEPT = 0.9
"""Weight of what was measured before, at each new sample."""
LEAST_TOKENS = 256
"""Prompts of which less is computed say nothing: a step takes as long with few tokens."""


class PrefillRate:
    """Tokens of prompts that are computed per second, as the last ones show."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def note_prompt(self, tokens: int, seconds: float) -> None:
        """Note the time from a prompt's start to its first token. tokens: those that were
        computed."""
        if tokens >= LEAST_TOKENS and seconds > 0:
            self._tokens = KEPT * self._tokens + tokens
            self._seconds = KEPT * self._seconds + seconds

    @property
    def tokens_s(self) -> float:
        """Tokens per second; 0: nothing was measured."""
        return self._tokens / self._seconds if self._seconds else 0.0


class CarryRates(NamedTuple):
    """What was measured, in KV blocks per second; 0: nothing was."""

    copy: float
    prefill: float


def carry_ratio(blocks: float, rates: CarryRates) -> float:
    """Time to copy these blocks, by the time to compute them; 1 where they are not copied.

    Example: 400 blocks at 12,000 blocks/s take 37 ms with the messages, at 2,300 computed blocks/s
    174 ms: 0.21. At 600 blocks/s the copy takes 671 ms: 1, they are computed.
    """
    if blocks <= 0 or rates.copy <= 0 or rates.prefill <= 0:
        return 1.0
    ratio = (MOVE_S + blocks / rates.copy) * rates.prefill / blocks
    return ratio if ratio <= MOST_RATIO else 1.0


class TurnCarriage(NamedTuple):
    """A session's blocks that are copied before its turn."""

    destination: str
    """The turn's instance."""
    blocks: float
    """Blocks that this instance lacks."""
    compute_s: float
    """Time in which it computes them: the turn waits no longer for the copy."""


def plan_carriage(
    held: Mapping[str, float], chosen: str, source: str, rates: CarryRates
) -> TurnCarriage | None:
    """What is copied from `source` to the turn's instance; None: it is computed there, if at all.

    held: blocks of the turn's prompt that instances hold.
    """
    blocks = held.get(source, 0.0) - held.get(chosen, 0.0)
    if chosen == source or blocks < LEAST_BLOCKS or carry_ratio(blocks, rates) >= 1:
        return None
    return TurnCarriage(chosen, blocks, blocks / rates.prefill)
