"""Rows of workers, with the audit of orders about them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace
from sqlalchemy import update

from kvmig.core.errors import ConfigError
from kvmig.fleet.store import FleetStore
from kvmig.fleet.tables import workers
from kvmig.fleet.workers import WorkerWish
from kvmig.fleet.workers_api import cordoned, drained, labelled, uncordoned
from kvmig.fleet.workers_table import order_worker, read_workers
from tests.support.fleet_stores import ANNA


def order(store: FleetStore, change: Callable[[WorkerWish], WorkerWish], action: str) -> None:
    order_worker(store.database, "w", change, action, ANNA, 1000.0)


def test_orders_are_kept_and_audited(store: FleetStore) -> None:
    order(store, labelled({"zone": "east"}), "label")
    order(store, drained(1000.0, 30.0), "drain")
    wanted = WorkerWish(
        name="w", labels={"zone": "east"}, cordoned=True, drained_at=1000.0, drain_until=1030.0
    )
    assert read_workers(store.database, store.set_aside) == [wanted]
    newest = store.audit(limit=1)[0]
    assert (newest.action, newest.object, newest.actor) == ("worker.drain", "w", "anna")
    assert newest.before == {"name": "w", "labels": {"zone": "east"}, "cordoned": False,
                             "drained_at": None, "drain_until": None, "node": ""}  # fmt: skip


def test_a_worker_whose_row_cannot_be_read_is_named_and_the_others_are_there(
    store: FleetStore,
) -> None:
    for name in ("bad", "w"):
        order_worker(store.database, name, cordoned, "cordon", ANNA, 1000.0)
    with store.database.transaction() as connection:
        bad = update(workers).where(workers.c.name == "bad")
        connection.execute(bad.values(labels=["of tomorrow"]))
    assert [one.name for one in read_workers(store.database, store.set_aside)] == ["w"]
    assert store.set_aside.count == {"worker": 1}


def test_an_order_that_changes_nothing_is_not_audited(store: FleetStore) -> None:
    order(store, cordoned, "cordon")
    order(store, cordoned, "cordon")
    assert len(store.audit()) == 1


def test_uncordon_ends_a_drain_and_a_row_that_wants_nothing_is_gone(store: FleetStore) -> None:
    order(store, drained(1000.0, None), "drain")
    order(store, uncordoned, "uncordon")
    assert read_workers(store.database, store.set_aside) == []
    assert store.audit(limit=1)[0].after is None


def test_a_second_drain_has_a_new_deadline_and_goes_on() -> None:
    first = drained(1000.0, None)(WorkerWish(name="w"))
    second = drained(1010.0, 5.0)(first)
    assert second == replace(first, drain_until=1015.0)


def test_a_label_is_removed_by_null() -> None:
    wish = WorkerWish(name="w", labels={"a": "1", "b": "2"})
    assert labelled({"a": None, "c": ""})(wish).labels == {"b": "2", "c": ""}


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        ({"-a": "1"}, "labels has the name '-a', must be letters, digits"),
        ({"a": "x y"}, "labels.a is 'x y', must be empty, or letters"),
        ({f"l{at}": "1" for at in range(65)}, "labels has 65, must be at most 64"),
    ],
)
def test_labels_that_nobody_could_name_are_refused(
    labels: dict[str, str | None], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        labelled(labels)(WorkerWish(name="w"))


def test_a_worker_of_which_nothing_is_wanted_any_more_has_no_row(store: FleetStore) -> None:
    order(store, lambda wish: replace(cordoned(wish), node="n1"), "cordon")
    assert [one.node for one in read_workers(store.database, store.set_aside)] == ["n1"]
    order(store, lambda wish: replace(uncordoned(wish), node="n1"), "uncordon")
    assert read_workers(store.database, store.set_aside) == []
