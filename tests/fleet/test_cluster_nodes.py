"""Workers of a Ray cluster as placement sees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvmig.fleet.cluster_nodes import InstanceDemand, InstanceHold, worker_nodes
from kvmig.fleet.place_choice import choose_places, explain
from kvmig.fleet.worker_files import WorkerFiles
from kvmig.fleet.worker_nodes import InstanceNeed, Rooms, WorkerNode, room_now
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


def nodes_of(
    workers: Sequence[FleetWorker],
    holds: Sequence[InstanceHold] = (),
    files: WorkerFiles | None = None,
) -> tuple[WorkerNode, ...]:
    return worker_nodes(workers, holds, files or WorkerFiles())


def rooms(workers: Sequence[FleetWorker], *holds: InstanceHold) -> Rooms:
    return {one.name: room_now(one, one.available) for one in nodes_of(workers, holds)}


def need(demand: InstanceDemand) -> InstanceNeed:
    return InstanceNeed("m", demand.memory, resources=demand.resources)


def test_several_instances_spread() -> None:
    found = choose_places(rooms([worker("a"), worker("b")]), need(SMALL), 2)
    assert found is not None
    assert {one.node for one in found} == {"a", "b"}


def test_every_worker_says_why_it_does_not_take_it() -> None:
    workers = [
        worker("a", cordoned=True),
        worker("b", cordoned=True, drained_at=1.0),
        worker("c", state="joining"),
        worker("d", cpus=0.0),
        worker("e", gib=0.5),
    ]
    there = rooms(workers)
    assert choose_places(there, need(SMALL), 1) is None
    said = {one.node: one.refusals[0].why for one in explain(there, need(SMALL)).nodes}
    assert said == {
        "a": "it is cordoned",
        "b": "it is being drained",
        "c": "it is joining",
        "d": "it has 0 CPU free of 1 CPU",
        "e": f"memory: needs {GIB} bytes, {GIB // 2} of {GIB // 2} are free",
    }


def test_a_worker_has_its_labels_and_its_name() -> None:
    (node,) = nodes_of([worker("a", labels={"zone": "east"})])
    assert node.labels == {"zone": "east", "worker": "a"}


def test_what_was_ordered_counts_before_anybody_has_measured_it() -> None:
    demand = InstanceDemand(GIB, {"CPU": 4.0})
    there = rooms([worker("a")], InstanceHold(node_id("a"), demand, serves=False, model="m"))
    assert (there["a"].memory, there["a"].resources) == (7 * GIB, {"CPU": 0.0})
    assert there["a"].counts.every == {"": 1}


def test_what_serves_is_measured_already_and_counts_once() -> None:
    hold = InstanceHold(node_id("a"), SMALL, serves=True)
    assert rooms([worker("a", memory_free=7 * GIB)], hold)["a"].memory == 7 * GIB


def test_what_others_have_taken_of_a_worker_is_not_given_again() -> None:
    there = rooms([worker("a", memory_free=GIB // 2, free_resources={"CPU": 0.0})])
    (said,) = explain(there, need(SMALL)).nodes
    assert [one.filter for one in said.refusals] == ["memory", "resources"]


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
    there = rooms(
        workers, *(InstanceHold(node_id(one), took, serves) for one, took, serves in holds)
    )
    places = choose_places(there, need(demand), count) or ()
    assert len(places) in (0, count)
    given_to = Counter(one.node for one in places)
    for name, given_ in given_to.items():
        assert name not in refusing
        # What was taken beyond what is there keeps nothing from one that needs none of it.
        assert given_ * demand.memory <= max(0, there[name].memory)
        assert given_ * demand.resources["CPU"] <= max(0.0, there[name].resources["CPU"])
