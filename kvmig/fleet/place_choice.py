"""The node and the GPUs that an instance gets, and the reasons. Pure; all sizes are bytes.

A node that no filter refuses offers its best candidate, as the strategy scores it; the best
candidate of all nodes is chosen. Among equals `spread` takes the one with most bytes left and
`pack` the one with fewest, then the first name. Places for several instances are found whenever
there are some for all of them: what is refused has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from kvmig.fleet.device_room import DeviceNeed, Strategy, best_choices, safest_choices
from kvmig.fleet.place_scores import (
    OTHERS_WEIGHT,
    binpack_score,
    locality_score,
    spread_score,
)
from kvmig.fleet.worker_filters import FilterRefusal, admits, most_on, refusals
from kvmig.fleet.worker_nodes import NONE, InstanceNeed, InstancePlace, NodeRoom, Rooms

UNKNOWN = ""
"""Stands for GPUs of a unit that are not known now; no node has it."""


class PlaceCandidate(NamedTuple):
    """A place that one instance could have."""

    place: InstancePlace
    score: float
    """The strategy's score."""
    locality: float
    """What the files on the node's disk add."""
    rank: tuple[float, int, str]
    """Less is better: by the score with all parts, the bytes that are left, and the name."""


class NodeVerdict(msgspec.Struct, frozen=True):
    """What a decision says of one node."""

    node: str
    chosen: bool
    gpus: tuple[str, ...] = ()
    """UUIDs of its best candidate."""
    score: float = 0.0
    """The sum of all parts; 0: the node is refused."""
    strategy_score: float = 0.0
    locality: float = 0.0
    refusals: tuple[FilterRefusal, ...] = ()
    """Filters that refuse it; none: it has a candidate."""


class PlaceExplanation(msgspec.Struct, frozen=True):
    """A decision about one instance with all its reasons."""

    model: str
    strategy: Strategy
    need_bytes: int
    """Bytes of the node's memory."""
    gpus: int
    """GPUs of the instance; 0: it uses none."""
    gpu_bytes: int
    """Bytes of each of them."""
    nodes: tuple[NodeVerdict, ...]
    """The best first, the refused ones last."""

    @property
    def chosen(self) -> NodeVerdict | None:
        """The node that it gets; None: all are refused."""
        return next((one for one in self.nodes if one.chosen), None)


def choose_places(
    rooms: Rooms, need: InstanceNeed, instances: int, strategy: Strategy = "spread"
) -> tuple[InstancePlace, ...] | None:
    """Places for these instances; None: there are none for all of them together."""
    for want in need.wants or (None,):
        if want is not None and want.at:
            found = _fixed_places(rooms, need, want)
        else:
            found = _places(rooms, need, want, instances, strategy)
        if found is not None:
            return found
    return None


def places_on(
    rooms: Rooms, need: InstanceNeed, workers: Sequence[str]
) -> tuple[InstancePlace, ...] | None:
    """Places of one instance on each of these workers, as a placement names them, and on the GPUs
    there that it names; None: one of them is not there, or has no room."""
    left, places = dict(rooms), list[InstancePlace]()
    at = [gpus for want in need.wants for gpus in want.at]
    for number, name in enumerate(workers):
        room = left.get(name)
        own = _on_gpus(need, at[number]) if at else need
        found = None if room is None else _best_on(room, own, "pack")
        if room is None or found is None:
            return None
        place = replace(found.place, gpus=at[number]) if at else found.place
        places.append(place)
        left[name] = room.with_instance(need, place)
    return tuple(places)


def _on_gpus(need: InstanceNeed, gpus: Sequence[str]) -> InstanceNeed:
    """The same for one instance on these GPUs."""
    only = frozenset(gpus)
    wants = (replace(one, devices=len(gpus), only=only, at=()) for one in need.wants)
    return replace(need, wants=tuple(wants))


def most_instances(rooms: Rooms, need: InstanceNeed, most: int) -> int:
    """How many instances find room together, up to `most`."""
    wants: Sequence[DeviceNeed | None] = need.wants or (None,)
    return max(
        min(most, sum(most_on(room, need, want, most) for room in _admitted(rooms, need)))
        for want in wants
    )


def with_places(
    rooms: Rooms, need: InstanceNeed, places: Iterable[InstancePlace]
) -> dict[str, NodeRoom]:
    """What is left once instances have started at these places."""
    left = dict(rooms)
    for one in places:
        left[one.node] = left[one.node].with_instance(need, one)
    return left


def explain(
    rooms: Rooms,
    need: InstanceNeed,
    strategy: Strategy = "spread",
    place: InstancePlace | None = None,
    *,
    holders: bool = False,
) -> PlaceExplanation:
    """Say of each node why it can't have an instance, or how good it is. place: the chosen one.

    holders: whether to name who has a GPU's memory.
    """
    found = []
    for name, room in rooms.items():
        candidate = _best_on(room, need, strategy)
        chosen = place is not None and place.node == name
        if candidate is None:
            found.append(
                NodeVerdict(name, chosen, refusals=tuple(refusals(room, need, holders=holders)))
            )
            continue
        gpus = place.gpus if chosen and place is not None else candidate.place.gpus
        score, locality = candidate.score, candidate.locality
        found.append(NodeVerdict(name, chosen, gpus, score + locality, score, locality))
    found.sort(key=lambda one: (not one.chosen, bool(one.refusals), -one.score, one.node))
    want = need.wants[0] if need.wants else DeviceNeed(0, 0)
    return PlaceExplanation(
        need.model, strategy, need.memory, want.devices, want.each, tuple(found)
    )


