"""Allowances: tokens that a call with a quota was granted, in pieces, before it may give them out.

What all calls of a key give out together is never more than what was granted, and that is never
more than the quota. Pure, and the messages of a front end and who grants (JSON, a line each).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

FIRST, NEXT = 256, 1024
"""Tokens asked for: with the prompt, and from then on."""
LOW = 512
"""More are asked for when half of the last grant is left, and no more than these."""
SMALL = 32
"""Tokens of a grant, at least, that has to leave some for others."""

Held = TypeVar("Held")


class Ask(msgspec.Struct, frozen=True):
    """A call wants tokens. It may be said again: what isn't used comes back at the call's end."""

    number: int
    """Of the question."""
    source: str
    seq: int
    """With `source` the name of the call, as in its `UsageRecord`."""
    key: str
    """Its id."""
    began: float
    """Unix time of the call's beginning: it counts for the period of that."""
    least: int
    want: int
    model: str = ""
    """As in its `UsageRecord`."""


class Granted(msgspec.Struct, frozen=True):
    """As many as there are, up to what was wanted; none where there are fewer than the least."""

    number: int
    tokens: int
    why: str = ""
    """Where there are none: a sentence for the client."""


@dataclass(eq=False)
class Allowance(Generic[Held]):
    """Of one call."""

    key: str
    seq: int
    began: float
    granted: int = 0
    used: int = 0
    prompts: set[Hashable] = field(default_factory=set)
    """Those that are paid for."""
    asking: bool = False
    refused: str = ""
    """Why there is no more."""
    _last: int = 0
    """The last grant."""
    _held: deque[tuple[int, Held]] = field(default_factory=deque)
    """Tokens that came before their grant, in order."""

    @property
    def low(self) -> bool:
        """Whether it is time to ask for more."""
        spare = self.granted - self.used
        return not (self.asking or self.refused) and spare <= min(LOW, self._last // 2)

    @property
    def waiting(self) -> bool:
        """Whether anything is held."""
        return bool(self._held)

    def admits(self, tokens: int) -> bool:
        """Pay for tokens that go to the client now; False: they can't be paid for, or it isn't
        their turn."""
        if self._held or self.used + tokens > self.granted:
            return False
        self.used += tokens
        return True

    def hold(self, tokens: int, what: Held) -> None:
        """Keep what wasn't admitted."""
        self._held.append((tokens, what))

    def grow(self, tokens: int) -> list[Held]:
        """Take a grant; what was held and is paid for now."""
        self.granted, self._last = self.granted + tokens, tokens
        released = []
        while self._held and self.used + self._held[0][0] <= self.granted:
            count, what = self._held.popleft()
            self.used += count
            released.append(what)
        return released

    def give_up(self) -> list[Held]:
        """Hold nothing more; what was held."""
        held = [what for _, what in self._held]
        self._held.clear()
        return held
