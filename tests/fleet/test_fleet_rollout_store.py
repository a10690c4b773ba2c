"""Roll-outs in the database: begun with a revision, ended by going back, changed by orders."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvmig.accounts.usage import UsageRecord, UsageSpool
from kvmig.core.errors import ConfigError
from kvmig.fleet.ledger import merge
from kvmig.fleet.rollout import RolloutPlan, RolloutTerms, paused, promoted
from kvmig.fleet.rollout_figures import figures_of
from kvmig.fleet.rollout_table import (
    StoredRollout,
    change_rollout,
    earlier_spec,
    finish_rollout,
    keep_step,
)
from kvmig.fleet.spec import FleetFile
from kvmig.fleet.store import FleetStore
from tests.support.fleet_stores import ANNA, Place

TERMS = RolloutTerms(canary=(10, 50), hold_s=5)


def change(store: FleetStore, place: Place, **more: Any) -> None:
    store.apply(FleetFile((place.spec(**more),)), ANNA, terms=TERMS)


def stored(store: FleetStore) -> StoredRollout | None:
    _, _, found = store.catalogue()
    return found.get(store.model("qwen").model_id)


def plan_of(store: FleetStore) -> RolloutPlan:
    found = stored(store)
    assert found is not None
    return found.plan


@pytest.fixture
def changed(store: FleetStore, place: Place) -> FleetStore:
    """Its second revision has other flags."""
    store.add_model(place.spec(), ANNA)
    change(store, place, flags="--seed 1")
    return store


def test_a_change_right_after_a_roll_out_begins_from_what_that_has_reached(
    changed: FleetStore, place: Place
) -> None:
    model_id = changed.model("qwen").model_id
    terms = RolloutTerms(over={model_id: 2})  # its row is still there
    changed.apply(FleetFile((place.spec(flags="--seed 2"),)), ANNA, terms=terms)
    assert (plan_of(changed).base, plan_of(changed).target) == (2, 3)
    terms = RolloutTerms(over={model_id: 2})  # of an earlier one
    changed.apply(FleetFile((place.spec(flags="--seed 3"),)), ANNA, terms=terms)
    assert (plan_of(changed).base, plan_of(changed).target) == (2, 4)


def test_a_new_model_does_not_roll_out(store: FleetStore, place: Place) -> None:
    store.add_model(place.spec(), ANNA)
    assert stored(store) is None


def test_other_flags_roll_out_from_the_revision_before_by_the_orders_terms(
    changed: FleetStore, place: Place
) -> None:
    found = stored(changed)
    assert found is not None
    assert found.base_spec == place.spec()
    assert (found.plan.base, found.plan.target) == (1, 2)
    assert (found.plan.canary, found.plan.hold_s, found.plan.share) == ((10, 50, 100), 5, 0)


def test_what_takes_effect_at_once_neither_begins_nor_ends_a_roll_out(
    store: FleetStore, place: Place
) -> None:
    store.add_model(place.spec(), ANNA)
    change(store, place, max_held=5)
    assert stored(store) is None
    change(store, place, max_held=5, flags="--seed 1")
    before = plan_of(store)
    store.scale("qwen", ANNA, most=4)
    assert plan_of(store) == before
    assert (before.base, before.target) == (2, 3)


def test_yet_another_change_rolls_out_from_where_the_first_one_began(
    changed: FleetStore, place: Place
) -> None:
    change(changed, place, flags="--seed 2")
    assert (plan_of(changed).base, plan_of(changed).target) == (1, 3)


def test_a_change_back_ends_the_roll_out(changed: FleetStore, place: Place) -> None:
    change(changed, place)
    assert stored(changed) is None
    assert changed.model("qwen").revision == 3


def test_a_removed_models_roll_out_is_gone(changed: FleetStore, place: Place) -> None:
    changed.remove_model("qwen", ANNA)
    changed.add_model(place.spec(), ANNA)
    assert stored(changed) is None


def test_a_step_is_there_after_the_next_start(changed: FleetStore) -> None:
    model_id = changed.model("qwen").model_id
    after = promoted(plan_of(changed), 7.0)
    keep_step(changed.database, model_id, after)
    changed.close()
    changed.open()
    assert plan_of(changed) == after
    finish_rollout(changed.database, model_id, after)
    assert stored(changed) is None


def test_a_step_of_an_earlier_roll_out_changes_nothing(changed: FleetStore, place: Place) -> None:
    model_id, old = changed.model("qwen").model_id, plan_of(changed)
    change(changed, place, flags="--seed 2")
    now = plan_of(changed)
    keep_step(changed.database, model_id, promoted(old, 7.0))
    finish_rollout(changed.database, model_id, old)
    assert plan_of(changed) == now


def test_an_order_changes_it_and_is_noted(changed: FleetStore) -> None:
    change_rollout(changed.database, "qwen", paused, ("anna", "10.0.0.1"), 9.0)
    assert plan_of(changed).state == "paused"
    newest = changed.audit()[0]
    assert (newest.action, newest.object, newest.actor) == ("rollout.change", "qwen", "anna")
    assert (newest.before["state"], newest.after["state"]) == ("running", "paused")


def test_an_order_to_a_model_without_a_roll_out_is_refused(store: FleetStore, place: Place) -> None:
    store.add_model(place.spec(), ANNA)
    with pytest.raises(ConfigError, match="model 'qwen' has no roll-out under way"):
        change_rollout(store.database, "qwen", paused, ("anna", ""), 9.0)


def test_one_goes_back_to_where_the_roll_out_began_or_to_what_was_started_otherwise(
    store: FleetStore, place: Place
) -> None:
    store.add_model(place.spec(), ANNA)
    with pytest.raises(ConfigError, match="has no earlier revision"):
        earlier_spec(store.database, "qwen", None)
    change(store, place, flags="--seed 1")
    change(store, place, flags="--seed 2")
    assert earlier_spec(store.database, "qwen", None) == place.spec()
    finish_rollout(store.database, store.model("qwen").model_id, plan_of(store))
    store.scale("qwen", ANNA, most=4)
    assert earlier_spec(store.database, "qwen", None) == place.spec(flags="--seed 1")
    assert earlier_spec(store.database, "qwen", 1) == place.spec()
    with pytest.raises(ConfigError, match="revision is 9, must be one of model qwen's, 1 to 4"):
        earlier_spec(store.database, "qwen", 9)


def test_figures_are_those_of_a_deployments_calls_since_the_step_began(
    store: FleetStore, place: Place
) -> None:
    folder, now = place.folder / "spools" / "d1", time.time()
    folder.mkdir(parents=True)
    path = folder / "f1.sqlite"
    spool = UsageSpool(path)
    spool.create()
    states: list[tuple[float, Any, float]] = [
        (now - 60, "cut", 900.0), (now, "finished", 10.0), (now, "cut", 30.0),
        (now, "running", 20.0),
    ]  # fmt: skip
    spool.write(
        UsageRecord(
            seq=seq, call_id="c", account="", model="qwen", began=began, status=status, ttft_ms=ms
        )
        for seq, (began, status, ms) in enumerate(states, 1)
    )
    merge(store.database, path, False, 0)
    found = figures_of(store.database, folder, now - 1)
    assert (found.ended, found.cut, found.ttft_ms, found.timed) == (2, 1, 20.0, 3)
    assert figures_of(store.database, place.folder / "spools" / "d2", now).ended == 0
