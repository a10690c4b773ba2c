"""Allowances: tokens that a call with a quota was granted, in pieces, before it may give them out.

What all calls of a key give out together is never more than what was granted, and that is never
more than the quota. Pure, and the messages of a front end and who grants (JSON, a line each).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from math import inf
from typing import Generic, TypeVar

import msgspec

FIRST, NEXT = 256, 1024
"""Tokens asked for: with the prompt, and from then on."""
LOW = 512
"""More are asked for when half of the last grant is left, and no more than these."""
SMALL = 32
"""Tokens of a grant, at least, that has to leave some for others."""

Held = TypeVar("Held")


class TokenRequest(msgspec.Struct, frozen=True):
    """A call wants tokens. It may be said again: what isn't used comes back at the call's end."""

    number: int
    """Number of the question."""
    source: str
    seq: int
    """Number of the call; `source` and it name the call, as in its `UsageRecord`."""
    key: str
    """The key's id."""
    began: float
    """Unix time of the call's beginning: it counts for the period of that."""
    least: int
    want: int
    model: str = ""
    """The model, as in the `UsageRecord`."""


class TokenGrant(msgspec.Struct, frozen=True):
    """Tokens that a call is granted: up to what it wanted; none where fewer than its least are
    left."""

    number: int
    tokens: int
    why: str = ""
    """Reason for the client, where there are none."""
    again: bool = False
    """Whether other calls may give some back: it is worth asking again."""


@dataclass(eq=False)
class TokenAllowance(Generic[Held]):
    """The tokens of one call that are paid for."""

    key: str
    seq: int
    began: float
    granted: int = 0
    used: int = 0
    output: int = 0
    """Tokens of answers, of what is used."""
    most_output: int | None = 0
    """Tokens that all answers may have; None: that isn't known."""
    prompts: set[Hashable] = field(default_factory=set)
    """Prompts that are paid for, or wait."""
    asking: bool = False
    refused: str = ""
    """Why there is no more."""
    away: bool = False
    """Whether the server can't be reached for more."""
    _coming: int = 0
    """Tokens that prompts wait for."""
    _last: int = 0
    """The last grant."""
    _held: deque[tuple[int, Held]] = field(default_factory=deque)
    """Tokens that came before their grant, in order."""

    @property
    def spare(self) -> int:
        """Tokens that may be given out."""
        return self.granted - self.used

    @property
    def low(self) -> bool:
        """Whether it is time to ask for more."""
        if self.asking or self.refused or self.spare > min(LOW, self._last // 2):
            return False
        return self._to_come > self.spare

    @property
    def waiting(self) -> bool:
        """Whether anything is held."""
        return bool(self._held)

    def expect(self, most: int | None) -> None:
        """Expect one more answer, of `most` tokens at most; None: that isn't known."""
        known = self.most_output is not None and most is not None
        self.most_output = (self.most_output or 0) + (most or 0) if known else None

    def await_prompt(self, tokens: int) -> None:
        """Count tokens that a prompt waits for: they are part of what is asked for from now on."""
        self._coming += tokens

    def end_prompt(self, tokens: int) -> None:
        """End the prompt's wait."""
        self._coming -= tokens

    def pay_prompt(self, tokens: int, ahead: int) -> bool:
        """Pay for a prompt if it is granted, and the first of its answers' tokens; False: it
        isn't."""
        if self.refused or self.spare < tokens + ahead:
            return False
        self.used += tokens
        return True

    def wanted(self) -> int:
        """Tokens to ask for: all prompts that wait with the first of their answers' tokens, or the
        next ones of answers."""
        if self._coming:
            return int(max(1, self._coming - self.spare + min(FIRST, self._to_come)))
        return int(max(1, min(NEXT, self._to_come - self.spare)))

    @property
    def _to_come(self) -> float:
        """Tokens that answers may still have."""
        return inf if self.most_output is None else max(0, self.most_output - self.output)

    def admits(self, tokens: int) -> bool:
        """Pay for tokens that go to the client now; False: they can't be paid for, or it isn't
        their turn."""
        if self._held or self.used + tokens > self.granted:
            return False
        self._give(tokens)
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
            self._give(count)
            released.append(what)
        return released

    def give_part(self) -> int:
        """Pay for the first of the tokens that are held, as far as they are granted; how many."""
        part = self.spare if self._held else 0
        self._give(part)
        return part

    def give_up(self) -> list[Held]:
        """Hold nothing more; what was held."""
        held = [what for _, what in self._held]
        self._held.clear()
        return held

    def _give(self, tokens: int) -> None:
        self.used += tokens
        self.output += tokens
