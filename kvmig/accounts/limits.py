"""Limits of keys and users: requests at once, requests and tokens per minute. Pure.

A request is a sequence: a call with several answers or prompts counts as several. What all proxies
of a fleet let in is counted in one place (`AccountTallies`): a limit is the same however many there
are. Tokens are counted by the server, which reports to every proxy what was spent; no request is
refused in the midst of its answer, the next one waits instead.

A server doesn't know what was spent before it, nor the first proxy what came before it: each takes
it that every caller has just used a minute's worth, so that a limit holds across its death.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple, Protocol, get_args

from kvmig.accounts.keys import THE_KEY, AccountLimits

MINUTE_S = 60.0
BUSY_S = 1.0
"""When a client may try again whose other requests still run."""


class ArrivalDebt(NamedTuple):
    """Requests that came faster than the minute's rate pays them off, as of a time."""

    requests: float = 0.0
    at: float = -inf

    def now(self, rpm: int, now: float) -> float:
        """Requests that are not paid off yet; infinite means a whole minute's."""
        requests = rpm if self.requests == inf else self.requests
        return max(0.0, requests - (now - self.at) * rpm / MINUTE_S)


class AccountTally(Protocol):
    """What all proxies have let in for one key, or one user."""

    def running(self) -> int:
        """Requests that run, or are held."""
        ...

    def arrivals(self) -> ArrivalDebt:
        """See there."""
        ...

    def enter(self, requests: int) -> None:
        """Count more running requests."""
        ...

    def end_requests(self, requests: int) -> None:
        """Count requests as over."""
        ...

    def note_arrivals(self, arrivals: ArrivalDebt, forget_at: float) -> None:
        """Record arrivals. forget_at: when nothing of them is left."""
        ...


class AccountTallies(Protocol):
    """The tallies of all accounts."""

    def tally_of(self, whose: str) -> AccountTally:
        """The tally of a `Limited.id`."""
        ...

    def locked(self) -> AbstractContextManager[None]:
        """Exclude other changes within the block, which must be short."""
        ...


class OwnTally:
    """The tally of a proxy that is alone."""

    def __init__(self, since: float = -inf) -> None:
        self._running = 0
        self._arrivals = ArrivalDebt(inf, since)

    def running(self) -> int:
        return self._running

    def arrivals(self) -> ArrivalDebt:
        return self._arrivals

    def enter(self, requests: int) -> None:
        self._running += requests

    def end_requests(self, requests: int) -> None:
        self._running -= requests

    def note_arrivals(self, arrivals: ArrivalDebt, forget_at: float) -> None:
        self._arrivals = arrivals


class OwnTallies:
    """The tallies of a proxy that is alone."""

    def __init__(self, since: float = -inf) -> None:
        """since: when it began; what came before isn't known."""
        self._since = since
        self._all: dict[str, OwnTally] = {}

    def tally_of(self, whose: str) -> OwnTally:
        return self._all.setdefault(whose, OwnTally(self._since))

    @contextmanager
    def locked(self) -> Iterator[None]:
        yield


class LimitExceeded(NamedTuple):
    """Why a request may not come in now, and when it may; None: never."""

    sentence: str
    again_s: float | None


@dataclass
class SpendBucket:
    """Tokens that were spent faster than `per_minute` pays them off: a minute's worth is free."""

    per_minute: int
    level: float = 0.0
    at: float = 0.0

    def now(self, now: float) -> float:
        """The level."""
        return max(0.0, self.level - (now - self.at) * self.per_minute / MINUTE_S)

    def spend(self, tokens: float, now: float) -> None:
        """Record used tokens."""
        self.level, self.at = self.now(now) + tokens, now

    def adopt_level(self, level: float, now: float) -> None:
        """Take over the level that a server knows; one that has just started knows less."""
        self.level, self.at = max(level, self.now(now)), now

    def wait_s(self, now: float) -> float:
        """Seconds until nothing is owed; 0: nothing is."""
        owed = self.now(now) - self.per_minute
        return max(0.0, owed * MINUTE_S / self.per_minute)


What = Literal["requests", "tokens"]


class LimitLeft(NamedTuple):
    """The rest of a limit per minute, or of a quota."""

    left: int
    limit: int
    reset_s: float
    """Seconds until all of it is left; infinite: never."""


