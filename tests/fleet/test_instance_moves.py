"""Instances that move so that another model has room: when, how, and what is done if that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvmig.core.api_records import InstanceRow
from kvmig.core.errors import StartupError
from kvmig.fleet.deployments import DeploymentEvent, DeploymentWatcher
from kvmig.fleet.instance_moves import AGAIN_S, FAILED_AGAIN_S
from kvmig.fleet.managed_model import CatalogEntry
from kvmig.fleet.orders import StartDeployment
from kvmig.fleet.rollout import RolloutTerms, begun
from kvmig.fleet.rollout_table import StoredRollout
from kvmig.fleet.room_moves import RoomMove, RoomPlan
from kvmig.fleet.spec import InstanceCounts
from kvmig.fleet.worker_nodes import LOCAL
from tests.fleet.test_fleet_units import GIB, Fleet


class BusyFleet(Fleet):
    """Two models of 6 GiB with live requests, on a GPU of 20 GiB each; a third one needs 15."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.orders: list[object] = []
        self.refused = ""
        """Why no instance starts."""

    def put(self, name: str, each: int, **more: Any) -> None:
        self.add(name, unit="", unit_memory=0, gpu_memory=each, **more)

    async def begin(self, **more: Any) -> None:
        for name in "ab":
            self.put(name, 6 * GIB, **more)
            self.want(name)
            # There is no deployment that would say anything else.
            await self.watched_of(name).looked.wait()
            self.say(name, "i0")
            self.turn()
        assert self.held() == {"GPU-0": {"a": 6 * GIB}, "GPU-1": {"b": 6 * GIB}}
        self.taken(StartDeployment)
        self.put("c", 15 * GIB)

    async def call(self, name: str) -> None:
        """A request waits for the model, and what that leads to is ordered."""
        self.want(name)
        await soon()

    def moves_for(self, name: str) -> list[RoomMove]:
        """What would move so that the model has room."""
        found = self.models.moves_for(self.named(name))
        assert found is not None
        return list(found.moves)

    def say(self, name: str, *serving: str, starting: Sequence[str] = ()) -> None:
        """A deployment tells of its instances, which have requests."""
        rows = [
            InstanceRow(id=one, state=state, blocks_total=100, blocks_used=10)
            for state, names in (("serving", serving), ("starting", starting))
            for one in names
        ]
        self.watched_of(name).take_event(DeploymentEvent(1, data=tuple(rows)))


