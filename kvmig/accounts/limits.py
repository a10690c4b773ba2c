"""Limits of keys and users: requests at once, requests and tokens a minute. Pure.

Each proxy lets requests in by itself. Of requests it has an equal part of each limit, so that all
proxies together never let in more. Tokens are counted by the server, which tells every proxy what
was spent; no request is refused in the midst of its answer, the next one waits instead.

A proxy doesn't know what came to the one before it, nor a server what was spent before it: each
takes it that everybody has just used a minute's worth, so that a limit holds across its death.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple, get_args

from kvmig.accounts.keys import THE_KEY, Limits

MINUTE_S = 60.0
BUSY_S = 1.0
"""When a client may try again whose other requests still run."""


class Part(NamedTuple):
    """Of a limit: that of one proxy among so many."""

    number: int = 0
    of: int = 1

    def share(self, whole: int) -> int:
        """So many of the whole; all parts together are the whole."""
        return whole // self.of + (self.number % self.of < whole % self.of)


WHOLE = Part()
"""Of a proxy that is alone."""


class Exceeded(NamedTuple):
    """Why a request may not come in now, and when it may."""

    sentence: str
    again_s: float


@dataclass
class Bucket:
    """Tokens that were spent faster than `per_minute` pays them off: a minute's worth is free."""

    per_minute: int
    level: float = 0.0
    at: float = 0.0

    def now(self, now: float) -> float:
        """The level."""
        return max(0.0, self.level - (now - self.at) * self.per_minute / MINUTE_S)

    def spend(self, tokens: float, now: float) -> None:
        """They were used."""
        self.level, self.at = self.now(now) + tokens, now

    def told(self, level: float, now: float) -> None:
        """Take over the level that a server knows; one that starts anew knows less."""
        self.level, self.at = max(level, self.now(now)), now

    def wait_s(self, now: float) -> float:
        """Until nothing is owed; 0: nothing is."""
        owed = self.now(now) - self.per_minute
        return max(0.0, owed * MINUTE_S / self.per_minute)


What = Literal["requests", "tokens"]


class Left(NamedTuple):
    """Of a limit a minute."""

    left: int
    limit: int
    reset_s: float
    """Until all of it is left."""


@dataclass
class Limiter:
    """What one proxy lets in for one key, or one user."""

    limits: Limits
    part: Part = WHOLE
    name: str = THE_KEY
    """In a sentence."""
    since: float = -inf
    """Since when it counts; what came before isn't known."""
    running: int = 0
    bucket: Bucket = field(init=False)
    _due: float = field(init=False)
    """When the next request would come if all came evenly (GCRA's theoretical arrival time)."""

    def __post_init__(self) -> None:
        self.bucket = Bucket(self.limits.tpm or 1)
        self._due = self._latest_due

    def renew(self, limits: Limits, now: float) -> None:
        """Other limits hold from now on; what came, runs, and was spent, counts on."""
        came = max(0.0, self._due - now) / self._interval_s
        self.limits = limits
        self._due = max(self._latest_due, now + came * self._interval_s)
        self.bucket.per_minute = limits.tpm or 1

    def exceeded(self, now: float) -> Exceeded | None:
        """Why no request may come in now; None: one may."""
        if self.limits.parallel is not None and self.running >= self._parallel:
            sentence = f"{self.name} may have {self.limits.parallel} requests at once"
            return Exceeded(f"{sentence}{self._here}, try again when one has ended", BUSY_S)
        if self.limits.rpm is not None and (wait_s := self._early_s(now)) > 0:
            sentence = f"{self.name} may send {self.limits.rpm} requests a minute"
            return Exceeded(f"{sentence}{self._here}, try again in {wait_s:.1f} s", wait_s)
        if self.limits.tpm is not None and (wait_s := self.bucket.wait_s(now)) > 0:
            sentence = f"{self.name} may use {self.limits.tpm} tokens a minute"
            return Exceeded(f"{sentence}, try again in {wait_s:.1f} s", wait_s)
        return None

    def enter(self, now: float) -> None:
        """A request comes in; it must `leave`."""
        if self.limits.rpm is not None:
            self._due = max(self._due, now) + self._interval_s
        self.running += 1

    def leave(self) -> None:
        """A request that was let in is over."""
        self.running -= 1

    def left(self, what: What, now: float) -> Left | None:
        """Of a limit; None: there is none."""
        rpm, tpm = self.limits.rpm, self.limits.tpm
        if what == "requests" and rpm is not None:
            ahead_s = max(0.0, self._due - now)
            left = int((self._spare_s - ahead_s) / self._interval_s + 1 + 1e-9)
            return Left(max(0, left), rpm, ahead_s)
        if what == "tokens" and tpm is not None:
            level = self.bucket.now(now)
            return Left(max(0, int(tpm - level)), tpm, level * MINUTE_S / tpm)
        return None

    @property
    def _parallel(self) -> int:
        return self.part.share(self.limits.parallel or 0)

    @property
    def _here(self) -> str:
        return f" ({self.part.of} proxies share that)" if self.part.of > 1 else ""

    @property
    def _interval_s(self) -> float:
        """Between two requests that come evenly."""
        return MINUTE_S * self.part.of / (self.limits.rpm or 1)

    @property
    def _spare_s(self) -> float:
        """So much earlier a request may come: a minute's may come at once."""
        return max(0.0, MINUTE_S - self._interval_s)

    @property
    def _latest_due(self) -> float:
        """After all that may have come until `since`."""
        return self.since + self._spare_s + self._interval_s

    def _early_s(self, now: float) -> float:
        return self._due - now - self._spare_s


def let_in(limiters: Sequence[Limiter], now: float) -> Exceeded | None:
    """Let a request in past all of them; or past none, and say why."""
    for one in limiters:
        if (why := one.exceeded(now)) is not None:
            return why
    for one in limiters:
        one.enter(now)
    return None


def headers(limiters: Sequence[Limiter], now: float) -> list[tuple[bytes, bytes]]:
    """As OpenAI's clients know them: of the limits those of which least is left."""
    found: list[tuple[bytes, bytes]] = []
    for what in get_args(What):
        states = [left for one in limiters if (left := one.left(what, now)) is not None]
        if states:
            least, word = min(states), what.encode()
            found += [
                (b"x-ratelimit-limit-" + word, b"%d" % least.limit),
                (b"x-ratelimit-remaining-" + word, b"%d" % least.left),
                (b"x-ratelimit-reset-" + word, b"%.3fs" % least.reset_s),
            ]
    return found
