"""Which models may start beside those that run, and which of these make room for them. Pure.

A model needs memory of the host, and on a machine with GPUs memory of these as well.

The one that has waited longest goes first. If it doesn't fit, idle models end for it, the least
valuable ones first: never one that answers or that somebody waits for, nor one that has not yet
been there for some time, so that models which alternate don't only start and end. One that came
later may start before only where it takes nothing that who came first will need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvmig.fleet import device_room
from kvmig.fleet.device_room import DeviceMemory, DeviceNeed, Places, Strategy, groups_of

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
class SharedHold:
    """What the models of a unit hold together, until the last of them has ended."""

    unit: str
    models: frozenset[str]
    """Models that run, and models that wait for their start."""
    held: Mapping[str, int]
    """Bytes of each GPU."""


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
    held: Mapping[str, int] = field(default_factory=dict)
    """Bytes that it takes of each GPU."""
    shared: SharedHold | None = None
    """What it shares with others of its unit; None: it is in none."""


@dataclass(frozen=True, slots=True)
class WaitingModel:
    """A model that would start now, or wake."""

    name: str
    claim: int
    """Bytes more than it takes already."""
    since: float
    need: DeviceNeed | None = None
    """What its instances want of GPUs; None: nothing, or they have their GPUs already."""
    instances: int = 1
    more: Mapping[str, int] = field(default_factory=dict)
    """Bytes more that it takes of GPUs that it has."""


@dataclass(frozen=True, slots=True)
class HostDevices:
    """The GPUs of the host."""

    devices: tuple[DeviceMemory, ...] = ()
    strategy: Strategy = "spread"


NO_GPUS = HostDevices()


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
    places: Mapping[str, Places] = field(default_factory=dict)
    """GPUs of the instances of models that start."""
    free_on: Mapping[str, int] = field(default_factory=dict)
    """Bytes that are left then of each GPU; empty while a model waits."""


@dataclass(frozen=True, slots=True)
class _Room:
    """Free bytes: of the host, and of each GPU."""

    host: int
    devices: Mapping[str, int]
    groups: tuple[tuple[str, ...], ...]
    strategy: Strategy

    def places(self, one: WaitingModel) -> Places | None:
        """Find places for its instances; None: there is no room for all of them."""
        short = any(self.devices.get(gpu, 0) < size for gpu, size in one.more.items())
        if one.claim > self.host or short:
            return None
        if one.need is None:
            return ()
        return device_room.assign(self.devices, one.need, one.instances, self.groups, self.strategy)

    def with_model(self, one: WaitingModel, places: Places) -> _Room:
        """The rest, once this model has started at these places."""
        taken = dict(one.more)
        for gpu in (gpu for place in places for gpu in place):
            taken[gpu] = taken.get(gpu, 0) + (0 if one.need is None else one.need.each)
        left = {gpu: size - taken.get(gpu, 0) for gpu, size in self.devices.items()}
        return replace(self, host=self.host - one.claim, devices=left)

    def without(self, residents: Iterable[ResidentModel]) -> _Room:
        """What is free once these have ended."""
        every = list(residents)
        ends = {one.name for one in every}
        held = _held(every, lambda shared: shared.models <= ends)
        more = {gpu: size + held[gpu] for gpu, size in self.devices.items()}
        return replace(self, host=self.host + sum(one.claim for one in every), devices=more)


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


def why_not_parked(more: int, free_bytes: int) -> str:
    """Why a model ends where it would be parked; empty: it is parked.

    more: bytes that it then takes of the host beyond what it takes already. free_bytes: those that
    nobody has or waits for.
    """
    if more <= max(0, free_bytes):
        return ""
    return (
        f"parked it would need {more / GIB:.1f} GiB of the host, {free_bytes / GIB:.1f} GiB is free"
    )


def plan(
    host: HostCapacity,
    waiting: Iterable[WaitingModel],
    residents: Sequence[ResidentModel],
    now: float,
    gpus: HostDevices = NO_GPUS,
) -> CapacityPlan:
    """Which models start, wait (and why) or end. now: seconds of the clock of all `since`.

    gpus: with the claims of the residents.
    """
    groups = tuple(groups_of(gpus.devices))
    whole = {one.id: one.total for one in gpus.devices}
    usable = {one.id: max(0, one.total - one.others) for one in gpus.devices}
    left = _Room(
        free(host, residents), {one.id: one.free for one in gpus.devices}, groups, gpus.strategy
    )
    empty = replace(left, host=host.total, devices=usable)
    going: set[str] = set()
    """Models that start or wake now, and the first one that waits."""
    pinned = [one for one in residents if one.pinned]
    refused, never, placed = {}, {}, {}
    yielding: frozenset[str] = frozenset()
    ahead: list[WaitingModel] = []
    for one in sorted(waiting, key=lambda one: (one.since, one.name)):
        if wrong := _too_large(one, host, gpus.devices, replace(empty, devices=whole)):
            never[one.name] = wrong
        elif (room := _beside_those_ahead(left, ahead, empty, residents)) is not None and (
            places := room.places(one)
        ) is not None:
            left = left.with_model(one, places)
            if places:
                placed[one.name] = places
            going.add(one.name)
        elif _beside(empty, pinned).places(one) is None:  # nobody waits for its turn
            refused[one.name] = f"{_no_room(one, left)}, the rest is taken for good"
        else:
            if not ahead:
                others = [other for other in residents if other.name not in {*going, one.name}]
                yielding = _yielding(one, left, others, now)
            refused[one.name] = _why(one, left, ahead, yielding)
            ahead.append(one)
    if ahead:
        return CapacityPlan(refused, never, yielding, places=placed)
    return CapacityPlan(refused, never, yielding, left.host, placed, left.devices)


def _too_large(
    one: WaitingModel, host: HostCapacity, devices: Sequence[DeviceMemory], whole: _Room
) -> str:
    """What is wrong with a model that can never start; empty: nothing."""
    if wrong := too_large(one.name, one.claim, host.total):
        return wrong
    if one.need is None or whole.places(one) is not None:
        return ""
    if wrong := device_room.too_large(f"model {one.name}", one.need, devices):
        return wrong
    least = f"model {one.name} has {one.instances} instances, each of which needs"
    return f"{least} {device_room.wanted(one.need)}: the GPUs here don't hold them all"


def _held(models: Sequence[ResidentModel], counts: Callable[[SharedHold], bool]) -> Counter[str]:
    """Bytes that they hold of each GPU. counts: which units' shared bytes are among them."""
    shared = {one.shared.unit: one.shared for one in models if one.shared is not None}
    held: Counter[str] = Counter()
    for sizes in (
        *(one.held for one in models),
        *(one.held for one in shared.values() if counts(one)),
    ):
        held.update(sizes)
    return held


