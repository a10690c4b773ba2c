"""Errors that nobody foresaw in a round of the fleet's server."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvmig.fleet.controller import ROUND_S
from kvmig.fleet.deployments import DeploymentEvent
from kvmig.fleet.managed_model import CatalogEntry, DeploymentRecord, ManagedModel
from kvmig.fleet.round_faults import REPEAT_S
from kvmig.fleet.spec import ModelSpec
from kvmig.proxy.messages import ModelWanted
from tests.support.model_bench import Bench, deployed, served, silence, spec

BAD = "path:/models/bad"


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    yield made
    await made.models.close()


def want_both(bench: Bench) -> None:
    """One model is whole, the other's files can't be looked at; calls wait for both."""
    bench.broken.add(BAD)
    good, bad = spec(), replace(spec(BAD), name="bad")
    bench.models.take_catalogue(
        CatalogEntry(f"m{at}", one.name, 1, True, one) for at, one in enumerate((bad, good))
    )
    bench.want("bad", "a")


async def test_a_model_that_fails_in_a_round_keeps_no_other_one_from_starting(bench: Bench) -> None:
    want_both(bench)
    assert bench.sources == ["/models/a"]
    assert {one.name: one.state for one in bench.told[-1][0]} == {"a": "starting", "bad": "cold"}


async def test_a_model_that_failed_starts_once_it_no_longer_fails(bench: Bench) -> None:
    want_both(bench)
    bench.broken.clear()
    bench.models.faults.count.clear()
    bench.models.take_want(ModelWanted("bad"))
    bench.turn(ROUND_S)
    assert bench.sources == ["/models/a", "/models/bad"]


async def test_an_entry_that_cannot_be_taken_keeps_no_other_one_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def claim(spec: ModelSpec) -> int:
        if spec.source == BAD:
            raise ZeroDivisionError
        return 1

    monkeypatch.setattr(bench.models.memory, "claim", claim)
    want_both(bench)
    assert bench.sources == ["/models/a"]
    assert bench.models.faults.count["reading the catalogue"] >= 1
    good = CatalogEntry("m1", "a", 1, True, spec())
    bench.models.take_catalogue([good])
    assert [one.wanted.on for one in bench.every] == [False, True]


async def test_a_deployment_that_cannot_be_adopted_ends_and_the_others_are_adopted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.catalogue(spec())
    bench.want("a")
    (start,), (note,) = bench.started, bench.notes
    after = Bench(bench.folder)
    after.catalogue(spec())
    home_of = after.models.rollouts.home_of

    def odd(note: DeploymentRecord) -> ManagedModel | None:
        if note.model == "odd":
            raise ZeroDivisionError
        return home_of(note)

    monkeypatch.setattr(after.models.rollouts, "home_of", odd)
    other = deployed("d2", replace(note, model="odd"))
    after.adopt(other, *bench.running)
    assert [one.deployment for one in after.stopped] == ["d2"]
    assert after.named().deployment == start.deployment
    assert after.models.faults.count["adopting"] == 1
    await after.models.close()


async def test_a_start_that_fails_is_tried_again_in_the_next_round(bench: Bench) -> None:
    bench.catalogue(spec())
    bench.models.take_want(ModelWanted("a"))
    bench.orders_fail = True
    bench.turn()
    assert not bench.started
    bench.orders_fail = False
    bench.models.faults.count.clear()
    bench.models.take_want(ModelWanted("a"))
    bench.turn(ROUND_S)
    assert len(bench.started) == 1


async def test_a_start_that_fails_is_no_start_in_the_models_events(bench: Bench) -> None:
    bench.catalogue(spec())
    bench.models.take_want(ModelWanted("a"))
    bench.orders_fail = True
    for _ in range(3):
        bench.turn(ROUND_S)
    said = [one.what for one in bench.models.events]
    assert len(said) == 1
    assert "starting and stopping failed in the server" in said[0]


async def test_a_model_that_cannot_be_measured_keeps_no_other_one_from_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence(monkeypatch)  # what a deployment tells, the test says
    names = ("bad", "a")
    bench.models.take_catalogue(
        CatalogEntry(f"m-{name}", name, 1, True, replace(spec(), name=name)) for name in names
    )
    bench.want(*names)
    for name in names:
        row = replace(served("i0"), beside_kv=700 << 20)
        bench.watched_of(name).told = DeploymentEvent(data=(row,))
    broken = {"bad"}

    def measure(spec: ModelSpec, beside_kv: int, at: float) -> bool:
        if spec.name in broken:
            raise ZeroDivisionError
        return True

    monkeypatch.setattr(bench.models.memory, "measure", measure)
    bench.models.reconcile()
    assert [one.name for one in bench.learned] == ["a"]
    assert bench.models.faults.count["measuring"] == 1
    broken.clear()
    bench.models.reconcile()
    assert [one.name for one in bench.learned] == ["a", "bad"]


async def test_routes_that_did_not_reach_proxies_are_sent_in_the_next_round(bench: Bench) -> None:
    bench.catalogue(spec())
    bench.models.take_want(ModelWanted("a"))
    bench.links_fail = True
    before = len(bench.told)
    bench.turn()
    assert len(bench.started) == 1
    assert len(bench.told) == before
    bench.links_fail = False
    bench.models.faults.count.clear()
    bench.turn(ROUND_S)
    assert bench.route.state == "starting"


async def test_a_fault_is_counted_at_each_round_and_said_once_a_minute(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        want_both(bench)
        bench.turn(ROUND_S)
    faults = bench.models.faults.count
    assert faults["observing"] == 2
    said = [one for one in caplog.records if "observing of bad" in one.getMessage()]
    assert len(said) == 1
    assert said[0].exc_info is not None
    notes = [one.what for one in bench.models.events if one.model == "bad"]
    assert len([one for one in notes if "observing failed in the server" in one]) == 1
    caplog.clear()
    with caplog.at_level(logging.ERROR):
        bench.now += REPEAT_S
        bench.want("bad")
    assert [one for one in caplog.records if "observing of bad" in one.getMessage()]