@dataclass
class RequestLimiter:
    """What is let in for one key, or one user."""

    limits: AccountLimits
    tally: AccountTally = field(default_factory=OwnTally)
    name: str = THE_KEY
    """Name in error messages."""
    bucket: SpendBucket = field(init=False)

    def __post_init__(self) -> None:
        self.bucket = SpendBucket(self.limits.tpm or 1)

    def renew(self, limits: AccountLimits) -> None:
        """Set other limits; what came, runs, and was spent, still counts."""
        self.limits = limits
        self.bucket.per_minute = limits.tpm or 1

    def exceeded(self, now: float, requests: int = 1) -> LimitExceeded | None:
        """Why no call of `requests` requests may come in now; None: one may."""
        parallel, rpm, tpm = self.limits.parallel, self.limits.rpm, self.limits.tpm
        if parallel is not None and self.tally.running() + requests > parallel:
            return self._refuse(f"have {parallel} requests at once", requests, parallel, BUSY_S)
        if rpm is not None and (wait_s := self._early_s(rpm, now, requests)) > 0:
            return self._refuse(f"send {rpm} requests per minute", requests, rpm, wait_s)
        if tpm is not None and (wait_s := self.bucket.wait_s(now)) > 0:
            return self._refuse(f"use {tpm} tokens per minute", 0, tpm, wait_s)
        return None

    def enter(self, now: float, requests: int = 1) -> None:
        """A call comes in; it must `end_requests`."""
        if (rpm := self.limits.rpm) is not None:
            count = self.tally.arrivals().now(rpm, now) + requests
            self.tally.note_arrivals(ArrivalDebt(count, now), now + count * MINUTE_S / rpm)
        self.tally.enter(requests)

    def end_requests(self, requests: int = 1) -> None:
        """A call that was let in is over."""
        self.tally.end_requests(requests)

    def left(self, what: What, now: float) -> LimitLeft | None:
        """What is left of a limit; None: there is no limit."""
        rpm, tpm = self.limits.rpm, self.limits.tpm
        if what == "requests" and rpm is not None:
            count = self.tally.arrivals().now(rpm, now)
            return LimitLeft(max(0, int(rpm - count + 1e-9)), rpm, count * MINUTE_S / rpm)
        if what == "tokens" and tpm is not None:
            level = self.bucket.now(now)
            return LimitLeft(max(0, int(tpm - level)), tpm, level * MINUTE_S / tpm)
        return None

    def _refuse(self, may: str, requests: int, most: int, again_s: float) -> LimitExceeded:
        sentence = f"{self.name} may {may}"
        if requests > most:
            asks = f"the call asks for {requests} (n times its prompts): send fewer in a call"
            return LimitExceeded(f"{sentence}, {asks}", None)
        when = "when one has ended" if "at once" in may else f"in {again_s:.1f} s"
        return LimitExceeded(f"{sentence}, try again {when}", again_s)

    def _early_s(self, rpm: int, now: float, requests: int) -> float:
        """Seconds by which the call is too early."""
        over = self.tally.arrivals().now(rpm, now) + requests - rpm
        return over * MINUTE_S / rpm if over > 1e-9 else 0.0


def let_in(
    limiters: Sequence[RequestLimiter], now: float, requests: int = 1
) -> LimitExceeded | None:
    """Let a call of several requests in past all limits; or past none, and return why."""
    for one in limiters:
        if (why := one.exceeded(now, requests)) is not None:
            return why
    for one in limiters:
        one.enter(now, requests)
    return None


def headers(
    limiters: Sequence[RequestLimiter], now: float, quotas: Sequence[LimitLeft] = ()
) -> list[tuple[bytes, bytes]]:
    """Headers as OpenAI's clients know them, for the limits of which least is left.

    quotas: of tokens, as they are now.
    """
    found: list[tuple[bytes, bytes]] = []
    for what in get_args(What):
        states = [left for one in limiters if (left := one.left(what, now)) is not None]
        states += quotas if what == "tokens" else ()
        if states:
            least, word = min(states), what.encode()
            found += [
                (b"x-ratelimit-limit-" + word, b"%d" % least.limit),
                (b"x-ratelimit-remaining-" + word, b"%d" % least.left),
            ]
            if least.reset_s < inf:
                found.append((b"x-ratelimit-reset-" + word, b"%.3fs" % least.reset_s))
    return found
