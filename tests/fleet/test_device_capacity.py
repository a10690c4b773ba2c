"""Room on GPUs: who starts where, who waits and why, who ends for whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvmig.fleet.capacity import (
    CapacityPlan,
    HostCapacity,
    ResidentModel,
    SharedHold,
    WaitingModel,
)
from kvmig.fleet.capacity import plan as plan_on
from kvmig.fleet.device_room import DeviceMemory, DeviceNeed
from kvmig.fleet.room_moves import MovableInstance
from kvmig.fleet.worker_nodes import LOCAL, InstanceNeed, InstancePlace, WorkerNode

HOST = HostCapacity(total=1000, available=1000)
NOW = 100.0
GIB = 1 << 30


def resident(name: str, held: Mapping[str, int], **more: Any) -> ResidentModel:
    return replace(ResidentModel(name, 1, since=0, stay_s=10, idle_s=50, held=held), **more)


def waiting(name: str, each: int, since: float = 90, devices: int = 1) -> WaitingModel:
    return WaitingModel(name, 1, since, DeviceNeed(each, devices))


Devices = tuple[DeviceMemory, ...]


def gpus(*residents: ResidentModel, sizes: Mapping[str, int], others: int = 0) -> Devices:
    """They all reach each other. others: of another process, on each."""
    return tuple(
        DeviceMemory(
            one,
            f"GPU {one}",
            total,
            others,
            claims={each.name: each.held.get(one, 0) for each in residents},
            peers=frozenset(sizes),
        )
        for one, total in sizes.items()
    )


def plan(
    host: HostCapacity,
    wanted: list[WaitingModel],
    residents: list[ResidentModel],
    now: float,
    devices: Devices,
) -> CapacityPlan:
    """On one host."""
    return plan_on([WorkerNode(LOCAL, host.total, host.available, devices)], wanted, residents, now)


def places_of(found: CapacityPlan) -> dict[str, tuple[tuple[str, ...], ...]]:
    return {name: tuple(one.gpus for one in places) for name, places in found.places.items()}


def free_on(found: CapacityPlan) -> Mapping[str, int]:
    """Nothing while a model waits."""
    return {} if found.waits else found.rooms[LOCAL].devices


def planned(
    wanted: list[WaitingModel], residents: list[ResidentModel], others: int = 0, **sizes: int
) -> CapacityPlan:
    return plan(HOST, wanted, residents, NOW, gpus(*residents, sizes=sizes, others=others))


def test_two_models_share_a_gpu_and_a_third_waits_with_the_reason() -> None:
    wanted = [waiting("a", 4 * GIB, 1), waiting("b", 4 * GIB, 2), waiting("c", 4 * GIB, 3)]
    found = planned(wanted, [], g0=10 * GIB)
    assert places_of(found) == {"a": (("g0",),), "b": (("g0",),)}
    assert found.refused["c"].startswith(
        "no room: it needs 4.0 GiB of a GPU's memory, 2.0 GiB is free"
    )
    assert not free_on(found)


def test_a_model_of_two_workers_gets_two_gpus_or_waits_for_both() -> None:
    found = planned([waiting("a", 6, devices=2)], [], g0=10, g1=6)
    assert places_of(found) == {"a": (("g0", "g1"),)}
    assert free_on(found) == {"g0": 4, "g1": 0}
    busy = resident("b", {"g1": 1}, kept=True)
    waits = planned([waiting("a", 6, devices=2)], [busy], g0=10, g1=6)
    assert "each of 2 GPUs, 1 GPUs that reach each other have that" in waits.refused["a"]


def test_what_models_share_is_free_once_the_last_of_them_has_ended() -> None:
    shared = SharedHold("u", frozenset({"a", "b"}), {"g0": 5})
    residents = [resident(name, {"g0": 2}, shared=shared) for name in "ab"]
    devices = (DeviceMemory("g0", "GPU 0", 10, claims={"a": 2, "b": 2, "unit u": 5}),)

    def yielding(each: int, *others: ResidentModel) -> frozenset[str]:
        return plan(HOST, [waiting("c", each)], [*residents, *others], NOW, devices).yielding

    assert len(yielding(3)) == 1
    assert yielding(6) == {"a", "b"}, "the cache ends with both"
    asks = replace(shared, models=shared.models | {"asks"})
    residents = [replace(one, shared=asks) for one in residents]
    assert not yielding(6), "the unit stays for a model that waits for its start"


def test_only_idle_models_on_the_right_gpu_end_for_another() -> None:
    residents = [
        resident("left", {"g0": 7}, idle_s=90),
        resident("right", {"g1": 5}, idle_s=20),
        resident("busy", {"g0": 5}, kept=True),
    ]
    found = planned([waiting("a", 8)], residents, g0=12, g1=10)
    assert found.yielding == {"right"}


def test_others_memory_is_no_room_and_no_model_ends_in_vain_for_it() -> None:
    found = planned([waiting("a", 8)], [resident("b", {"g0": 2})], others=3, g0=10)
    assert found.yielding == frozenset()
    assert found.refused["a"].endswith("the rest is taken for good")


def test_a_model_larger_than_every_gpu_never_starts_and_each_says_its_bytes() -> None:
    found = planned([waiting("a", 12)], [], g0=10, g1=11)
    assert found.never["a"] == (
        "model a needs 12 bytes (0.00 GiB) of a GPU; GPU g0 has 10 bytes, 2 too few; GPU g1 has 11"
        " bytes, 1 too few"
    )


def test_a_parked_model_wakes_on_the_gpu_that_it_has() -> None:
    asleep = resident("a", {"g0": 2}, parked=True)
    wakes = WaitingModel("a", 0, 90, more={"g0": 6})
    assert planned([wakes], [asleep], g0=8, g1=99).refused == {}
    beside = resident("b", {"g0": 4})
    found = planned([wakes], [asleep, beside], g0=8, g1=99)
    assert found.yielding == {"b"}
    assert (
        "2.0 GiB"
        in planned(
            [replace(wakes, more={"g0": 6 * GIB})],
            [
                resident("a", {"g0": 2 * GIB}, parked=True),
                resident("b", {"g0": 4 * GIB}, kept=True),
            ],
            g0=8 * GIB,
        ).refused["a"]
    )


def test_one_that_came_later_takes_no_gpu_that_the_first_will_need() -> None:
    busy = resident("b", {"g0": 6}, kept=True)
    wanted = [waiting("large", 9, 90), waiting("small", 3, 95)]
    assert set(planned(wanted, [busy], g0=10).refused) == {"large", "small"}
    assert places_of(planned(wanted, [busy], g0=10, g1=4)) == {"small": (("g1",),)}


models = st.lists(
    st.builds(
        waiting,
        name=st.just(""),
        each=st.integers(0, 6),
        since=st.floats(0, 90),
        devices=st.integers(1, 3),
    ),
    max_size=4,
).map(lambda found: [replace(one, name=f"w{at}") for at, one in enumerate(found)])


@given(
    models,
    st.lists(
        st.builds(
            resident,
            name=st.just(""),
            held=st.dictionaries(st.sampled_from(["g0", "g1"]), st.integers(0, 5)),
            kept=st.booleans(),
            pinned=st.booleans(),
            leaving=st.booleans(),
        ),
        max_size=3,
    ).map(lambda found: [replace(one, name=f"r{at}") for at, one in enumerate(found)]),
    st.integers(0, 3),
    st.tuples(*[st.integers(0, 12)] * 3),
)
def test_claims_never_exceed_a_gpu_and_nothing_starts_without_its_places(
    wanted: list[WaitingModel],
    residents: list[ResidentModel],
    others: int,
    sizes: tuple[int, int, int],
) -> None:
    by_name = {f"g{at}": size for at, size in enumerate(sizes)}
    there = gpus(*residents, sizes=by_name, others=others)
    found = plan(HOST, wanted, residents, NOW, there)
    before = {one.id: one.free for one in there}
    for one in wanted:
        assert one.need is not None
        starts = one.name not in found.refused and one.name not in found.never
        places = found.places.get(one.name, ())
        assert bool(places) == starts
        for gpu in (gpu for place in places for gpu in place.gpus):
            before[gpu] -= one.need.each
    assert all(left >= 0 for left in before.values()), "claims exceed no GPU"
    if not found.waits:
        assert free_on(found) == before
    for name in found.yielding:
        (model,) = (one for one in residents if one.name == name)
        assert model.leaving or not (model.kept or model.pinned)


# -- several nodes


def node(name: str, *sizes: int, memory: int = 100, **more: Any) -> WorkerNode:
    devices = tuple(
        DeviceMemory(f"{name}{at}", f"GPU {name}{at}", size) for at, size in enumerate(sizes)
    )
    return WorkerNode(name, memory, memory, devices, **more)


def with_claims(nodes: list[WorkerNode], residents: list[ResidentModel]) -> list[WorkerNode]:
    """The nodes, their GPUs with what residents hold of them."""
    return [
        replace(
            one,
            devices=tuple(
                replace(gpu, claims={each.name: each.held.get(gpu.id, 0) for each in residents})
                for gpu in one.devices
            ),
        )
        for one in nodes
    ]


def on_nodes(
    wanted: list[WaitingModel], residents: list[ResidentModel], *nodes: WorkerNode
) -> CapacityPlan:
    return plan_on(with_claims(list(nodes), residents), wanted, residents, NOW)


def test_instances_of_one_model_start_on_several_nodes_and_each_is_explained() -> None:
    wanted = replace(waiting("a", 8), claim=4, instances=2)
    found = on_nodes([wanted], [], node("w", 10), node("x", 10))
    assert found.places == {"a": (InstancePlace("w", ("w0",), 8), InstancePlace("x", ("x0",), 8))}
    assert [one.chosen and one.chosen.node for one in found.explained["a"]] == ["w", "x"]
    assert [room.memory for room in found.rooms.values()] == [98, 98]


def test_idle_models_end_on_the_node_where_that_makes_room_by_priority() -> None:
    residents = [
        resident("low", {"w0": 6}, on={"w": 1}, priority=1, idle_s=20),
        resident("high", {"x0": 6}, on={"x": 1}, priority=0, idle_s=90),
        resident("busy", {"w0": 3}, on={"w": 1}, kept=True),
    ]
    nodes = node("w", 10), node("x", 10)
    assert on_nodes([waiting("a", 5)], residents, *nodes).yielding == {"low"}
    assert on_nodes([waiting("a", 9)], residents, *nodes).yielding == {"high"}
    assert not on_nodes([waiting("a", 11)], residents, *nodes).yielding


def test_memory_of_one_node_is_no_room_on_another() -> None:
    full = ResidentModel("b", 60, since=0, stay_s=10, kept=True, on={"w": 60})
    nodes = node("w"), node("x", memory=30)
    found = plan_on(nodes, [WaitingModel("a", 50, 90)], [full], NOW)
    assert found.refused["a"].startswith("no room: it needs 0.0 GiB")
    assert plan_on(nodes, [WaitingModel("a", 40, 90)], [full], NOW).places == {
        "a": (InstancePlace("w"),)
    }
    large = plan_on(nodes, [WaitingModel("a", 150, 90)], [], NOW)
    assert large.refused["a"].startswith("no room: it needs"), "a larger worker may come"
    assert not large.never


def test_a_model_that_wakes_does_so_on_its_node_even_if_that_is_cordoned() -> None:
    asleep = resident("a", {"w0": 2}, parked=True, on={"w": 1})
    wakes = WaitingModel("a", 5, 90, more={"w0": 6}, wakes_on={"w": 5})
    cordoned = node("w", 10, cordoned=True)
    assert not on_nodes([wakes], [asleep], cordoned, node("x", 99)).refused
    beside = resident("b", {"w0": 4}, on={"w": 1})
    assert on_nodes([wakes], [asleep, beside], cordoned, node("x", 99)).yielding == {"b"}


def test_what_else_instances_take_of_nodes_is_counted_and_given_back() -> None:
    nodes = (
        node("w", resources={"CPU": 4.0}, free_resources={"CPU": 1.0}),
        node("x", resources={"CPU": 2.0}, free_resources={"CPU": 2.0}),
    )
    wanted = replace(WaitingModel("a", 1, 90), resources={"CPU": 2.0})
    assert plan_on(nodes, [wanted], [], NOW).places == {"a": (InstancePlace("x"),)}
    both = plan_on(nodes, [replace(wanted, claim=2, instances=2)], [], NOW)
    assert both.refused["a"].startswith("no room: no worker has 0.00 GiB and 2 CPU free")
    large = replace(wanted, resources={"CPU": 3.0})
    held = ResidentModel(
        "b", 1, since=0, stay_s=10, idle_s=50, on={"w": 1}, resources={"w": {"CPU": 3.0}}
    )
    found = plan_on(nodes, [large], [held], NOW)
    assert found.yielding == {"b"}
    assert found.refused["a"] == "no room: it needs 3 CPU, 2 CPU is free; idle models end for it"
    for busy in (replace(held, kept=True), replace(held, pinned=True)):
        assert not plan_on(nodes, [large], [busy], NOW).yielding
    later = [large, replace(wanted, name="c", since=95)]
    assert [one.node for one in plan_on(nodes, later, [held], NOW).places["c"]] == ["x"]


def test_one_that_no_worker_takes_waits_and_keeps_nobody_else_out() -> None:
    wanted = [replace(waiting("a", 4, 1), selector={"zone": "a"}), waiting("b", 4, 2)]
    nodes = node("w", 10, labels={"zone": "b"}), node("x", 99, cordoned=True)
    found = on_nodes(wanted, [], *nodes)
    assert found.refused == {
        "a": "no room: no worker takes it now: of 2, 1 cordoned, 1 without its labels"
    }
    assert [one.node for one in found.places["b"]] == ["w"]
    assert plan_on([], wanted, [], NOW).refused["b"] == "no room: there is no worker"


def pinned_(models: list[ResidentModel]) -> list[ResidentModel]:
    return [replace(one, kept=False, pinned=True) for one in models]


def test_an_instance_moves_where_none_may_end_and_others_wait_for_that() -> None:
    stays = [resident(name, {f"{at}0": 4}, on={at: 1}, kept=True) for name, at in ("bw", "cx")]
    nodes = with_claims([node("w", 10), node("x", 10)], stays)
    movable = [
        MovableInstance(
            "i0", InstancePlace(at, (f"{at}0",), 4), InstanceNeed(name, 1, (DeviceNeed(4),)), 5.0
        )
        for name, at in ("bw", "cx")
    ]
    first = replace(waiting("a", 8, 1), patience_s=60)
    found = plan_on(nodes, [first, waiting("d", 5, 2)], stays, NOW, "spread", movable)
    assert found.moves is not None
    assert [one.model for one in found.moves.moves] == ["b"]
    assert found.refused["a"].endswith("; instances move for it")
    assert "1 that came first wait too" in found.refused["d"], "it would take the new place"
    elsewhere = plan_on(
        [*nodes, node("y", 6)], [first, waiting("d", 5, 2)], stays, NOW, "spread", movable
    )
    assert elsewhere.moves is not None
    assert set(elsewhere.places) == ({"d"} if "y" not in elsewhere.moves.nodes else set())
    for gone in (replace(first, patience_s=1), replace(first, claim=2, instances=2)):
        assert plan_on(nodes, [gone], stays, NOW, "spread", movable).moves is None
    two = replace(first, claim=2, instances=2)
    with_y = plan_on([*nodes, node("y", 4, 4)], [two], stays, NOW, "spread", movable)
    assert with_y.moves is not None
    assert {one.to_node for one in with_y.moves.moves} == {"y"}
    large = WaitingModel("e", 1, 3, DeviceNeed(9))
    beside = plan_on(nodes, [first, large], pinned_(stays), NOW, "spread", movable)
    assert beside.refused["e"].endswith("; instances move now"), "nothing is taken for good yet"
    under_way = plan_on(
        nodes, [first, waiting("d", 5, 2)], stays, NOW, "spread", movable, frozenset("wx")
    )
    assert (under_way.moves, set(under_way.refused)) == (None, {"a", "d"})
    assert under_way.refused["a"].endswith("; instances move for it")
    idle = [replace(one, kept=False) for one in stays]
    assert plan_on(nodes, [first], idle, NOW, "spread", movable).moves is None, "one ends instead"
    pinned = pinned_(stays)
    assert plan_on(nodes, [first], pinned, NOW, "spread", movable).moves is not None
    for_good = plan_on(nodes, [first], pinned, NOW, "spread", [])
    assert for_good.refused["a"].endswith("the rest is taken for good")


small_nodes = st.lists(
    st.tuples(st.lists(st.integers(0, 12), max_size=2), st.integers(1, 5), st.booleans()),
    max_size=3,
).map(
    lambda found: [
        node(name, *sizes, memory=memory, cordoned=cordoned)
        for name, (sizes, memory, cordoned) in zip("wxy", found, strict=False)
    ]
)


@given(
    models,
    st.lists(
        st.builds(
            resident,
            name=st.just(""),
            held=st.dictionaries(st.sampled_from(["w0", "x0"]), st.integers(0, 5)),
            on=st.dictionaries(st.sampled_from("wx"), st.integers(0, 2), min_size=1),
            kept=st.booleans(),
            pinned=st.booleans(),
            leaving=st.booleans(),
        ),
        max_size=3,
    ).map(lambda found: [replace(one, name=f"r{at}") for at, one in enumerate(found)]),
    small_nodes,
    st.randoms(use_true_random=False),
)
def test_on_any_nodes_nothing_is_claimed_twice_and_their_order_changes_nothing(
    wanted: list[WaitingModel], residents: list[ResidentModel], nodes: list[WorkerNode], chance: Any
) -> None:
    there = with_claims(nodes, residents)
    found = plan_on(there, wanted, residents, NOW)
    mixed = list(there)
    chance.shuffle(mixed)
    other = plan_on(mixed, wanted, residents, NOW)
    assert (other.refused, other.places, other.yielding, other.explained) == (
        found.refused, found.places, found.yielding, found.explained,
    )  # fmt: skip
    taken = {name for name, each in found.places.items() if each}
    assert taken == {one.name for one in wanted} - {*found.refused, *found.never}
    for one in there:
        claimed = sum(each.claims.get(one.name, 0) for each in residents)
        coming = sum(place.node == one.name for name in taken for place in found.places[name])
        assert not coming or claimed + coming <= one.total
        assert not (coming and one.cordoned)
        for gpu in one.devices:
            used = sum(
                each.need.each
                for each in wanted
                for place in found.places.get(each.name, ())
                if each.need is not None and gpu.id in place.gpus
            )
            assert used <= gpu.free
    for name in found.yielding:
        (model,) = (one for one in residents if one.name == name)
        assert model.leaving or not (model.kept or model.pinned)
