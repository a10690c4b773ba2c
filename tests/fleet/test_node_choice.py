"""Which worker an instance goes to, and why none takes it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmig.fleet.node_choice import (
    InstanceDemand,
    InstanceHold,
    choose_node,
    choose_nodes,
    rooms_of,
)
from kvmig.fleet.workers import FleetWorker
from tests.support.made_up_nodes import GIB, node_id

SMALL = InstanceDemand(GIB, {"CPU": 1.0})


def worker(letter: str, gib: float = 8, cpus: float = 4.0, **more: object) -> FleetWorker:
    memory = int(gib * GIB)
    usual: dict[str, object] = {
        "state": "ready", "memory_total": memory, "memory_free": memory,
        "resources": {"CPU": cpus}, "free_resources": {"CPU": cpus},
    }  # fmt: skip
    return FleetWorker(letter, node_id(letter), **{**usual, **more})  # type: ignore[arg-type]


def test_it_is_the_worker_with_the_most_free_memory() -> None:
    chosen = choose_node(SMALL, rooms_of([worker("a", 4), worker("b", 8)], []))
    assert chosen is not None
    assert chosen.worker.name == "b"


def test_several_instances_spread() -> None:
    nodes = choose_nodes(SMALL, 2, rooms_of([worker("a"), worker("b")], [])).nodes
    assert set(nodes) == {node_id("a"), node_id("b")}


def test_every_worker_says_why_it_does_not_take_it() -> None:
    workers = [
        worker("a", cordoned=True),
        worker("b", cordoned=True, drained_at=1.0),
        worker("c", state="joining"),
        worker("d", cpus=0.0),
        worker("e", gib=0.5),
    ]
    choice = choose_nodes(SMALL, 1, rooms_of(workers, []))
    assert choice.nodes == ()
    assert choice.why == (
        "no worker has room: a: it is cordoned; b: it is being drained; c: it is joining;"
        " d: it has 0 CPU free of 1 CPU; e: it has 0.5 GiB free of 1.0 GiB"
    )


def test_without_a_worker_there_is_no_room() -> None:
    assert choose_nodes(SMALL, 1, ()).why == "no room: there is no worker"


def test_what_was_ordered_counts_before_anybody_has_measured_it() -> None:
    holds = [InstanceHold(node_id("a"), InstanceDemand(GIB, {"CPU": 4.0}), serves=False)]
    (room,) = rooms_of([worker("a")], holds)
    assert (room.memory, room.resources) == (7 * GIB, {"CPU": 0.0})


def test_what_serves_is_measured_already_and_counts_once() -> None:
    holds = [InstanceHold(node_id("a"), SMALL, serves=True)]
    (room,) = rooms_of([worker("a", memory_free=7 * GIB)], holds)
    assert room.memory == 7 * GIB


def test_what_others_have_taken_of_a_worker_is_not_given_again() -> None:
    (room,) = rooms_of([worker("a", memory_free=GIB // 2, free_resources={"CPU": 0.0})], [])
    assert room.refusal(SMALL) == "it has 0 CPU free of 1 CPU"


letters = st.sampled_from("abc")
demands = st.builds(
    InstanceDemand,
    st.integers(0, 4 * GIB),
    st.fixed_dictionaries({"CPU": st.integers(0, 3).map(float)}),
)


@given(
    refusing=st.sets(letters),
    holds=st.lists(st.tuples(letters, demands, st.booleans()), max_size=5),
    demand=demands,
    count=st.integers(1, 6),
)
def test_no_worker_is_given_more_than_it_has_left(
    refusing: set[str],
    holds: list[tuple[str, InstanceDemand, bool]],
    demand: InstanceDemand,
    count: int,
) -> None:
    workers = [worker(one, cordoned=one in refusing) for one in "abc"]
    rooms = rooms_of(
        workers, [InstanceHold(node_id(one), took, serves) for one, took, serves in holds]
    )
    choice = choose_nodes(demand, count, rooms)
    assert len(choice.nodes) in (0, count)
    assert bool(choice.nodes) != bool(choice.refused)
    for room in rooms:
        given_ = choice.nodes.count(room.worker.node)
        if given_:
            assert room.worker.name not in refusing
            assert given_ * demand.memory <= room.memory
            assert given_ * demand.resources["CPU"] <= room.resources["CPU"]
