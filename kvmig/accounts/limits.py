"""Limits of a key: requests at once, requests and tokens a minute. Pure.

Each proxy lets requests in by itself. Of requests it has an equal part of the key's limits, so that
all proxies together never let in more. Tokens are counted by the server, which tells every proxy
what a key has spent; none is refused in the midst of its answer, the next request waits instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvmig.accounts.keys import KeyTerms

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
        """Take over the level that somebody else knows."""
        self.level, self.at = level, now

    def wait_s(self, now: float) -> float:
        """Until the key owes nothing; 0: it owes nothing."""
        owed = self.now(now) - self.per_minute
        return max(0.0, owed * MINUTE_S / self.per_minute)


@dataclass
class KeyLimits:
    """What one proxy lets in for one key."""

    terms: KeyTerms
    part: Part = WHOLE
    running: int = 0
    bucket: Bucket = field(init=False)
    _due: float = 0.0
    """When the next request would come if all came evenly (GCRA's theoretical arrival time)."""

    def __post_init__(self) -> None:
        self.bucket = Bucket(self.terms.tpm or 1)

    def renew(self, terms: KeyTerms, now: float) -> None:
        """The key allows something else from now on; what came, runs, and was spent, counts on."""
        came = max(0.0, self._due - now) / self._interval_s
        self.terms = terms
        self._due = now + came * self._interval_s
        self.bucket.per_minute = terms.tpm or 1

    def enter(self, now: float) -> Exceeded | None:
        """Let a request in, which must `leave`; or say why not."""
        if self.terms.parallel is not None and self.running >= self._parallel:
            sentence = f"the API key may have {self.terms.parallel} requests at once"
            return Exceeded(f"{sentence}{self._here}, try again when one has ended", BUSY_S)
        if self.terms.rpm is not None and (wait_s := self._early_s(now)) > 0:
            sentence = f"the API key may send {self.terms.rpm} requests a minute"
            return Exceeded(f"{sentence}{self._here}, try again in {wait_s:.1f} s", wait_s)
        if self.terms.tpm is not None and (wait_s := self.bucket.wait_s(now)) > 0:
            sentence = f"the API key may use {self.terms.tpm} tokens a minute"
            return Exceeded(f"{sentence}, try again in {wait_s:.1f} s", wait_s)
        if self.terms.rpm is not None:
            self._due = max(self._due, now) + self._interval_s
        self.running += 1
        return None

    def leave(self) -> None:
        """A request that was let in is over."""
        self.running -= 1

    def headers(self, now: float) -> list[tuple[bytes, bytes]]:
        """As OpenAI's clients know them."""
        found: list[tuple[bytes, bytes]] = []
        if self.terms.rpm is not None:
            ahead_s = max(0.0, self._due - now)
            left = int((self._spare_s - ahead_s) / self._interval_s + 1 + 1e-9)
            found += _shown(b"requests", self.terms.rpm, max(0, left), ahead_s)
        if self.terms.tpm is not None:
            level, most = self.bucket.now(now), self.terms.tpm
            found += _shown(b"tokens", most, max(0, int(most - level)), level * MINUTE_S / most)
        return found

    @property
    def _parallel(self) -> int:
        return self.part.share(self.terms.parallel or 0)

    @property
    def _here(self) -> str:
        return f" ({self.part.of} proxies share that)" if self.part.of > 1 else ""

    @property
    def _interval_s(self) -> float:
        """Between two requests that come evenly."""
        return MINUTE_S * self.part.of / (self.terms.rpm or 1)

    @property
    def _spare_s(self) -> float:
        """So much earlier a request may come: a minute's may come at once."""
        return max(0.0, MINUTE_S - self._interval_s)

    def _early_s(self, now: float) -> float:
        return self._due - now - self._spare_s


def _shown(what: bytes, limit: int, left: int, reset_s: float) -> list[tuple[bytes, bytes]]:
    return [
        (b"x-ratelimit-limit-" + what, b"%d" % limit),
        (b"x-ratelimit-remaining-" + what, b"%d" % left),
        (b"x-ratelimit-reset-" + what, b"%.3fs" % reset_s),
    ]
