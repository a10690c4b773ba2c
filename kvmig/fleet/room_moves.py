"""Moves of instances that make room for one that has none. Pure; all sizes are bytes.

Where neither a parked nor an idle model may end, others can still make room: an instance starts
again elsewhere, the requests of the old one move there, and it ends. A hole is a place that is
large enough for the waiting instance once some instances have left it. Those that leave need a
place each in addition to all that is there, as they come before the old ones go. The planner of
`kvmig.placement.moves` decides whether each step on the way is legal, and how long it takes; what
it refuses is not done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from kvmig.fleet.place_choice import choose_places, with_places
from kvmig.fleet.worker_filters import TINY, admits
from kvmig.fleet.worker_nodes import NO_GPU, InstanceNeed, InstancePlace, NodeRoom, Rooms
from kvmig.placement.moves import (
    ModelNeeds,
    MoveUnit,
    PlacedLease,
    PlacementSite,
    PlanRefused,
    Slot,
    plan,
    seconds,
)

MOST_MOVES = 4
"""Instances that move for one that waits, at most."""
MOST_HOLES = 16
"""Holes that are looked at, those that miss least first."""


@dataclass(frozen=True, slots=True)
class MovableInstance:
    """An instance that may move: it serves, its requests can move, and it has not just moved."""

    instance: str
    place: InstancePlace
    need: InstanceNeed
    """What it wants of a node, wherever it is."""
    start_s: float
    """Seconds until another one serves."""
    kv: int = 0
    """Bytes of its KV cache, of all that it takes."""
    used: int = 0
    """Bytes of these that live requests hold."""


class RoomMove(msgspec.Struct, frozen=True):
    """An instance that moves."""

    model: str
    instance: str
    node: str
    gpus: tuple[str, ...]
    """UUIDs of the GPUs that it leaves."""
    to_node: str
    to_gpus: tuple[str, ...]
    load_bytes: int
    """Weights and all else that another instance takes before its KV cache."""
    move_bytes: int
    """KV cache of live requests."""


class RoomPlan(msgspec.Struct, frozen=True):
    """Moves that make room for an instance."""

    node: str
    gpus: tuple[str, ...]
    """The place that it gets."""
    moves: tuple[RoomMove, ...]
    seconds: float
    """Seconds until the last one is over."""

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes that instances move from and to."""
        return frozenset(name for one in self.moves for name in (one.node, one.to_node))

    @property
    def cost_bytes(self) -> int:
        """Bytes that are loaded and moved."""
        return sum(one.load_bytes + one.move_bytes for one in self.moves)


def make_room(
    rooms: Rooms, need: InstanceNeed, movable: Sequence[MovableInstance], most_s: float
) -> RoomPlan | None:
    """The moves with the least bytes after which the instance has a place; None: there are none.

    rooms: what is free now. most_s: seconds that the moves may take.
    """
    best: RoomPlan | None = None
    for hole in _holes(rooms, need, movable):
        if best is not None and hole.size >= best.cost_bytes:
            break  # those that follow move more
        found = _through(rooms, need, hole)
        if found is None or found.seconds > most_s:
            continue
        if best is None or found.cost_bytes < best.cost_bytes:
            best = found
    return best


@dataclass(frozen=True, slots=True)
class _Hole:
    """A place, and who leaves it."""

    place: InstancePlace
    leaving: tuple[MovableInstance, ...]

    @property
    def size(self) -> int:
        """Bytes that are loaded and moved for it."""
        return sum(map(_cost, self.leaving))


def _size(need: InstanceNeed, place: InstancePlace) -> int:
    """Bytes of an instance: of its GPUs, or of the node's memory."""
    return place.each * len(place.gpus) if place.gpus else need.memory


def _load(one: MovableInstance) -> int:
    return _size(one.need, one.place) - one.kv


def _cost(one: MovableInstance) -> int:
    return _load(one) + one.used


