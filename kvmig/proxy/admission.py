"""The calls that are in: every call from its head on, with what its key allows now. Pure.

A key's grant is never kept across a wait. A call keeps the prefix of its key, and each decision is
made from the grant that the prefix has at that moment. When keys, or what is left of their quotas,
change, all calls that are in are judged again, and those that may go on no more are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from kvmig.accounts.keys import (
    BAD_KEY,
    EXPIRED,
    THE_KEY,
    AccountLimits,
    KeyDenied,
    KeyGrant,
    LimitedAccount,
    Scope,
    allows,
    limited_by,
    no_model,
    quota_used_up,
    quotas_of,
)
from kvmig.accounts.limits import (
    AccountTallies,
    LimitExceeded,
    LimitLeft,
    OwnTallies,
    RequestLimiter,
    let_in,
)
from kvmig.proxy.messages import QuotaLeft, SpentLimits


class KnownKeys(Protocol):
    """Keys as they are now."""

    def current(self, prefix: str) -> KeyGrant | None:
        """The present grant of a key that was presented before."""
        ...

    def may_reach(self, grant: KeyGrant, model: str) -> bool:
        """Whether a name that the key may use leads to the model."""
        ...


@dataclass(eq=False)
class AdmittedCall:
    """One call that is in."""

    prefix: str
    """Prefix of the call's key."""
    address: str
    scope: Scope | None
    """Scope that the key must have; None: the server checks it."""
    cut: Callable[[KeyDenied], None]
    """Called when it may go on no more."""
    name: str | None = None
    """Name of the model, as the client gave it; None: not known yet, or none."""
    model: str | None = None
    """Model of the catalogue that answers."""
    charged: bool = True
    """Whether its tokens count for quotas."""
    granted: bool = False
    """Whether the server grants its tokens one by one, and so ends it by itself."""
    limiters: Sequence[RequestLimiter] = ()
    """Limiters that count the call."""
    sequences: int = 1
    """Number of requests that the call counts as."""
    ends: float = inf
    """When its key expires, by the steady clock: a wall clock may jump."""
    expires: float | None = field(default=None, repr=False)
    """The same in Unix time, as the key has it."""


