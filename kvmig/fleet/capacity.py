"""Which models may start beside those that run, and which of these make room for them. Pure.

The one that has waited longest goes first. If it doesn't fit, idle models end for it, the least
valuable ones first: never one that answers or that somebody waits for, nor one that has not yet
been there for some time, so that models which alternate don't only start and end. One that came
later may start before only where it takes nothing that who came first will need.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

GIB = 1 << 30
STAY = 4.0
"""Times as long as its start took, that a model stays at least: a fifth of the time at most is
spent on starts."""
STAY_S = 10.0
"""The same where no start was seen."""


@dataclass(frozen=True, slots=True)
class HostCapacity:
    """Memory, in bytes."""

    total: int
    """Bytes that all models together may take."""
    available: int
    """Bytes that are free on the host now."""


@dataclass(frozen=True, slots=True)
class ResidentModel:
    """A model whose deployment is there, or ordered."""

    name: str
    claim: int
    """Bytes that it takes."""
    since: float
    """When it was ordered, or began to serve."""
    stay_s: float
    """Seconds that it stays from then on."""
    ready: bool = True
    """Whether it has taken them already."""
    idle_s: float = 0.0
    priority: int = 0
    """Smaller ones stay longer."""
    kept: bool = False
    """Whether it is not to end now: it answers, or somebody waits for it."""
    pinned: bool = False
    """Whether it is never to end: it has a least number of instances."""
    leaving: bool = False
    """Whether it ends already."""
    parked: bool = False
    """Whether it takes only what it can't give back; such end first, also if they are wanted."""


@dataclass(frozen=True, slots=True)
class WaitingModel:
    """A model that would start now, or wake."""

    name: str
    claim: int
    """Bytes more than it takes already."""
    since: float


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """What was decided."""

    refused: Mapping[str, str] = field(default_factory=dict)
    """Reasons why waiting models don't start now. All others start."""
    never: Mapping[str, str] = field(default_factory=dict)
    """Reasons why waiting models can't start at all."""
    yielding: frozenset[str] = frozenset()
    """Models that are evicted for others."""
    free: int = 0
    """Bytes that are left then; 0 while anybody waits."""


def free(host: HostCapacity, residents: Iterable[ResidentModel]) -> int:
    """Bytes that the next one may take. Those that are not ready take theirs yet."""
    every = list(residents)
    claimed = sum(one.claim for one in every)
    coming = sum(one.claim for one in every if not one.ready)
    return max(0, min(host.total - claimed, host.available - coming))


def too_large(name: str, claim: int, total: int) -> str:
    """What is wrong with a model that can never start; empty: nothing."""
    if claim <= total:
        return ""
    return (
        f"model {name} needs {claim} bytes of memory, {claim - total} more than the {total} that"
        " all models may take"
    )


def plan(
    host: HostCapacity,
    waiting: Iterable[WaitingModel],
    residents: Sequence[ResidentModel],
    now: float,
) -> CapacityPlan:
    """Which models start, wait (and why) or end. now: seconds of the clock of all `since`."""
    left = free(host, residents)
    going: set[str] = set()
    """Models that start or wake now, and the first one that waits."""
    pinned = sum(one.claim for one in residents if one.pinned)
    refused, never = {}, {}
    yielding: frozenset[str] = frozenset()
    ahead: list[WaitingModel] = []
    for one in sorted(waiting, key=lambda one: (one.since, one.name)):
        if too_large(one.name, one.claim, host.total):
            never[one.name] = too_large(one.name, one.claim, host.total)
        elif one.claim <= left and _overtakes(one, ahead, host, residents):
            left -= one.claim
            going.add(one.name)
        elif pinned + one.claim > host.total:  # nobody waits for its turn
            refused[one.name] = f"{_no_room(one, left)}, the rest is taken for good"
        else:
            if not ahead:
                others = [other for other in residents if other.name not in {*going, one.name}]
                yielding = _yielding(one.claim - left, others, now)
            refused[one.name] = _why(one, left, ahead, yielding)
            ahead.append(one)
    return CapacityPlan(refused, never, yielding, 0 if ahead else left)


def _overtakes(
    one: WaitingModel,
    ahead: Sequence[WaitingModel],
    host: HostCapacity,
    residents: Iterable[ResidentModel],
) -> bool:
    """Whether all that wait longer will have their room beside it, once the others have ended.

    Those are not counted on to end that are pinned, or have come since the first one waits.
    """
    if not ahead:
        return True
    first = ahead[0].since
    staying = sum(other.claim for other in residents if other.pinned or other.since >= first)
    return staying + sum(other.claim for other in ahead) + one.claim <= host.total


def _yielding(lacking: int, residents: Iterable[ResidentModel], now: float) -> frozenset[str]:
    """The models whose end frees that many bytes; none if not enough may end."""
    every = list(residents)
    chosen = [one for one in every if one.leaving]
    idle = sorted(
        (one for one in every if not one.leaving and (one.parked or _may_end(one, now))),
        key=lambda one: (not one.parked, -one.priority, -one.idle_s, one.name),
    )
    for one in idle:
        if sum(other.claim for other in chosen) >= lacking:
            break
        chosen.append(one)
    given = sum(one.claim for one in chosen)
    if given < lacking:
        return frozenset(one.name for one in every if one.leaving)
    for one in [one for one in reversed(chosen) if not one.leaving]:  # the most valuable first
        if given - one.claim >= lacking:
            chosen.remove(one)
            given -= one.claim
    return frozenset(one.name for one in chosen)


def _may_end(one: ResidentModel, now: float) -> bool:
    in_use = one.kept or one.pinned or one.leaving or not one.ready
    return not in_use and now - one.since >= one.stay_s


def _why(
    one: WaitingModel, left: int, ahead: Sequence[WaitingModel], yielding: frozenset[str]
) -> str:
    """Names no other model: a client may not know of it."""
    room = _no_room(one, left)
    if ahead:
        return f"{room}, and {len(ahead)} that came first wait too"
    return f"{room}; idle models end for it" if yielding else f"{room}, and no model may end yet"


def _no_room(one: WaitingModel, left: int) -> str:
    return f"no room: it needs {one.claim / GIB:.1f} GiB, {left / GIB:.1f} GiB is free"