def _holes(rooms: Rooms, need: InstanceNeed, movable: Sequence[MovableInstance]) -> list[_Hole]:
    """The holes that miss least, those with the least to move first."""
    there: dict[str, list[MovableInstance]] = {}
    for one in movable:
        there.setdefault(one.place.node, []).append(one)
    bounds = sorted(
        (_least_short(room, need), name)
        for name in there
        if (room := rooms.get(name)) is not None and admits(room.node, need)
    )
    emptied: list[tuple[int, str, tuple[str, ...], int]] = []
    for least, name in bounds:
        if len(emptied) == MOST_HOLES and least > emptied[-1][0]:
            break  # nor does any that follows miss less
        emptied = sorted([*emptied, *_emptied(rooms[name], need, there[name])])[:MOST_HOLES]
    found = []
    for _, name, gpus, each in emptied:
        place = InstancePlace(name, gpus, each)
        cheapest = sorted(there[name], key=lambda one: (_cost(one), one.need.model, one.instance))
        leaving = _leaving(rooms[name], need, place, cheapest)
        if leaving is not None:
            found.append(_Hole(place, leaving))
    return sorted(found, key=lambda one: (one.size, one.place.node, one.place.gpus))


def _least_short(room: NodeRoom, need: InstanceNeed) -> int:
    """Bytes that each place of a node misses at least."""
    if not need.wants:
        return max(0, need.memory - room.memory)
    most = max(room.devices.values(), default=0)
    return max(0, min(want.each for want in need.wants) - most)


def _emptied(
    room: NodeRoom, need: InstanceNeed, movable: Sequence[MovableInstance]
) -> Iterator[tuple[int, str, tuple[str, ...], int]]:
    """Places of a node that could be emptied far enough: the bytes that they miss, node, GPUs, and
    bytes of each."""
    name = room.node.name
    if not _could_be_left(room, need, movable):
        return
    if not need.wants:
        yield max(0, need.memory - room.memory), name, (), 0
        return
    largest = max(room.node.sizes.values(), default=0)
    wants = [want for want in need.wants if want.each <= largest and not want.at]
    if not wants:
        return
    reach = dict(room.devices)
    """Bytes that each GPU has once all have left it."""
    for one in movable:
        for gpu in one.place.gpus:
            reach[gpu] += one.place.each
    for want in wants:
        each = want.each
        fitting = [gpu for gpu, size in reach.items() if size >= each and want.allows(gpu)]
        if len(fitting) < want.devices:
            continue
        short = {gpu: max(0, each - room.devices[gpu]) for gpu in fitting}
        if want.devices == 1:
            for gpu, size in short.items():
                yield size, name, (gpu,), each
            continue
        for group in room.node.groups:
            chosen = sorted((gpu for gpu in group if gpu in short), key=short.__getitem__)
            gpus = chosen[: want.devices]
            if len(gpus) == want.devices:
                ordered = tuple(gpu for gpu in room.devices if gpu in gpus)
                yield sum(map(short.__getitem__, gpus)), name, ordered, each


def _could_be_left(room: NodeRoom, need: InstanceNeed, movable: Sequence[MovableInstance]) -> bool:
    """Whether its memory and other resources are enough once all have left it."""
    memory = need.memory - room.memory
    if memory > 0 and memory > sum(one.need.memory for one in movable):
        return False
    for name, amount in need.resources.items():
        others = sum(one.need.resources.get(name, 0.0) for one in movable)
        if amount > room.resources.get(name, 0.0) + others + TINY:
            return False
    return True


_Part = tuple[int, str]
"""A GPU (0), the node's memory (1) or another resource (2), by its name."""


def _leaving(
    room: NodeRoom, need: InstanceNeed, place: InstancePlace, movable: Sequence[MovableInstance]
) -> tuple[MovableInstance, ...] | None:
    """The instances that leave a place; None: not enough can. movable: on its node, the cheapest
    first."""
    lacks: dict[_Part, float] = {(0, gpu): place.each - room.devices[gpu] for gpu in place.gpus}
    lacks[1, ""] = need.memory - room.memory
    for name, amount in need.resources.items():
        lacks[2, name] = amount - room.resources.get(name, 0.0)
    rest, chosen = list(movable), list[MovableInstance]()
    while len(chosen) <= MOST_MOVES:
        missing = [part for part, amount in lacks.items() if amount > TINY]
        if not missing:
            return tuple(chosen)
        # Of GPUs the one that misses most, then memory, then the rest.
        worst = min(missing, key=lambda part: (part[0], -lacks[part], part))
        here = [(one, gain) for one in rest if (gain := _gives(one).get(worst, 0.0)) > 0]
        if not here:
            return None
        enough = [one for one, gain in here if gain + TINY >= lacks[worst]]
        leaves = enough[0] if enough else max(here, key=lambda one: one[1])[0]
        chosen.append(leaves)
        rest.remove(leaves)
        for part, amount in _gives(leaves).items():
            if part in lacks:
                lacks[part] -= amount
    return None


