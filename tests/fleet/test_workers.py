"""Workers: their names and states, from what is seen of nodes and what is wanted of them."""

from __future__ import annotations

from kvmig.fleet.workers import LEASE_S, SILENT_S, WorkerTable, WorkerWish
from kvmig.launcher.node_reports import ClusterReport
from tests.support.made_up_nodes import cluster_of, made_up_node, node_id


def table_of(report: ClusterReport | None, *wishes: WorkerWish) -> WorkerTable:
    made = WorkerTable()
    made.take_wishes(wishes)
    made.take_report(report, 0.0)
    return made


def states(table: WorkerTable) -> dict[str, str]:
    return {one.name: one.state for one in table.workers()}


def test_a_worker_is_ready_once_its_agent_has_measured() -> None:
    joining = made_up_node("a", measured=None)
    assert states(table_of(cluster_of(joining, made_up_node("b")))) == {
        "worker-a": "joining", "worker-b": "ready"
    }  # fmt: skip


def test_a_worker_whose_agent_does_not_answer_gets_no_instance() -> None:
    (one,) = table_of(
        cluster_of(made_up_node("a", silent_s=SILENT_S + 1, why="no kvmig"))
    ).workers()
    assert (one.state, one.refusal) == ("silent", "it is silent: no kvmig")


def test_a_node_without_a_name_of_its_own_is_called_as_its_host() -> None:
    unnamed = made_up_node("a", name="10.0.0.1")
    assert list(states(table_of(cluster_of(unnamed)))) == ["host"]


def test_nodes_of_one_name_are_told_apart_and_keep_their_names() -> None:
    first, second = made_up_node("a", name="w"), made_up_node("b", name="w")
    table = table_of(cluster_of(first))
    table.take_report(cluster_of(first, second), 1.0)
    assert list(states(table)) == ["w", "w-bbbbbb"]
    table.take_report(cluster_of(second), 2.0)
    assert list(states(table)) == ["w-bbbbbb"]


def test_nodes_whose_ids_begin_alike_have_names_of_their_own() -> None:
    ids = ("fffffff0", "fffffff1", "fffffff2")
    nodes = [made_up_node("a", name="w", node_id=one) for one in ids]
    assert list(states(table_of(cluster_of(*nodes)))) == [f"w-{one}" for one in ids]


def test_of_two_live_nodes_with_one_name_the_ordered_one_keeps_it_over_a_restart() -> None:
    first, second = made_up_node("a", name="w"), made_up_node("b", name="w")
    wish = WorkerWish(name="w", cordoned=True, node=node_id("b"))
    found = {one.name: one for one in table_of(cluster_of(first, second), wish).workers()}
    assert set(found) == {"w", "w-aaaaaa"}
    assert (found["w"].node, found["w"].cordoned) == (node_id("b"), True)
    assert not found["w-aaaaaa"].cordoned


def test_what_is_wanted_of_a_worker_holds_while_it_is_away_and_when_it_comes_back() -> None:
    wish = WorkerWish(name="worker-a", labels={"zone": "east"}, cordoned=True)
    table = table_of(cluster_of(), wish)
    assert states(table) == {"worker-a": "lost"}
    table.take_report(cluster_of(made_up_node("a")), 1.0)
    (one,) = table.workers()
    assert (one.state, one.labels, one.refusal) == ("ready", {"zone": "east"}, "it is cordoned")


def test_a_node_that_comes_back_is_another_one_under_its_name() -> None:
    table = table_of(cluster_of(made_up_node("a", alive=False)))
    assert states(table) == {"worker-a": "lost"}
    back = made_up_node("b", name="worker-a")
    table.take_report(cluster_of(made_up_node("a", alive=False), back), 1.0)
    (one,) = table.workers()
    assert (one.name, one.node, one.state) == ("worker-a", node_id("b"), "ready")
    assert table.leaving(node_id("a"), LEASE_S) == "lost"
    assert table.leaving(node_id("b"), LEASE_S) == ""


def test_instances_of_a_lost_node_leave_after_a_lease() -> None:
    table = table_of(cluster_of(made_up_node("a", alive=False)))
    assert table.leaving(node_id("a"), LEASE_S - 1) == ""
    assert table.leaving(node_id("a"), LEASE_S) == "lost"


def test_instances_of_a_node_that_nobody_knows_any_more_leave_after_a_lease() -> None:
    """A server that has just started has never seen it."""
    table = table_of(cluster_of())
    assert table.leaving(node_id("a"), 100.0) == ""
    assert table.leaving(node_id("a"), 100.0 + LEASE_S) == "lost"


def test_while_the_cluster_is_not_heard_of_nothing_leaves() -> None:
    table = table_of(None, WorkerWish(name="worker-a", drained_at=1.0))
    assert table.leaving(node_id("a"), 1000.0) == ""
    (one,) = table.workers()
    assert one.refusal == "it is unknown: the Ray cluster does not answer"


def test_a_silent_worker_keeps_its_instances() -> None:
    table = table_of(cluster_of(made_up_node("a", silent_s=1000.0)))
    assert table.leaving(node_id("a"), 1000.0) == ""


def test_instances_leave_a_worker_that_is_drained_and_not_one_that_is_cordoned() -> None:
    cordoned = WorkerWish(name="worker-a", cordoned=True)
    drained = WorkerWish(name="worker-b", cordoned=True, drained_at=1.0)
    table = table_of(cluster_of(made_up_node("a"), made_up_node("b")), cordoned, drained)
    assert [table.leaving(node_id(one), 2.0) for one in "ab"] == ["", "drain"]
    assert [one.refusal for one in table.workers()] == ["it is cordoned", "it is being drained"]
