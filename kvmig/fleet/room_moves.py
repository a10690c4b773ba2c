"""Moves of instances that make room for one that has none. Pure; all sizes are bytes.

Where neither a parked nor an idle model may end, others can still make room: an instance starts
again elsewhere, the requests of the old one move there, and it ends. A hole is a place that is
large enough for a waiting instance once some instances have left it. Those that leave need a place
each in addition to all that is there, as they come before the old ones go. For a model of several
instances one hole after the other is made, until each has a place. The planner of
`kvmig.placement.moves` decides whether each step on the way is legal, and how long it takes; what
it refuses is not done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from kvmig.fleet.place_choice import choose_places, most_instances, with_places
from kvmig.fleet.worker_filters import TINY, admits
from kvmig.fleet.worker_nodes import (
    NO_GPU,
    InstanceNeed,
    InstancePlace,
    NodeRoom,
    Rooms,
    with_amounts,
)
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
MOST_MADE = 4
"""Holes that are made for the instances of one model, at most."""
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
    """Moves that make room for the instances of a model."""

    node: str
    gpus: tuple[str, ...]
    """The place that is made first."""
    moves: tuple[RoomMove, ...]
    seconds: float
    """Seconds until the last one is over."""

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes that instances move from and to."""
        return frozenset(name for one in self.moves for name in (one.node, one.to_node))


def make_room(
    rooms: Rooms,
    need: InstanceNeed,
    movable: Sequence[MovableInstance],
    most_s: float,
    instances: int = 1,
) -> RoomPlan | None:
    """The moves with the least bytes after which all instances have a place; None: there are none.

    rooms: what is free now, where not all of them have one. most_s: seconds that the moves may
    take. Of several places each is made with the least bytes, given those that were made before.
    """
    movable = [one for one in movable if _is_seen(rooms, one.place)]
    made, took = _RoomMade(rooms, rooms), 0.0
    fit = 0 if instances == 1 else most_instances(rooms, need, instances)
    while fit < instances and len(made.holes) < MOST_MADE:
        kept = choose_places(made.after, need, fit, "pack") or ()
        found = _one_more(rooms, need, made, kept, movable, most_s)
        if found is None:
            return None
        (made, took), fit = found, fit + 1
    if fit < instances or not made.leaving:
        return None
    moves = tuple(
        RoomMove(
            one.need.model, one.instance, one.place.node, one.place.gpus, there.node, there.gpus,
            _load(one), one.used,
        )
        for one, there in zip(made.leaving, made.to, strict=True)
    )  # fmt: skip
    return RoomPlan(made.holes[0].place.node, made.holes[0].place.gpus, moves, took)


@dataclass(frozen=True, slots=True)
class _Hole:
    """A place, and who leaves it."""

    place: InstancePlace
    leaving: tuple[MovableInstance, ...]

    @property
    def size(self) -> int:
        """Bytes that are loaded and moved for it."""
        return sum(map(_cost, self.leaving))


def _is_seen(rooms: Rooms, place: InstancePlace) -> bool:
    """Whether its node is there with its GPUs: what is not seen now gives no room."""
    room = rooms.get(place.node)
    return room is not None and all(gpu in room.devices for gpu in place.gpus)


def _size(need: InstanceNeed, place: InstancePlace) -> int:
    """Bytes of an instance: of its GPUs, or of the node's memory."""
    return place.each * len(place.gpus) if place.gpus else need.memory


def _load(one: MovableInstance) -> int:
    return _size(one.need, one.place) - one.kv


def _cost(one: MovableInstance) -> int:
    return _load(one) + one.used


@dataclass(frozen=True, slots=True)
class _RoomMade:
    """The holes that are made so far."""

    arrived: Rooms
    """What is free once the others have started elsewhere, and the old ones are still there."""
    after: Rooms
    """What is free once those have ended."""
    holes: tuple[_Hole, ...] = ()
    to: tuple[InstancePlace, ...] = ()
    """The places to which they go that leave, in their order."""

    @property
    def leaving(self) -> list[MovableInstance]:
        """The instances that leave."""
        return [one for hole in self.holes for one in hole.leaving]

    def with_hole(self, hole: _Hole, to: Sequence[InstancePlace]) -> _RoomMade:
        """The same with one more. to: where those go that leave it."""
        arrived, after = dict(self.arrived), dict(self.after)
        for one, place in zip(hole.leaving, to, strict=True):
            arrived[place.node] = arrived[place.node].with_instance(one.need, place)
            after[place.node] = after[place.node].with_instance(one.need, place)
        for one in hole.leaving:
            after[one.place.node] = _without(after[one.place.node], one)
        return _RoomMade(arrived, after, (*self.holes, hole), (*self.to, *to))


def _without(room: NodeRoom, one: MovableInstance) -> NodeRoom:
    """What is free on its node once an instance has ended."""
    devices = dict(room.devices)
    for gpu in one.place.gpus:
        devices[gpu] += one.place.each
    resources = with_amounts(room.resources, one.need.resources)
    memory = room.memory + one.need.memory
    return replace(room, memory=memory, devices=devices, resources=resources)


def _one_more(
    rooms: Rooms,
    need: InstanceNeed,
    made: _RoomMade,
    kept: Sequence[InstancePlace],
    movable: Sequence[MovableInstance],
    most_s: float,
) -> tuple[_RoomMade, float] | None:
    """The same with a hole more, of the least bytes, and the seconds that all take; None: there is
    none. kept: the places of instances that have one by then."""
    best: tuple[_RoomMade, float] | None = None
    cost = 0
    gone = made.leaving
    rest = [one for one in movable if one not in gone] if gone else movable
    then = with_places(made.after, need, kept)
    reserved = _reserve(made.arrived, need, kept)
    for hole in _holes(then, need, rest):
        if best is not None and hole.size >= cost:
            break  # those that follow move more
        if (to := _leave(reserved, need, hole)) is None:
            continue
        found, places = made.with_hole(hole, to), [*kept, hole.place]
        if not _all_fit(found.after, need, places):
            continue
        took = _seconds(rooms, need, found, places)
        if took is not None and took <= most_s:
            best, cost = (found, took), hole.size
    return best


