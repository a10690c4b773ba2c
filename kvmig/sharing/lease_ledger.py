"""The leases of a unit's memory, and the orders that bring them to their quotas. Pure.

A quota is what a member of the unit shall have, its lease what it may have by now: the agent raises
a lease before it sends the order, and lowers it only once the member has reported that it gave the
memory back.
So the leases, which bound what the members' pages hold, never add up to more than the arena.

    ledger = Ledger(1 << 30, "kvmig")
    ledger.join("a", Claim("llama", floor=16 << 20, capacity=1 << 30, granule=1 << 16))
    ledger.adapt(now=0.0)
    for name, lease in ledger.orders(): ...   # send it; answers go to `ledger.record_report`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvmig.core.errors import ConfigError
from kvmig.sharing.memory_quotas import PERIOD_S, RULES, MemoryUse, fair

PERIODS_S = {"kvmig": 0.0, "muxserve": PERIOD_S, "fixed": PERIOD_S}
"""Least time between two applications of a rule."""
MIB = 1 << 20


class MemberClaim(NamedTuple):
    """What a member is when it joins. Bytes."""

    model: str
    floor: int
    """KV cache of one request of the greatest length."""
    capacity: int
    """The most that its engine could use."""
    granule: int
    """Bytes that it takes and gives at a time."""
    guarantee: int = 0
    """What it gets back whenever it wants it; 0: a fair part of what others weren't promised."""
    lease: int = 0
    """What it has already, leased by an agent that is gone."""


class MemberReport(NamedTuple):
    """A member's report of itself. Bytes."""

    seq: int
    """Number of the newest order that it has received."""
    lease: int
    """What it has not given back."""
    used: int
    """Bytes that requests hold."""
    cached: int
    """Bytes that only the prefix cache holds."""
    wanted: int
    """Bytes that all its requests want, waiting ones included."""


class LeaseOrder(NamedTuple):
    """An order to a member: the most bytes to have, more at once, or less as soon as it can."""

    seq: int
    quota: int
    limit: int
    """What it could have if all others gave."""
    guarantee: int
    """What it gets back whenever it wants it."""


@dataclass(slots=True)
class LeaseMember:
    """One instance of a model in the unit. Bytes."""

    claim: MemberClaim
    quota: int
    """Quota by the rule; `due` follows from it."""
    lease: int
    seq: int = 0
    ordered: int = -1
    """The quota that it was sent last; -1: none."""
    bounds: tuple[int, int] = (-1, -1)
    """The limit and the guarantee that it was sent last."""
    used: int = 0
    cached: int = 0
    wanted: int = 0
    held_s: float = 0.0
    """Bytes x seconds in use since the rule was applied."""
    seen_at: float = 0.0

    @property
    def due(self) -> int:
        """What it shall have: its quota in whole granules, no more than its engine can use."""
        return self.rounded(self.quota)

    def rounded(self, size: int) -> int:
        """The most bytes of `size` that it can have."""
        return min(size, self.claim.capacity) // self.claim.granule * self.claim.granule

    def count(self, now: float) -> None:
        """Add what it used until now to the mean; before that changes."""
        self.held_s += self.used * (now - self.seen_at)
        self.seen_at = now