def explained(
    rooms: Rooms, need: InstanceNeed, places: Iterable[InstancePlace], strategy: Strategy
) -> tuple[PlaceExplanation, ...]:
    """The explanations of places, each after those before it are taken."""
    found = []
    for place in places:
        found.append(explain(rooms, need, strategy, place))
        rooms = with_places(rooms, need, [place])
    return tuple(found)


# -- helpers


def _admitted(rooms: Rooms, need: InstanceNeed) -> Iterator[NodeRoom]:
    return (room for room in rooms.values() if admits(room.node, need))


def _fixed_places(
    rooms: Rooms, need: InstanceNeed, want: DeviceNeed
) -> tuple[InstancePlace, ...] | None:
    """The places that a placement says, if they have room."""
    whose = {gpu: name for name, room in rooms.items() for gpu in room.devices}
    wanted = Counter(gpu for gpus in want.at for gpu in gpus)
    places = tuple(InstancePlace(whose.get(gpus[0], ""), gpus, want.each) for gpus in want.at)
    of_node = Counter(one.node for one in places)
    for gpu, count in wanted.items():
        if gpu not in whose or rooms[whose[gpu]].devices[gpu] < count * want.each:
            return None
    for name, count in of_node.items():
        if not admits(rooms[name].node, need) or rooms[name].memory < count * need.memory:
            return None
    return places


def _places(
    rooms: Rooms,
    need: InstanceNeed,
    want: DeviceNeed | None,
    instances: int,
    strategy: Strategy,
) -> tuple[InstancePlace, ...] | None:
    left, most = dict[str, NodeRoom](), dict[str, int]()
    for room in _admitted(rooms, need):
        if count := most_on(room, need, want, instances):
            left[room.node.name], most[room.node.name] = room, count
    if sum(most.values()) < instances:
        return None
    best = {name: _preferred(room, need, want, strategy) for name, room in left.items()}
    places: list[InstancePlace] = []
    for rest in reversed(range(instances)):
        for candidate in _in_turn(best, left, want, rest):
            name = candidate.place.node
            after = left[name].with_instance(need, candidate.place)
            count = most_on(after, need, want, rest)
            if sum(most.values()) - most[name] + count >= rest:
                break
        else:  # the last choice of a group always holds
            raise AssertionError("there was room for all instances")
        places.append(candidate.place)
        left[name], most[name] = after, count
        if count:
            best[name] = _preferred(after, need, want, strategy)
        else:
            del best[name]
    return tuple(places)


def _in_turn(
    best: Mapping[str, PlaceCandidate],
    left: Rooms,
    want: DeviceNeed | None,
    rest: int,
) -> Iterator[PlaceCandidate]:
    """The candidates, the best first; then those that leave most room for the rest."""
    if not rest:
        yield min(best.values(), key=lambda one: one.rank)
        return
    ranked = sorted(best.values(), key=lambda one: one.rank)
    yield from ranked
    for one in ranked:
        room = left[one.place.node]
        if want is not None:
            for gpus in safest_choices(room.devices, want, room.node.groups, rest + 1):
                yield one._replace(place=InstancePlace(one.place.node, gpus, want.each))


def _best_on(room: NodeRoom, need: InstanceNeed, strategy: Strategy) -> PlaceCandidate | None:
    """The best candidate of a node; None: it is refused."""
    if not admits(room.node, need):
        return None
    for want in need.wants or (None,):
        if most_on(room, need, want, 1):
            return _preferred(room, need, want, strategy)
    return None


def _preferred(
    room: NodeRoom, need: InstanceNeed, want: DeviceNeed | None, strategy: Strategy
) -> PlaceCandidate:
    """The best candidate of a node that has room for one."""
    name = room.node.name
    if want is None:
        return _candidate(room, need, InstancePlace(name), strategy)
    free, every = room.devices, room.counts.every
    own = room.counts.by_model.get(need.model, NONE)

    def fewest(gpu: str) -> tuple[float, int]:  # where `spread_part` is greatest
        mine = own.get(gpu, 0)
        return mine + (every.get(gpu, 0) - mine) * OTHERS_WEIGHT, -free[gpu]

    def fullest(gpu: str) -> tuple[float, int]:
        return free[gpu], 0

    preference = fullest if strategy == "pack" else fewest
    choices = best_choices(free, want, room.node.groups, preference)
    found = [
        _candidate(room, need, InstancePlace(name, gpus, want.each), strategy) for gpus in choices
    ]
    return min(found, key=lambda one: one.rank)


def _candidate(
    room: NodeRoom, need: InstanceNeed, place: InstancePlace, strategy: Strategy
) -> PlaceCandidate:
    frees = [room.devices[gpu] for gpu in place.gpus]
    if strategy == "pack":
        score = binpack_score(need.memory, room.memory, place.each, frees)
    else:
        own = room.counts.by_model.get(need.model, NONE)
        score = spread_score(own, room.counts.every, place.gpus, len(room.node.devices))
    locality = locality_score(need.source, room.node.files)
    left = sum(frees) - place.each * len(frees) if frees else room.memory - need.memory
    rank = -(score + locality), left if strategy == "pack" else -left, place.node
    return PlaceCandidate(place, score, locality, rank)