@dataclass(frozen=True, slots=True)
class _Reserved:
    """What instances that move may have."""

    rooms: Rooms
    closed: frozenset[str] = frozenset()
    """Nodes whose memory is kept for the instance that waits, once others have left it."""


def _reserve(rooms: Rooms, need: InstanceNeed, kept: Sequence[InstancePlace]) -> _Reserved:
    """What the places leave that are kept. Those that others have yet to leave take no
    memory before."""
    left, closed = dict(rooms), set[str]()
    for place in kept:
        after = left[place.node].with_instance(need, place)
        if not _holds(after, place):
            closed.add(place.node)
            after = left[place.node].with_instance(_of_gpus(need), place)
        left[place.node] = after
    return _Reserved(left, frozenset(closed))


def _of_gpus(need: InstanceNeed) -> InstanceNeed:
    """What it needs of GPUs alone."""
    return replace(need, memory=0, resources={})


def _holds(after: NodeRoom, place: InstancePlace) -> bool:
    """Whether a node had room. after: what is left of it."""
    if after.memory < 0 or any(after.devices[gpu] < 0 for gpu in place.gpus):
        return False
    return all(amount >= -TINY for amount in after.resources.values())


def _all_fit(rooms: Rooms, need: InstanceNeed, places: Sequence[InstancePlace]) -> bool:
    """Whether instances have room at all of these places."""
    left = with_places({one.node: rooms[one.node] for one in places}, need, places)
    return all(_holds(left[one.node], one) for one in places)


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


def _leave(reserved: _Reserved, need: InstanceNeed, hole: _Hole) -> list[InstancePlace] | None:
    """The places to which those go that leave the hole; None: there are none for all of them."""
    # No instance moves onto the hole's GPUs. All else is needed once the others have left.
    left = with_places(reserved.rooms, _of_gpus(need), [hole.place])
    closed = reserved.closed | {hole.place.node}
    to: list[InstancePlace] = []
    for one in hole.leaving:
        rooms = left
        if not one.place.gpus:
            rooms = {name: room for name, room in left.items() if name not in closed}
        places = choose_places(rooms, one.need, 1, "pack")
        if not places:
            return None
        to += places
        left = with_places(left, one.need, places)
    return to


# -- proven by the planner of placements


def _seconds(
    rooms: Rooms, need: InstanceNeed, made: _RoomMade, wanted: Sequence[InstancePlace]
) -> float | None:
    """How long the moves take; None: the planner knows no legal way. wanted: places of the
    instances that wait."""
    leaving = made.leaving
    touched = {part for one in (*(one.place for one in leaving), *made.to) for part in _parts(one)}
    wanted = [one for one in wanted if one == made.holes[-1].place or _parts(one) & touched]
    unit_of = _units([*(one.place for one in leaving), *made.to, *wanted])
    moved = list(zip(leaving, made.to, strict=True))
    if any(unit_of[one.place] == unit_of[there] for one, there in moved):
        return None  # a unit has one instance of each model: the planner could not see the move
    memory = _free_in(rooms, unit_of)
    now, target = dict[Slot, PlacedLease](), dict[Slot, PlacedLease]()
    models = {}
    for number, (one, there) in enumerate(moved):
        name = f"{number} {one.need.model}"  # each instance for itself
        now[name, unit_of[one.place]] = PlacedLease(one.kv, min(one.kv, one.used))
        target[name, unit_of[there]] = PlacedLease(one.kv)
        models[name] = ModelNeeds(_load(one), 0, one.start_s)
        memory[unit_of[one.place]] += _size(one.need, one.place)
    for place in wanted:
        waits = f"{len(models)} {need.model}"
        target[waits, unit_of[place]] = PlacedLease(0)
        models[waits] = ModelNeeds(_size(need, place), 0, 0.0)
    units = {name: MoveUnit(size) for name, size in memory.items()}
    found = plan(PlacementSite(units, models), now, target)
    return None if isinstance(found, PlanRefused) else seconds(found)


def _parts(place: InstancePlace) -> set[tuple[str, str]]:
    """The GPUs of a place, or the node's memory."""
    return {(place.node, gpu) for gpu in place.gpus or (NO_GPU,)}


def _units(places: Sequence[InstancePlace]) -> dict[InstancePlace, str]:
    """The names of the units that places are in: GPUs that some instance has together are one."""
    groups: list[set[tuple[str, str]]] = []
    for one in places:
        touched = [group for group in groups if group & _parts(one)]
        apart = [group for group in groups if group not in touched]
        groups = [*apart, _parts(one).union(*touched)]
    return {
        one: " ".join(sorted(f"{node}/{gpu}" for node, gpu in group))
        for one in places
        for group in groups
        if _parts(one) <= group
    }


def _free_in(rooms: Rooms, unit_of: Mapping[InstancePlace, str]) -> dict[str, int]:
    """Bytes that are free in each unit."""
    parts: dict[str, set[tuple[str, str]]] = {}
    for one, unit in unit_of.items():
        parts.setdefault(unit, set()).update(_parts(one))
    return {
        unit: sum(
            max(0, rooms[node].devices[gpu] if gpu else rooms[node].memory) for node, gpu in found
        )
        for unit, found in parts.items()
    }