def _beside(empty: _Room, staying: Iterable[ResidentModel]) -> _Room:
    """What is free while these stay."""
    every = list(staying)
    held = _held(every, lambda shared: True)
    left = {gpu: size - held[gpu] for gpu, size in empty.devices.items()}
    return replace(empty, host=empty.host - sum(one.claim for one in every), devices=left)


def _beside_those_ahead(
    left: _Room, ahead: Sequence[WaitingModel], empty: _Room, residents: Iterable[ResidentModel]
) -> _Room | None:
    """What one that came later may take: all that wait longer will have their room beside it, once
    the others have ended. None: nothing.

    Those are not counted on to end that are pinned, or have come since the first one waits.
    """
    if not ahead:
        return left
    first = ahead[0].since
    staying = [other for other in residents if other.pinned or other.since >= first]
    room = replace(_beside(empty, staying), strategy="pack")
    for other in ahead:
        if (places := room.places(other)) is None:
            return None
        room = room.with_model(other, places)
    least = {gpu: min(size, room.devices[gpu]) for gpu, size in left.devices.items()}
    return replace(left, host=min(left.host, room.host), devices=least)


def _yielding(
    one: WaitingModel, left: _Room, residents: Iterable[ResidentModel], now: float
) -> frozenset[str]:
    """The models whose end makes room for it; none if not enough may end."""
    every = list(residents)
    chosen = [other for other in every if other.leaving]
    idle = sorted(
        (other for other in every if not other.leaving and (other.parked or _may_end(other, now))),
        key=lambda other: (not other.parked, -other.priority, -other.idle_s, other.name),
    )
    for other in idle:
        if left.without(chosen).places(one) is not None:
            break
        chosen.append(other)
    if left.without(chosen).places(one) is None:
        return frozenset(other.name for other in every if other.leaving)
    for other in [each for each in reversed(chosen) if not each.leaving]:  # the most valuable first
        fewer = [each for each in chosen if each is not other]
        if left.without(fewer).places(one) is not None:
            chosen = fewer
    return frozenset(other.name for other in chosen)


def _may_end(one: ResidentModel, now: float) -> bool:
    in_use = one.kept or one.pinned or one.leaving or not one.ready
    return not in_use and now - one.since >= one.stay_s


def _why(
    one: WaitingModel, left: _Room, ahead: Sequence[WaitingModel], yielding: frozenset[str]
) -> str:
    """Names no other model: a client may not know of it."""
    room = _no_room(one, left)
    if ahead:
        return f"{room}, and {len(ahead)} that came first wait too"
    return f"{room}; idle models end for it" if yielding else f"{room}, and no model may end yet"


def _no_room(one: WaitingModel, left: _Room) -> str:
    if one.claim <= left.host and one.need is not None:
        return device_room.no_room(one.need, left.devices, left.groups)
    if one.claim <= left.host and one.more:
        gpu, size = max(one.more.items(), key=lambda more: more[1] - left.devices.get(more[0], 0))
        return device_room.no_room(DeviceNeed(size), {gpu: left.devices.get(gpu, 0)}, ())
    return f"no room: it needs {one.claim / GIB:.1f} GiB, {left.host / GIB:.1f} GiB is free"