class LeaseLedger:
    """The leases of one unit. All times are of one clock, in seconds."""

    def __init__(self, arena: int, rule: str = "kvmig") -> None:
        """Raises ConfigError for a size or a rule that can't be."""
        if arena < MIB:
            raise ConfigError(f"--memory is {arena} bytes, must be 1 MiB or more")
        if rule not in RULES:
            raise ConfigError(f"--quotas is {rule!r:.100}, must be {' or '.join(RULES)}")
        self.arena = arena
        self.rule = rule
        self.members: dict[str, LeaseMember] = {}
        self._adapted_at = 0.0
        self._changed = False
        """Whether the rule hasn't seen the newest news."""

    @property
    def leased(self) -> int:
        """Bytes that members may have now, all together."""
        return sum(one.lease for one in self.members.values())

    def join(self, name: str, claim: MemberClaim, now: float = 0.0) -> None:
        """A new member, or a known one after its connection was lost.

        Raises ConfigError in words for the user who started it, and nothing is changed.
        """
        self._check(name, claim)
        self.members[name] = LeaseMember(claim, claim.lease, claim.lease, seen_at=now)
        self._spread(now)

    def guarantee(self, name: str, size: int, now: float = 0.0) -> None:
        """What a member gets back from now on whenever it wants it, bytes; 0: a fair part of what
        others weren't promised. Raises ConfigError in words, and nothing is changed."""
        claim = self.members[name].claim
        if size and size < claim.floor:
            raise ConfigError(
                f"{name}: its guarantee is {size} bytes, must be {claim.floor} or more, which one"
                " request of the greatest length takes, or 0: a fair part"
            )
        claim = claim._replace(guarantee=size)
        self._check(name, claim)
        self.members[name].claim = claim
        self._spread(now)

    def remove_member(self, name: str, now: float = 0.0) -> None:
        """Forget a member whose process is gone, with its memory. Unknown names are ignored."""
        if self.members.pop(name, None) is not None:
            self._spread(now)

    def record_report(self, name: str, told: MemberReport, now: float) -> None:
        """A member's report."""
        member = self.members[name]
        member.count(now)
        wanted = max(told.wanted, told.used)
        self._changed |= (member.used, member.wanted) != (told.used, wanted)
        member.used, member.cached, member.wanted = told.used, told.cached, wanted
        if told.seq == member.seq and member.ordered >= 0:
            # It has heard all orders: what it doesn't have beyond its quota it won't take.
            member.lease = max(member.ordered, told.lease)

    def adapt(self, now: float) -> None:
        """Apply the rule, if it is its time and it could find anything new."""
        due = now - self._adapted_at >= PERIODS_S[self.rule]
        if self.members and due and (self._changed or PERIODS_S[self.rule]):
            self._adapt(now)

    def orders(self, *, grow: bool = True) -> list[tuple[str, LeaseOrder]]:
        """The orders that are due now. Those to members that are to give come first; what is free
        goes to those that want it most urgently.

        grow: whether any member may get more. None may as long as members of an agent that is gone
        may still come with their leases.
        """
        told: list[tuple[str, LeaseOrder]] = []
        guarantees = self.guarantees()
        bounds = {name: (self._limit(one), guarantees[name]) for name, one in self.members.items()}
        members = sorted(self.members.items(), key=lambda one: (_need(one[1]), one[0]))
        for name, one in members:
            if one.due < one.lease and one.due != one.ordered:
                told.append((name, _order(one, one.due, bounds[name])))
        free = self.arena - self.leased
        for name, one in members if grow else ():
            gain = one.rounded(min(one.due - one.lease, free))
            first = one.ordered < 0
            if gain > 0:
                free -= gain
                one.lease += gain
            if gain > 0 or first:
                told.append((name, _order(one, one.lease, bounds[name])))
            elif bounds[name] != one.bounds:
                told.append((name, _order(one, one.ordered, bounds[name])))
        return told

    def guarantees(self) -> dict[str, int]:
        """What each member gets back whenever it wants it."""
        claims = {name: one.claim for name, one in self.members.items()}
        given = {name: max(one.floor, one.guarantee) for name, one in claims.items()}
        open_ = {name: one.floor for name, one in claims.items() if not one.guarantee}
        rest = self.arena - sum(size for name, size in given.items() if name not in open_)
        return {**given, **fair(max(rest, sum(open_.values())), open_, dict.fromkeys(open_, 1.0))}

    # -- helpers

    def _check(self, name: str, claim: MemberClaim) -> None:
        if not 0 < claim.floor <= claim.capacity:
            raise ConfigError(
                f"{name}: one request of the greatest length takes {_mib(claim.floor)} of KV cache,"
                f" its engine has {_mib(claim.capacity)}"
            )
        fits = claim.granule > 0 and not (claim.floor % claim.granule or claim.lease < 0)
        if not fits or claim.guarantee < 0:
            raise ConfigError(f"{name}: sizes {tuple(claim[1:])} can't be")
        others = {other: one.claim for other, one in self.members.items() if other != name}
        for what, mine, theirs in (
            ("one request", claim.floor, [one.floor for one in others.values()]),
            (
                "its guarantee",
                max(claim.floor, claim.guarantee),
                [max(one.floor, one.guarantee) for one in others.values()],
            ),
        ):
            missing = mine + sum(theirs) - self.arena
            if missing > 0:
                raise ConfigError(
                    f"the unit has no room for {name}: {what} takes {_mib(mine)}, those of"
                    f" {len(others)} others {_mib(sum(theirs))}, the arena has"
                    f" {_mib(self.arena)}: {_mib(missing)} are missing"
                )

    def _spread(self, now: float) -> None:
        """A member came or went: first quotas are as guaranteed, then by the rule."""
        guarantees = self.guarantees()
        floors = {name: one.claim.floor for name, one in self.members.items()}
        demand = {name: float(size) for name, size in guarantees.items()}
        quotas = fair(self.arena, floors, demand) if floors else {}
        for name, one in self.members.items():
            one.quota = quotas[name]
        if self.members and not PERIODS_S[self.rule]:
            self._adapt(now)

    def _adapt(self, now: float) -> None:
        guarantees, passed = self.guarantees(), now - self._adapted_at
        uses: list[MemoryUse] = []
        for name, one in self.members.items():
            one.count(now)
            uses.append(
                MemoryUse(
                    model=name,
                    quota=one.quota,
                    floor=one.claim.floor,
                    held=one.used,
                    mean=one.held_s / passed if passed > 0 else one.used,
                    wanted=min(one.wanted, one.claim.capacity),
                    guarantee=guarantees[name],
                )
            )
            one.held_s = 0.0
        for name, quota in RULES[self.rule](uses).items():
            self.members[name].quota = quota
        self._adapted_at, self._changed = now, False

    def _limit(self, one: LeaseMember) -> int:
        others = sum(other.claim.floor for other in self.members.values()) - one.claim.floor
        return one.rounded(self.arena - others)


def _order(one: LeaseMember, quota: int, bounds: tuple[int, int]) -> LeaseOrder:
    one.seq += 1
    one.ordered, one.bounds = quota, bounds
    return LeaseOrder(one.seq, quota, *bounds)


def _need(one: LeaseMember) -> tuple[bool, float]:
    """The smaller, the more urgent: who waits for memory, who has the least of what it shall."""
    return one.wanted <= one.lease, one.lease / max(one.due, 1)


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB"
