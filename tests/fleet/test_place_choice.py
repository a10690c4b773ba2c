"""Places of instances: who has one fits there, and who has none fits nowhere; and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.fleet.device_room import DeviceMemory, DeviceNeed, Strategy
from kvmig.fleet.place_choice import (
    PlaceExplanation,
    choose_places,
    explain,
    explained,
    most_instances,
    places_on,
    with_places,
)
from kvmig.fleet.worker_nodes import (
    InstanceNeed,
    InstancePlace,
    NodeInstance,
    NodeRoom,
    Rooms,
    WorkerNode,
    room_now,
)


def node(
    name: str,
    *free: int,
    memory: int = 100,
    pairs: bool = False,
    instances: Sequence[NodeInstance] = (),
    **more: Any,
) -> WorkerNode:
    """A node with GPUs that have so many bytes free; pairs: whether only two and two reach each
    other."""
    ids = [f"{name}-{at}" for at in range(len(free))]
    peers = [ids[at // 2 * 2 : at // 2 * 2 + 2] if pairs else ids for at in range(len(ids))]
    devices = tuple(
        DeviceMemory(one, f"GPU {one}", max(0, size), peers=frozenset(reached))
        for one, size, reached in zip(ids, free, peers, strict=True)
    )
    return WorkerNode(name, memory, memory, devices, instances=tuple(instances), **more)


def rooms(*nodes: WorkerNode) -> Rooms:
    return {one.name: room_now(one, one.total) for one in nodes}


def on_gpus(each: int, devices: int = 1, memory: int = 1, **more: Any) -> InstanceNeed:
    return InstanceNeed("m", memory, (DeviceNeed(each, devices),), **more)


def chosen(found: Sequence[InstancePlace] | None) -> list[tuple[str, ...]]:
    assert found is not None
    return [one.gpus for one in found]


# -- invariants

strategies = st.sampled_from(["spread", "pack"])
node_shapes = st.tuples(
    st.lists(st.integers(0, 9), max_size=4), st.integers(0, 5), st.booleans(), st.booleans()
)


@st.composite
def sites(draw: st.DrawFn) -> list[WorkerNode]:
    found = []
    for at, (free, memory, pairs, cordoned) in enumerate(
        draw(st.lists(node_shapes, min_size=0, max_size=3))
    ):
        name = f"n{at}"
        there = [
            NodeInstance(model, (gpu,) if gpu else ())
            for model, gpu in draw(
                st.lists(
                    st.tuples(
                        st.sampled_from("mo"),
                        st.sampled_from(["", *(f"{name}-{one}" for one in range(len(free)))]),
                    ),
                    max_size=3,
                )
            )
        ]
        labels = {"zone": draw(st.sampled_from("ab"))}
        found.append(
            node(
                name, *free, memory=memory, pairs=pairs, cordoned=cordoned and draw(st.booleans()),
                labels=labels, instances=there,
            )
        )  # fmt: skip
    return found


@st.composite
def needs(draw: st.DrawFn) -> InstanceNeed:
    want = DeviceNeed(
        draw(st.integers(0, 5)),
        draw(st.integers(1, 3)),
        frozenset(draw(st.sets(st.sampled_from(["n0-0", "n0-1", "n1-0", "n1-1"]), max_size=3))),
    )
    wants = (want,) if draw(st.booleans()) else ()
    selector = draw(st.sampled_from([{}, {"zone": "a"}]))
    return InstanceNeed("m", draw(st.integers(0, 2)), wants, selector=selector)


def brute_force(left: Rooms, need: InstanceNeed, instances: int) -> bool:
    """Whether there are places, by trying all."""
    if not instances:
        return True
    for name, room in left.items():
        labels = room.node.labels
        if room.node.cordoned or any(labels.get(k) != v for k, v in need.selector.items()):
            continue
        if room.memory < need.memory:
            continue
        want = need.wants[0] if need.wants else None
        choices: list[tuple[str, ...]] = [()]
        if want is not None:
            within = room.node.groups if want.devices > 1 else [tuple(room.devices)]
            choices = [
                found
                for group in within
                for found in combinations(
                    [one for one in group if not want.only or one in want.only], want.devices
                )
                if all(room.devices[gpu] >= want.each for gpu in found)
            ]
        for gpus in choices:
            place = InstancePlace(name, gpus, 0 if want is None else want.each)
            if brute_force(with_places(left, need, [place]), need, instances - 1):
                return True
    return False


@given(sites(), needs(), st.integers(0, 3), strategies)
def test_places_are_found_exactly_when_there_are_some_and_no_node_holds_more_than_it_has(
    site: list[WorkerNode], need: InstanceNeed, instances: int, strategy: Strategy
) -> None:
    there = rooms(*site)
    found = choose_places(there, need, instances, strategy)
    assert (found is not None) == brute_force(there, need, instances)
    if found is None:
        return
    assert len(found) == instances
    for room in with_places(there, need, found).values():
        assert room.memory >= 0
        assert all(size >= 0 for size in room.devices.values())
    for place in found:
        of_node = there[place.node].node
        assert not of_node.cordoned
        assert need.selector.items() <= of_node.labels.items()
        want = need.wants[0] if need.wants else DeviceNeed(0, 0)
        assert len(set(place.gpus)) == len(place.gpus) == want.devices
        assert not want.only or want.only >= set(place.gpus)
        assert want.devices < 2 or any(set(place.gpus) <= set(one) for one in of_node.groups)


@given(sites(), needs())
def test_most_instances_are_as_many_as_find_places(
    site: list[WorkerNode], need: InstanceNeed
) -> None:
    there = rooms(*site)
    most = most_instances(there, need, 3)
    assert brute_force(there, need, most)
    assert most == 3 or not brute_force(there, need, most + 1)


@given(sites(), needs(), strategies, st.randoms(use_true_random=False))
def test_the_order_of_nodes_changes_no_decision(
    site: list[WorkerNode], need: InstanceNeed, strategy: Strategy, chance: Any
) -> None:
    mixed = list(site)
    chance.shuffle(mixed)
    before, after = rooms(*site), rooms(*mixed)
    for instances in (1, 2):
        found = choose_places(before, need, instances, strategy)
        assert choose_places(after, need, instances, strategy) == found
    place = (choose_places(before, need, 1, strategy) or [None])[0]
    assert explain(before, need, strategy, place) == explain(after, need, strategy, place)


@given(sites(), needs(), strategies)
def test_each_node_has_a_reason_or_a_score_and_the_chosen_one_has_the_best(
    site: list[WorkerNode], need: InstanceNeed, strategy: Strategy
) -> None:
    there = rooms(*site)
    places = choose_places(there, need, 1, strategy)
    place = places[0] if places else None
    found = explain(there, need, strategy, place)
    assert sorted(one.node for one in found.nodes) == sorted(there)
    assert bool(found.chosen) == bool(places)
    for one in found.nodes:
        fits = brute_force({one.node: there[one.node]}, need, 1)
        assert bool(one.refusals) == (not fits), "a refused node has a reason"
        assert all(why.why for why in one.refusals)
    if found.chosen is not None:
        assert found.chosen.score == max(one.score for one in found.nodes)
        assert place is not None
        assert (place.node, place.gpus) == (found.chosen.node, found.chosen.gpus)


# -- in a node


@pytest.mark.parametrize(
    ("strategy", "gpus"), [("spread", [("a-1",), ("a-2",)]), ("pack", [("a-0",), ("a-2",)])]
)
def test_instances_spread_over_the_emptiest_gpus_or_fill_the_fullest(
    strategy: Strategy, gpus: object
) -> None:
    assert chosen(choose_places(rooms(node("a", 5, 12, 8)), on_gpus(4), 2, strategy)) == gpus


def test_instances_of_a_model_share_a_gpu_only_where_there_are_too_few() -> None:
    found = choose_places(rooms(node("a", 80, 10)), on_gpus(4), 3)
    assert chosen(found) == [("a-0",), ("a-1",), ("a-0",)]


def test_workers_of_an_instance_have_gpus_that_reach_each_other() -> None:
    there = rooms(node("a", 12, 4, 12, 8, pairs=True))
    assert chosen(choose_places(there, on_gpus(5, 2), 1)) == [("a-2", "a-3")]
    assert choose_places(there, on_gpus(9, 2), 1) is None


def test_a_place_that_the_others_would_miss_is_left_to_them() -> None:
    """The preferred pair would leave no room for the second instance."""
    there = rooms(node("a", 9, 9, 5, 5))
    assert choose_places(there, on_gpus(4, 3), 2) is not None


# -- between nodes


def test_a_node_without_instances_is_preferred_then_one_with_other_models_alone() -> None:
    own, other = (NodeInstance(model, ("x",)) for model in ("m", "o"))
    both = node("d", 50, instances=[own, other])
    ours, theirs = node("c", 50, instances=[own]), node("b", 50, instances=[other])
    empty = node("a", 10)
    every = [both, ours, theirs, empty]
    for left in range(4, 0, -1):
        (place,) = choose_places(rooms(*every[:left]), on_gpus(5), 1) or ()
        assert place.node == every[left - 1].name


def test_pack_takes_the_node_that_it_fills_most() -> None:
    site = rooms(node("a", 80), node("b", 20, 60), node("c", 30))
    assert choose_places(site, on_gpus(10), 1, "pack") == (InstancePlace("b", ("b-0",), 10),)


def test_files_on_the_disk_decide_between_nodes_that_are_alike() -> None:
    site = rooms(node("a", 50), node("b", 50, files=frozenset(["hf:m"])), node("c", 60))
    (place,) = choose_places(site, on_gpus(5, source="hf:m"), 1) or ()
    assert place.node == "b"
    found = explain(site, on_gpus(5, source="hf:m"), place=place)
    assert [(one.node, one.score, one.locality) for one in found.nodes] == [
        ("b", 105, 5), ("a", 100, 0), ("c", 100, 0),
    ]  # fmt: skip


def test_equal_nodes_are_taken_by_what_is_left_and_then_by_name() -> None:
    site = rooms(node("b", 50), node("a", 50), node("c", 60))
    assert [one.node for one in choose_places(site, on_gpus(5), 3) or ()] == ["c", "a", "b"]


def test_several_gpus_of_a_node_are_the_second_choice_where_one_is_too_small() -> None:
    wants = DeviceNeed(40), DeviceNeed(20, 2)
    need = InstanceNeed("m", 1, wants)
    small, large = node("a", 30, 30), node("b", 50)
    assert choose_places(rooms(small, large), need, 1) == (InstancePlace("b", ("b-0",), 40),)
    assert choose_places(rooms(small), need, 1) == (InstancePlace("a", ("a-0", "a-1"), 20),)


def test_places_that_a_placement_says_are_taken_or_none() -> None:
    at = (("a-0",), ("b-0",))
    need = InstanceNeed("m", 1, (DeviceNeed(10, at=at),))
    found = choose_places(rooms(node("a", 10), node("b", 10)), need, 2)
    assert found == (InstancePlace("a", ("a-0",), 10), InstancePlace("b", ("b-0",), 10))
    assert choose_places(rooms(node("a", 10), node("b", 9)), need, 2) is None
    assert choose_places(rooms(node("a", 10)), need, 2) is None
    assert choose_places(rooms(node("a", 10), node("b", 10, cordoned=True)), need, 2) is None


# -- reasons


def refusals(found: PlaceExplanation) -> Mapping[str, list[tuple[str, int, int]]]:
    return {
        one.node: [(why.filter, why.need_bytes, why.free_bytes) for why in one.refusals]
        for one in found.nodes
    }


def test_each_filter_that_refuses_a_node_is_named_in_bytes() -> None:
    need = on_gpus(40, 2, memory=50, engine="vllm", selector={"zone": "a"})
    site = rooms(
        node("away", 80, 80, unready="its agent does not answer", labels={"zone": "a"}),
        node("cordoned", 80, 80, cordoned=True, labels={"zone": "a"}),
        node("elsewhere", 80, 80, labels={"zone": "b"}),
        node("other", 80, 80, labels={"zone": "a"}, engines=frozenset(["toy"])),
        node("small", 80, 80, memory=20, labels={"zone": "a"}),
        node("single", 80, labels={"zone": "a"}),
        node("full", 80, 30, labels={"zone": "a"}),
        node("apart", 80, 30, 80, 30, pairs=True, labels={"zone": "a"}),
        node("several", 30, 10, memory=20, cordoned=True),
    )
    found = explain(site, need)
    assert refusals(found) == {
        "away": [("ready", 0, 0)],
        "cordoned": [("cordon", 0, 0)],
        "elsewhere": [("labels", 0, 0)],
        "other": [("engine", 0, 0)],
        "small": [("memory", 50, 20)],
        "single": [("gpus", 0, 0)],
        "full": [("gpu_memory", 40, 30)],
        "apart": [("peers", 40, 0)],
        "several": [("cordon", 0, 0), ("labels", 0, 0), ("memory", 50, 20), ("gpu_memory", 40, 10)],
    }
    said = {one.node: "; ".join(why.why for why in one.refusals) for one in found.nodes}
    assert said["away"] == "its agent does not answer"
    assert said["elsewhere"] == "it has 'b' for label zone, must have 'a'"
    assert said["other"] == "engine vllm can't start there, only toy"
    assert said["small"] == "memory: needs 50 bytes, 20 of 20 are free"
    assert said["single"] == "1 GPUs are there, it needs 2"
    assert said["full"] == "GPU full-1: needs 40 bytes, 30 of 30 are free"
    assert said["apart"] == "no 2 GPUs that reach each other have 40 bytes free each"


def test_who_has_a_gpus_memory_is_named_where_that_is_asked_for() -> None:
    device = DeviceMemory("g", "GPU 0", 80, claims={"chat": 1 << 30})
    site = rooms(WorkerNode("a", 10, 10, (replace(device, total=1 << 31),)))
    need = on_gpus(3 << 30)
    for holders, said in ((True, "(model chat has 1.00 GiB)"), (False, "are free")):
        (why,) = explain(site, need, holders=holders).nodes[0].refusals
        assert why.why.endswith(said)


def test_each_instance_of_a_start_is_explained_beside_those_before_it() -> None:
    site = rooms(node("a", 20), node("b", 20))
    places = choose_places(site, on_gpus(10), 2) or ()
    found = explained(site, on_gpus(10), places, "spread")
    assert [one.chosen and (one.chosen.node, one.chosen.score) for one in found] == [
        ("a", 100), ("b", 100),
    ]  # fmt: skip
    assert [one.node for one in found[1].nodes] == ["b", "a"]


@given(sites(), needs(), st.integers(1, 3), strategies)
def test_what_is_left_counts_the_instances_of_each_gpu(
    site: list[WorkerNode], need: InstanceNeed, instances: int, strategy: Strategy
) -> None:
    there = rooms(*site)
    places = choose_places(there, need, instances, strategy) or ()
    after: dict[str, NodeRoom] = with_places(there, need, places)
    used = Counter(gpu for one in places for gpu in one.gpus)
    for name, room in after.items():
        own = room.counts.by_model.get("m", {})
        before = there[name].counts.by_model.get("m", {})
        for gpu in room.devices:
            assert own.get(gpu, 0) == before.get(gpu, 0) + used[gpu]


# -- on workers that a placement names


@given(sites(), st.lists(st.sampled_from(["n0", "n1", "n2"]), min_size=1, max_size=4),
       st.integers(0, 4), st.integers(0, 9))  # fmt: skip
def test_instances_on_named_workers_have_room_there_one_after_the_other_or_none_has(
    nodes: list[WorkerNode], workers: list[str], memory: int, each: int
) -> None:
    here = rooms(*nodes)
    need = on_gpus(each, memory=memory) if each else InstanceNeed("m", memory)
    found = places_on(here, need, workers)
    left: Rooms = here
    for at, name in enumerate(workers):
        fits = name in left and choose_places({name: left[name]}, need, 1) is not None
        if found is None:
            if not fits:
                return
            left = with_places(left, need, choose_places({name: left[name]}, need, 1, "pack") or ())
        else:
            assert fits
            assert found[at].node == name
            left = with_places(left, need, [found[at]])
    assert found is not None
