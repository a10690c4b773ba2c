"""Moves that make room: legal at each step, the cheapest that are found, and never in vain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvmig.fleet.device_room import DeviceMemory, DeviceNeed
from kvmig.fleet.place_choice import choose_places
from kvmig.fleet.room_moves import MOST_MADE, MovableInstance, RoomPlan, make_room
from kvmig.fleet.worker_nodes import InstanceNeed, InstancePlace, Rooms, WorkerNode, room_now


def movable(
    model: str, node: str, *gpus: str, each: int = 4, memory: int = 1, **more: Any
) -> MovableInstance:
    wants = (DeviceNeed(each, len(gpus)),) if gpus else ()
    place = InstancePlace(node, gpus, each if gpus else 0)
    return MovableInstance("i0", place, InstanceNeed(model, memory, wants), 5.0, **more)


def rooms(
    there: Mapping[str, tuple[int, list[int]]], *instances: MovableInstance, pairs: bool = False
) -> Rooms:
    """Nodes by name, with bytes of memory and of each GPU; the instances take theirs."""
    found = {}
    for name, (memory, sizes) in there.items():
        here = [one for one in instances if one.place.node == name]
        ids = [f"{name}{at}" for at in range(len(sizes))]
        devices = tuple(
            DeviceMemory(
                gpu,
                gpu,
                size,
                claims={one.need.model: one.place.each for one in here if gpu in one.place.gpus},
                peers=frozenset(ids[at // 2 * 2 : at // 2 * 2 + 2] if pairs else ids),
            )
            for at, (gpu, size) in enumerate(zip(ids, sizes, strict=True))
        )
        node = WorkerNode(name, memory, memory, devices)
        found[name] = room_now(node, memory - sum(one.need.memory for one in here))
    return found


def needs(each: int, devices: int = 1, memory: int = 1, **more: Any) -> InstanceNeed:
    return InstanceNeed("new", memory, (DeviceNeed(each, devices),), **more)


def moved(found: RoomPlan | None) -> list[tuple[str, str, tuple[str, ...]]]:
    assert found is not None
    return [(one.model, one.to_node, one.to_gpus) for one in found.moves]


def cost_bytes(found: RoomPlan) -> int:
    return sum(one.load_bytes + one.move_bytes for one in found.moves)


def test_an_instance_moves_to_another_gpu_so_that_a_large_one_has_room() -> None:
    there = movable("a", "w", "w0", kv=2, used=1), movable("b", "w", "w1", kv=2)
    found = make_room(rooms({"w": (9, [10, 10])}, *there), needs(8), there, 60)
    assert moved(found) == [("b", "w", ("w0",))]
    assert found is not None
    assert (found.node, found.gpus, cost_bytes(found)) == ("w", ("w1",), 2)
    assert found.seconds == 6, "a start of 5 s, and a drain"


def test_an_instance_whose_gpu_or_node_is_not_seen_does_not_move() -> None:
    there = movable("a", "w", "w0", kv=2, used=1), movable("b", "w", "w1", kv=2)
    away = movable("c", "w", "w2"), movable("d", "x", "x0")
    site = rooms({"w": (9, [10, 10])}, *there)
    assert moved(make_room(site, needs(8), (*there, *away), 60)) == [("b", "w", ("w0",))]


def test_the_move_with_the_least_bytes_is_taken() -> None:
    there = (
        movable("large", "w", "w0", each=6, kv=1),
        movable("busy", "x", "x0", each=4, kv=3, used=3),
        movable("small", "y", "y0", each=4, kv=2),
    )
    site = rooms({"w": (9, [10]), "x": (9, [10]), "y": (9, [10])}, *there)
    assert moved(make_room(site, needs(8), there, 60))[0][0] == "small"


def test_several_move_where_one_is_not_enough_and_more_than_four_do_not() -> None:
    there = [movable(f"m{at}", "w", "w0", each=2) for at in range(5)]
    site = rooms({"w": (99, [12]), "x": (99, [10])}, *there)
    found = make_room(site, needs(9), there, 60)
    assert [name for name, *_ in moved(found)] == ["m0", "m1", "m2", "m3"]
    assert make_room(site, needs(11), there, 60) is None


def test_a_hole_of_several_gpus_is_made_where_they_reach_each_other() -> None:
    there = movable("a", "w", "w0"), movable("b", "w", "w3")
    site = rooms({"w": (9, [10, 10, 10, 10])}, *there, pairs=True)
    found = make_room(site, needs(10, 2), there, 60)
    assert found is not None
    assert set(found.gpus) in ({"w0", "w1"}, {"w2", "w3"})
    assert len(found.moves) == 1


def test_an_instance_on_two_gpus_moves_to_two_others() -> None:
    there = (movable("two", "w", "w0", "w1"),)
    site = rooms({"w": (9, [10, 4]), "x": (9, [5, 5])}, *there)
    assert moved(make_room(site, needs(8), there, 60)) == [("two", "x", ("x0", "x1"))]


def test_memory_of_a_node_is_made_room_in_too() -> None:
    there = (movable("a", "w", memory=20, kv=5),)
    site = rooms({"w": (70, []), "x": (30, [])}, *there)
    found = make_room(site, InstanceNeed("new", 60), there, 60)
    assert moved(found) == [("a", "x", ())]
    assert make_room(rooms({"w": (70, [])}, *there), InstanceNeed("new", 60), there, 60) is None


def test_what_else_a_node_has_is_made_room_in_too() -> None:
    cpus = {"CPU": 2.0}
    need = InstanceNeed("a", 1, resources=cpus)
    there = [MovableInstance("i0", InstancePlace("w"), need, 5.0)]
    site = {
        name: room_now(
            WorkerNode(name, 9, 9, resources={"CPU": total}, free_resources={"CPU": free}), 8
        )
        for name, total, free in (("w", 4.0, 2.0), ("x", 2.0, 2.0))
    }
    found = make_room(site, InstanceNeed("new", 1, resources={"CPU": 4.0}), there, 60)
    assert moved(found) == [("a", "x", ())]
    assert make_room(site, InstanceNeed("new", 1, resources={"CPU": 5.0}), there, 60) is None
    only = {name: room for name, room in site.items() if name == "w"}
    assert make_room(only, InstanceNeed("new", 1, resources={"CPU": 4.0}), there, 60) is None


def test_nothing_moves_in_vain() -> None:
    there = movable("a", "w", "w0"), movable("b", "w", "w1")
    site = rooms({"w": (9, [10, 10])}, *there)
    assert make_room(site, needs(11), there, 60) is None, "larger than any GPU"
    assert make_room(site, needs(8), (), 60) is None, "none may move"
    assert make_room(site, needs(8), there, 5) is None, "it takes longer than anybody waits"
    assert make_room(site, needs(8, selector={"zone": "a"}), there, 60) is None
    full = rooms({"w": (9, [10, 5])}, *there)
    assert make_room(full, needs(8), there, 60) is None, "there is no other place"
    tight = rooms({"w": (2, [10, 10])}, *there)
    assert make_room(tight, needs(8), there, 60) is None, "both need memory for a while"


def test_a_model_of_several_instances_gets_a_place_for_each() -> None:
    there = movable("a", "w", "w0"), movable("b", "x", "x0", kv=3)
    site = rooms({"w": (9, [10]), "x": (9, [10]), "y": (9, [4, 4])}, *there)
    found = make_room(site, needs(8), there, 60, 2)
    assert found is not None
    assert {(name, to) for name, to, _ in moved(found)} == {("a", "y"), ("b", "y")}
    assert (found.node, cost_bytes(found)) == ("x", 5), "the cheaper place is made first"
    assert make_room(site, needs(8), there, 60, 3) is None, "there is no third one"
    alone = rooms({"w": (9, [10]), "x": (9, [10]), "y": (9, [4])}, *there)
    assert make_room(alone, needs(8), there, 60, 2) is None, "one would move in vain"
    assert make_room(alone, needs(8), there, 60, 1) is not None


def test_nobody_moves_to_a_place_that_an_instance_has_already() -> None:
    there = (movable("a", "w", "w0"),)
    site = rooms({"w": (9, [10]), "x": (9, [10])}, *there)
    assert make_room(site, needs(8), there, 60, 2) is None
    assert make_room(site, needs(6), there, 60, 2) is None, "both have a place now"
    more = rooms({"w": (9, [10]), "x": (9, [10, 4])}, *there)
    assert moved(make_room(more, needs(8), there, 60, 2)) == [("a", "x", ("x1",))]


def test_a_node_that_others_leave_for_one_instance_takes_none_that_leaves_for_the_next() -> None:
    there = movable("a", "w", memory=4), movable("b", "x", memory=4)
    need = InstanceNeed("new", 9)
    assert make_room(rooms({"w": (12, []), "x": (12, [])}, *there), need, there, 60, 2) is None
    site = rooms({"w": (12, []), "x": (12, []), "y": (4, []), "z": (4, [])}, *there)
    assert {to for _, to, _ in moved(make_room(site, need, there, 60, 2))} == {"y", "z"}


def test_only_so_many_places_are_made() -> None:
    names = [f"m{at}" for at in range(MOST_MADE + 1)]
    there = [movable(name, name, f"{name}0") for name in names]
    site = rooms({**{name: (9, [10]) for name in names}, "y": (99, [4] * len(names))}, *there)
    found = make_room(site, needs(8), there, 60, MOST_MADE)
    assert found is not None
    assert len(found.moves) == MOST_MADE
    assert make_room(site, needs(8), there, 60, MOST_MADE + 1) is None


@st.composite
def sites(draw: st.DrawFn) -> tuple[dict[str, tuple[int, list[int]]], list[MovableInstance]]:
    there = {
        name: (20, draw(st.lists(st.integers(0, 12), max_size=3)))
        for name in "wx"[: draw(st.integers(1, 2))]
    }
    taken: dict[str, int] = {}
    found = []
    for at in range(draw(st.integers(0, 5))):
        name = draw(st.sampled_from(sorted(there)))
        ids = [f"{name}{one}" for one in range(len(there[name][1]))]
        gpus = draw(st.lists(st.sampled_from(ids), max_size=2, unique=True)) if ids else []
        each = draw(st.integers(0, 6))
        sizes = dict(zip(ids, there[name][1], strict=True))
        if gpus and all(taken.get(gpu, 0) + each <= sizes[gpu] for gpu in gpus):
            for gpu in gpus:
                taken[gpu] = taken.get(gpu, 0) + each
            kv = draw(st.integers(0, each))
            found.append(movable(f"m{at}", name, *sorted(gpus), each=each, kv=kv, used=kv))
    return there, found


@given(sites(), st.integers(0, 12), st.integers(1, 2), st.integers(0, 21), st.integers(1, 3))
def test_at_each_step_of_a_plan_nothing_has_more_than_there_is(
    site: tuple[dict[str, tuple[int, list[int]]], list[MovableInstance]],
    each: int,
    devices: int,
    memory: int,
    count: int,
) -> None:
    there, instances = site
    left, need = rooms(there, *instances), needs(each, devices, memory)
    found = make_room(left, need, instances, 1000, count)
    if found is None:
        return
    free = {gpu: size for room in left.values() for gpu, size in room.devices.items()}
    host = {name: room.memory for name, room in left.items()}
    by_model = {one.need.model: one for one in instances}
    for move in found.moves:  # all new ones start before any old one ends
        one = by_model[move.model]
        assert len(move.to_gpus) == len(move.gpus)
        for gpu in move.to_gpus:
            free[gpu] -= one.place.each
        host[move.to_node] -= one.need.memory
    assert all(size >= 0 for size in (*free.values(), *host.values()))
    for move in found.moves:
        one = by_model[move.model]
        for gpu in move.gpus:
            free[gpu] += one.place.each
        host[move.node] += one.need.memory
    assert len(set(found.gpus)) == devices
    assert all(free[gpu] >= each for gpu in found.gpus)
    assert host[found.node] >= memory
    assert len({move.model for move in found.moves}) == len(found.moves) > 0
    after = {
        name: replace(room, memory=host[name], devices={gpu: free[gpu] for gpu in room.devices})
        for name, room in left.items()
    }
    assert choose_places(after, need, count) is not None