async def soon() -> None:
    """Let what was ordered be asked for."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[BusyFleet]:
    made = BusyFleet(tmp_path / "data")

    async def add(
        _: DeploymentWatcher, count: int, gpus: Sequence[str] = (), node: str = ""
    ) -> set[str]:
        made.orders.append((count, tuple(gpus)))
        if made.refused:
            raise StartupError(made.refused)
        rows = made.named("a").instance_rows
        name = f"i{len(rows)}"
        before = [one.id for one in rows if one.state == "serving"]
        coming = [one.id for one in rows if one.state == "starting"]
        made.say("a", *before, starting=[*coming, name])
        return {name}

    async def drain(
        watched: DeploymentWatcher, instance: str, deadline_s: float | None = None
    ) -> None:
        made.orders.append(instance)
        rows = tuple(
            msgspec.structs.replace(one, state="draining", running=2) if one.id == instance else one
            for one in watched.told.data
        )
        watched.take_event(DeploymentEvent(1, data=rows))

    monkeypatch.setattr(DeploymentWatcher, "add", add)
    monkeypatch.setattr(DeploymentWatcher, "drain", drain)
    monkeypatch.setattr("kvmig.fleet.instance_moves.PAUSE_S", 0.0)
    monkeypatch.setattr("kvmig.fleet.deployments.RETRY_S", 60.0)
    yield made
    await made.models.close()


def events_of(fleet: BusyFleet, model: str) -> list[str]:
    return [one.what for one in fleet.models.events if one.model == model]


async def test_an_instance_moves_away_and_the_one_that_waits_has_its_gpu(fleet: BusyFleet) -> None:
    await fleet.begin()
    await fleet.call("c")
    assert fleet.orders == [(1, ("1",))], "another one starts first"
    assert fleet.named("c").life.why == (
        "no room: it needs 15.0 GiB of a GPU's memory, 14.0 GiB is free; instances move for it"
    )
    assert fleet.held() == {"GPU-0": {"a": 6 * GIB}, "GPU-1": {"a": 6 * GIB, "b": 6 * GIB}}
    fleet.turn()
    await soon()
    assert fleet.orders == [(1, ("1",))], "nothing else moves meanwhile"
    assert fleet.named("c").life.why.endswith("14.0 GiB is free; instances move for it")
    fleet.say("a", "i0", "i1")
    await soon()
    assert fleet.orders == [(1, ("1",)), "i0"], "its requests move"
    fleet.turn()
    assert fleet.taken(StartDeployment) == []
    assert fleet.named("c").life.why.endswith("14.0 GiB is free; instances move for it")
    (line,) = fleet.models.mover.lines()
    assert line.endswith("to make room: its 2 requests leave")
    assert fleet.orders == [(1, ("1",)), "i0"], "nothing else moves until it is gone"
    fleet.say("a", "i1")
    fleet.turn()
    assert fleet.start_of("serve").note.count("GPU-0") == 1
    assert fleet.models.mover.lines() == []
    assert "instance i0 moves so that another model has room" in events_of(fleet, "a")
    kept = fleet.models.places.history.decision(fleet.named("a").deployment, "i1")
    assert kept is not None
    assert kept.explanation.chosen is not None


async def test_moves_of_a_model_that_is_gone_since_are_not_begun(fleet: BusyFleet) -> None:
    move = RoomMove("gone", "i0", LOCAL, ("GPU-0",), LOCAL, ("GPU-1",), 0, 0)
    fleet.models.mover.begin(RoomPlan(LOCAL, ("GPU-0",), (move,), 0.0), {})
    assert fleet.models.mover.lines() == []


async def test_one_that_can_not_start_elsewhere_stays_and_is_not_asked_again_soon(
    fleet: BusyFleet,
) -> None:
    await fleet.begin(instances=InstanceCounts(min=1))
    fleet.refused = "no memory"
    for _ in range(4):
        await fleet.call("c")
    assert fleet.orders == [(1, ("1",)), (1, ("0",))], "each is asked once"
    assert "instance i0 has not moved: no memory" in events_of(fleet, "a")
    assert fleet.held() == {"GPU-0": {"a": 6 * GIB}, "GPU-1": {"b": 6 * GIB}}
    fleet.turn(AGAIN_S)
    await fleet.call("c")
    assert len(fleet.orders) == 3


async def test_a_new_instance_that_fails_is_taken_out_and_the_old_one_serves_on(
    fleet: BusyFleet,
) -> None:
    await fleet.begin()
    await fleet.call("c")
    fleet.say("a", "i0")
    await soon()
    assert fleet.orders == [(1, ("1",)), "i1"]
    assert fleet.named("a").moving == ()


async def test_a_move_is_over_when_its_deployment_is_gone(fleet: BusyFleet) -> None:
    await fleet.begin()
    await fleet.call("c")
    assert fleet.named("a").moving
    await fleet.watched_of("a").close()
    await soon()
    assert fleet.named("a").moving == ()


async def test_a_drain_that_does_not_end_keeps_nobody_waiting_for_ever(fleet: BusyFleet) -> None:
    await fleet.begin(instances=InstanceCounts(min=1))
    await fleet.call("c")
    fleet.say("a", "i0", "i1")
    await soon()
    fleet.turn()
    assert fleet.models.mover.lines()
    fleet.turn(AGAIN_S)
    assert fleet.models.mover.lines() == []


async def test_two_instances_of_a_model_move_together_and_both_serve_before_one_is_drained(
    fleet: BusyFleet,
) -> None:
    fleet.put("a", 4 * GIB, instances=InstanceCounts(min=2, max=2))
    fleet.turn()
    await fleet.watched_of("a").looked.wait()
    fleet.say("a", "i0", "i1")
    fleet.turn()
    fleet.taken(StartDeployment)
    model = fleet.named("a")
    model.places.by_instance |= {"i0": ("GPU-0",), "i1": ("GPU-0",)}
    fleet.put("c", 19 * GIB, gpus=("0",))
    await fleet.call("c")
    assert fleet.orders == [(1, ("1",)), (1, ("1",))]
    assert fleet.held() == {"GPU-0": {"a": 8 * GIB}, "GPU-1": {"a": 8 * GIB}}
    fleet.say("a", "i0", "i1", "i2", starting=["i3"])
    await soon()
    assert len(fleet.orders) == 2, "one of the new ones doesn't serve yet"
    fleet.say("a", "i0", "i1", "i2", "i3")
    await soon()
    assert fleet.orders[2:] == ["i0", "i1"]
    fleet.say("a", "i2", "i3")
    fleet.turn()
    assert fleet.start_of("serve").note.count("GPU-0") == 1


async def test_a_move_that_has_failed_is_tried_again_before_one_that_was_made(
    fleet: BusyFleet,
) -> None:
    await fleet.begin(instances=InstanceCounts(min=1))
    fleet.refused = "no memory"
    await fleet.call("c")
    fleet.refused = ""
    fleet.turn()
    await soon()
    assert fleet.named("a").moves_at == pytest.approx(fleet.now + FAILED_AGAIN_S, abs=1.0)


async def test_nothing_moves_for_one_that_fits(fleet: BusyFleet) -> None:
    await fleet.begin()
    fleet.put("c", 14 * GIB)
    await fleet.call("c")
    assert fleet.orders == []
    assert fleet.start_of("serve").note.count("GPU-0") == 1


async def test_a_model_that_rolls_out_does_not_move(fleet: BusyFleet) -> None:
    await fleet.begin()
    fleet.turn()
    fleet.named("a").rolls = True
    assert [one.model for one in fleet.moves_for("c")] == ["b"]


async def test_of_two_deployments_the_one_moves_whose_instance_was_chosen(
    fleet: BusyFleet,
) -> None:
    fleet.put("a", 6 * GIB)
    fleet.want("a")
    fleet.say("a", "i0")
    fleet.turn()
    old = fleet.specs["a"]
    new = replace(old, source="path:/models/new")
    stored = StoredRollout(begun(RolloutTerms(canary=(10,)), 1, 2, fleet.now), old)
    large = replace(old, name="c", gpu_memory=15 * GIB)
    wanted = [
        CatalogEntry("m-a", "a", 2, True, new, stored),
        CatalogEntry("m-c", "c", 1, True, large),
    ]
    fleet.models.take_catalogue(wanted)
    fleet.turn()
    row = InstanceRow(id="i0", state="serving", blocks_total=100, blocks_used=1)
    less = DeploymentEvent(1, data=(row,))  # than is to move at the old one
    fleet.watched_of("a@2").take_event(less)
    fleet.turn()
    fleet.turn()
    held = fleet.held()
    assert held == {"GPU-0": {"a": 6 * GIB}, "GPU-1": {"a@2": 6 * GIB}}
    assert [one.model for one in fleet.moves_for("c")] == ["a@2"]


async def test_what_would_move_is_shown_before_anything_waits(fleet: BusyFleet) -> None:
    await fleet.begin()
    fleet.turn()
    (move,) = fleet.moves_for("c")
    assert (move.model, move.gpus, move.to_gpus) == ("a", ("GPU-0",), ("GPU-1",))
    assert fleet.orders == []