class CallAdmission:
    """The calls that are in. Each decision is made from the keys as they are then."""

    def __init__(
        self,
        keys: KnownKeys,
        clock: Callable[[], float],
        wall: Callable[[], float],
        tallies: AccountTallies | None = None,
    ) -> None:
        """clock: a steady one. wall: Unix time. tallies: None: its own, of one that is alone."""
        self._keys = keys
        self._clock = clock
        self._wall = wall
        self._tallies: AccountTallies = tallies or OwnTallies()
        self._visits: dict[str, set[AdmittedCall]] = {}
        """Visits by the prefixes of their keys."""
        self._limiters: dict[str, RequestLimiter] = {}
        """Limiters of keys and users that came here or have spent tokens, by
        `LimitedAccount.id`."""
        self._left: dict[str, QuotaLeft] = {}
        """What is left of quotas, by `Quota.id`."""

    @property
    def calls(self) -> int:
        """How many are in."""
        return sum(map(len, self._visits.values()))

    # -- one call

    def enter(
        self,
        grant: KeyGrant | None,
        address: str,
        scope: Scope | None,
        cut: Callable[[KeyDenied], None],
    ) -> AdmittedCall | KeyDenied:
        """A call's head has come; who is let in must `end_call`.

        grant: of its key, or of its session's key; None: there is none.
        """
        if grant is None:
            return BAD_KEY
        visit = AdmittedCall(grant.prefix, address, scope, cut)
        if (why := self._why_not(visit)) is not None:
            return why
        self._visits.setdefault(visit.prefix, set()).add(visit)
        return visit

    def name_model(
        self, visit: AdmittedCall, name: str | None, model: str | None, charged: bool = True
    ) -> KeyGrant | KeyDenied:
        """Check the model that the call asks for.

        name: None: it asks for an earlier answer of the model. model: None: there is none of the
        name. Returns the key's grant as it is now.
        """
        visit.name, visit.model, visit.charged = name, model, charged
        grant = self._keys.current(visit.prefix)
        if grant is None:
            return BAD_KEY
        return self._why_not(visit) or grant

    def check_limits(
        self, visit: AdmittedCall
    ) -> tuple[LimitExceeded | None, Sequence[RequestLimiter]]:
        """Why no request may come in now; None: one may. With the limits that it would meet."""
        grant = self._keys.current(visit.prefix)
        if grant is None:
            return None, ()  # it was cut
        limiters = [self._limiter_of(one) for one in limited_by(grant)]
        now = self._clock()
        reasons = (one.exceeded(now) for one in limiters)
        return next((why for why in reasons if why is not None), None), limiters

    def begin(
        self, visit: AdmittedCall, sequences: int = 1
    ) -> tuple[LimitExceeded | None, Sequence[RequestLimiter]]:
        """Let its request, with this many sequences, in past the limits; else the reason. With
        the limits that it met."""
        grant = self._keys.current(visit.prefix)
        if grant is None:
            return None, ()  # it was cut
        limiters = [self._limiter_of(one) for one in limited_by(grant)]
        with self._tallies.locked():
            exceeded = let_in(limiters, self._clock(), sequences)
        if exceeded is None:
            visit.limiters, visit.sequences = limiters, sequences
        return exceeded, limiters

    def has_quota(self, visit: AdmittedCall) -> bool:
        """Whether its tokens must be granted from now on. To be asked when it is sent on."""
        grant = self._keys.current(visit.prefix)
        quotas = () if grant is None or not visit.charged else quotas_of(grant, visit.model)
        visit.granted = bool(quotas)
        return visit.granted

    def quotas_left(self, visit: AdmittedCall) -> list[LimitLeft]:
        """What is left of the quotas that hold for it, as far as the server has reported it."""
        grant = self._keys.current(visit.prefix)
        quotas = () if grant is None or not visit.charged else quotas_of(grant, visit.model or "")
        wall = self._wall()
        return [
            left.now(one.tokens, wall)
            for one in quotas
            if (left := self._left.get(one.id)) is not None
        ]

    def end_requests(self, visit: AdmittedCall) -> None:
        """Count its requests as over, if they aren't yet."""
        limiters, visit.limiters = visit.limiters, ()
        for one in limiters:
            one.end_requests(visit.sequences)

    def end_call(self, visit: AdmittedCall) -> None:
        """End the visit."""
        self.end_requests(visit)
        visits = self._visits[visit.prefix]
        visits.remove(visit)
        if not visits:
            del self._visits[visit.prefix]

    # -- what changes

    def review(self) -> None:
        """Cut the calls that may go on no more."""
        for visit in self._all():
            if (why := self._why_not(visit)) is not None:
                visit.cut(why)

    def end_expired(self) -> bool:
        """Cut the calls whose keys have expired; whether keys of others will."""
        now = self._clock()
        soon = False
        for visit in self._all():
            if visit.ends <= now:
                visit.cut(EXPIRED)
            else:
                soon = soon or visit.ends < inf
        return soon

    def take_spent(self, spent: SpentLimits) -> None:
        """Take what the server says was used of limits."""
        now = self._clock()
        for whose, level in spent.owed.items():
            limiter = self._limiters.setdefault(whose, self._limiter(whose, AccountLimits()))
            limiter.bucket.adopt_level(level, now)
        self._left.update(spent.left)
        if spent.left:
            self.review()

    def _all(self) -> list[AdmittedCall]:
        return [visit for visits in self._visits.values() for visit in visits]

    def _why_not(self, visit: AdmittedCall) -> KeyDenied | None:
        grant = self._keys.current(visit.prefix)
        if grant is None:
            return BAD_KEY
        wall = self._wall()
        if grant.expires != visit.expires:
            visit.expires = grant.expires
            ends_s = inf if grant.expires is None else grant.expires - wall
            visit.ends = self._clock() + ends_s
        denied = allows(grant, visit.name, visit.address, wall, visit.scope)
        if denied is not None or visit.model is None:
            return denied
        if visit.name is None and not self._keys.may_reach(grant, visit.model):
            return no_model(visit.model)
        if visit.granted or not visit.charged:
            return None
        return self._used_up(grant, visit.model, wall)

    def _used_up(self, grant: KeyGrant, model: str, wall: float) -> KeyDenied | None:
        for quota in quotas_of(grant, model):
            left = self._left.get(quota.id)
            if left is not None and left.says_no(wall):
                return quota_used_up(quota, left.anew)
        return None

    def _limiter_of(self, whose: LimitedAccount) -> RequestLimiter:
        limiter = self._limiters.get(whose.id)
        if limiter is None:
            limiter = self._limiters[whose.id] = self._limiter(whose.id, whose.limits, whose.name)
        elif limiter.limits != whose.limits:
            limiter.name = whose.name
            limiter.renew(whose.limits)
        return limiter

    def _limiter(self, whose: str, limits: AccountLimits, name: str = THE_KEY) -> RequestLimiter:
        return RequestLimiter(limits, self._tallies.tally_of(whose), name)