def _gives(one: MovableInstance) -> dict[_Part, float]:
    """What an instance gives back of its node when it leaves."""
    found: dict[_Part, float] = {(0, gpu): one.place.each for gpu in one.place.gpus}
    found[1, ""] = one.need.memory
    found.update({(2, name): amount for name, amount in one.need.resources.items()})
    return found


def _through(rooms: Rooms, need: InstanceNeed, hole: _Hole) -> RoomPlan | None:
    """The plan by which they leave the hole; None: there is none."""
    # Nobody moves onto the hole's GPUs. What else it needs, it needs once the others have left.
    left = with_places(rooms, replace(need, memory=0, resources={}), [hole.place])
    here = hole.place.node
    to: list[InstancePlace] = []
    for one in hole.leaving:
        elsewhere = {name: room for name, room in left.items() if name != here or one.place.gpus}
        places = choose_places(elsewhere, one.need, 1, "pack")
        if not places:
            return None
        to += places
        left = with_places(left, one.need, places)
    after = left[here]
    if after.memory + sum(one.need.memory for one in hole.leaving) < need.memory:
        return None
    for name, amount in need.resources.items():
        given_back = sum(one.need.resources.get(name, 0.0) for one in hole.leaving)
        if after.resources.get(name, 0.0) + given_back + TINY < amount:
            return None
    took = _seconds(rooms, need, hole, to)
    if took is None:
        return None
    moves = tuple(
        RoomMove(
            one.need.model, one.instance, one.place.node, one.place.gpus, there.node, there.gpus,
            _load(one), one.used,
        )
        for one, there in zip(hole.leaving, to, strict=True)
    )  # fmt: skip
    return RoomPlan(hole.place.node, hole.place.gpus, moves, took)


# -- proven by the planner of placements


def _seconds(
    rooms: Rooms, need: InstanceNeed, hole: _Hole, to: Sequence[InstancePlace]
) -> float | None:
    """How long the moves take; None: the planner knows no legal way."""
    unit_of = _units([*(one.place for one in hole.leaving), *to, hole.place])
    moved = zip(hole.leaving, to, strict=True)
    if any(unit_of[one.place] == unit_of[there] for one, there in moved):
        return None  # a unit has one instance of each model: the planner could not see the move
    memory = _free_in(rooms, unit_of)
    now, target = dict[Slot, PlacedLease](), dict[Slot, PlacedLease]()
    models = {}
    for number, (one, there) in enumerate(zip(hole.leaving, to, strict=True)):
        name = f"{number} {one.need.model}"  # each instance for itself
        now[name, unit_of[one.place]] = PlacedLease(one.kv, min(one.kv, one.used))
        target[name, unit_of[there]] = PlacedLease(one.kv)
        models[name] = ModelNeeds(_load(one), 0, one.start_s)
        memory[unit_of[one.place]] += _size(one.need, one.place)
    waits = f"{len(models)} {need.model}"
    target[waits, unit_of[hole.place]] = PlacedLease(0)
    models[waits] = ModelNeeds(_size(need, hole.place), 0, 0.0)
    units = {name: MoveUnit(size) for name, size in memory.items()}
    found = plan(PlacementSite(units, models), now, target)
    return None if isinstance(found, PlanRefused) else seconds(found)


def _resources(place: InstancePlace) -> set[tuple[str, str]]:
    """The GPUs of a place, or the node's memory."""
    return {(place.node, gpu) for gpu in place.gpus or (NO_GPU,)}


def _units(places: Sequence[InstancePlace]) -> dict[InstancePlace, str]:
    """The names of the units that places are in: GPUs that some instance has together are one."""
    groups: list[set[tuple[str, str]]] = []
    for one in places:
        touched = [group for group in groups if group & _resources(one)]
        apart = [group for group in groups if group not in touched]
        groups = [*apart, _resources(one).union(*touched)]
    return {
        one: " ".join(sorted(f"{node}/{gpu}" for node, gpu in group))
        for one in places
        for group in groups
        if _resources(one) <= group
    }


def _free_in(rooms: Rooms, unit_of: Mapping[InstancePlace, str]) -> dict[str, int]:
    """Bytes that are free in each unit."""
    parts: dict[str, set[tuple[str, str]]] = {}
    for one, unit in unit_of.items():
        parts.setdefault(unit, set()).update(_resources(one))
    return {
        unit: sum(
            max(0, rooms[node].devices[gpu] if gpu else rooms[node].memory) for node, gpu in found
        )
        for unit, found in parts.items()
    }
