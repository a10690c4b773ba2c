"""What a following destination hears of its source: each step's tokens, as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvmig.ground.clock import Clock

Say = Callable[[int, list[int]], None]
"""(index of the first one among the output tokens, token ids)."""


class Feed:
    """Tokens of one request from its fork to its switch, and how long a step takes.

    Tokens that come before the destination can follow are kept for it.
    """

    def __init__(self, say: Say, clock: Clock) -> None:
        self._say = say
        self._clock = clock
        self._kept: list[int] = []
        self._next: int | None = None
        self._last = 0.0
        self._open = True
        self.steps = 0
        """Steps whose tokens were said."""
        self.step_ms = 0.0
        """Time between the last two steps."""

    def take(self, token_ids: Sequence[int]) -> None:
        """A step's tokens; after `end` they go with the commit instead."""
        now = self._clock()
        if self._last:
            self.step_ms = (now - self._last) * 1e3
        self._last = now
        self._kept += token_ids
        self._flush()

    def begin(self, start: int) -> None:
        """The destination follows; it knows the output tokens before `start`."""
        self._next = start
        self._flush()

    def end(self) -> None:
        """Say no more."""
        self._open = False

    def _flush(self) -> None:
        if self._next is None or not self._open or not self._kept:
            return
        token_ids, self._kept = self._kept, []
        first, self._next = self._next, self._next + len(token_ids)
        self.steps += 1
        self._say(first, token_ids)
