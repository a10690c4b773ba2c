"""Agents of a placement's units: started by the fleet, joined by the models that it places."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvmig.core.errors import ConfigError
from kvmig.fleet.managed_model import DeploymentRecord
from kvmig.fleet.orders import StartDeployment, StopDeployment
from kvmig.fleet.placement_controller import DesiredPlacement, PlacementController
from kvmig.sharing.messages import UnitState
from tests.fleet.test_fleet_units import GIB, Fleet
from tests.support.model_bench import running

KV = GIB // 4
ALONE: dict[str, Any] = {"unit": "", "unit_memory": 0, "gpu_memory": 4 * GIB}
"""A model that is in no unit by its specification."""


def placed(*units: tuple[str, list[int], str], share: float = 0.6) -> dict[str, Any]:
    """A placement: for each unit its name, GPUs and models."""
    return {
        "units": [
            {
                "name": name,
                "gpus": gpus,
                "memory_bytes": 20 * GIB,
                "arena_bytes": 8 * GIB,
                "models": [
                    {"name": one, "kv_bytes": KV, "decode_share": share} for one in models.split()
                ],
            }
            for name, gpus, models in units
        ]
    }


TWO = placed(("left", [0], "a b"), ("right", [1], "b"))


class PlacedFleet(Fleet):
    """A fleet with a placement."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.stored: list[DesiredPlacement] = []
        self.placement = PlacementController(self.models, self.store)

    async def store(self, wanted: DesiredPlacement) -> None:
        self.stored.append(wanted)

    async def want_placement(self, given: dict[str, Any]) -> list[str]:
        lines = await self.placement.accept_placement(given, self.store)
        self.turn()
        return lines

    def answer(self) -> None:
        """All agents answer."""
        for one in self.models.units.every():
            if one.watched is not None:
                one.watched.state = UnitState(arena=one.arena, rule="kvmig", shares=[])

    async def refused(self, given: dict[str, Any]) -> str:
        with pytest.raises(ConfigError) as error:
            await self.placement.accept_placement(given, self.store)
        return str(error.value)


@pytest.fixture
async def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PlacedFleet]:
    monkeypatch.setattr("kvmig.fleet.units.LOOK_S", 60.0)
    made = PlacedFleet(tmp_path / "data")
    for name in "ab":
        made.add(name, **ALONE)
    yield made
    await made.placement.close()
    await made.models.close()


async def test_agents_start_first_and_then_the_models_as_their_members(fleet: PlacedFleet) -> None:
    lines = await fleet.want_placement(TWO)
    assert lines == ["a, b start in their units, once they are on"]
    agents = fleet.taken(StartDeployment)
    assert [one.program for one in agents] == ["unit", "unit"]
    assert all(f"--memory={8 * GIB}B" in one.words for one in agents)
    assert fleet.placement.standing().state == "running"
    life = fleet.models.fronts()[0].life
    assert (life.state, life.why) == ("waiting", "the agent of unit left starts")
    fleet.answer()
    fleet.turn()
    a, b = sorted(fleet.taken(StartDeployment), key=lambda one: one.note)[:2]
    by_model = {msgspec.json.decode(one.note, type=DeploymentRecord).model: one for one in (a, b)}
    words = by_model["b"].words
    sockets = {name: fleet.settings.unit(name) for name in ("left", "right")}
    assert "--instance-unit=i0: left" in words
    assert "--instance-unit=i1: right" in words
    assert f"--unit={sockets['left']}" in words
    assert f"--unit=right: {sockets['right']}" in words
    assert "--unit-shares=100,60" in words
    note = msgspec.json.decode(by_model["b"].note, type=DeploymentRecord)
    assert note.gpus == {"i0": ("GPU-0",), "i1": ("GPU-1",)}
    assert {one.unit: one.arena for one in note.agents} == {"left": 8 * GIB, "right": 8 * GIB}
    held = {one.id: dict(one.claims) for one in fleet.models.places.devices()}
    assert held["GPU-0"] == {"unit left": 8 * GIB, "a": 4 * GIB, "b": 4 * GIB}


async def test_the_share_of_the_placement_is_applied(fleet: PlacedFleet) -> None:
    await fleet.want_placement(placed(("left", [0], "a b"), share=0.45))
    fleet.answer()
    fleet.taken(StartDeployment)
    fleet.turn()
    for start in fleet.taken(StartDeployment):
        assert "--unit-shares=100,50" in start.words


async def test_agents_stay_as_long_as_a_member_runs_and_the_next_server_starts_them_again(
    fleet: PlacedFleet,
) -> None:
    await fleet.want_placement(TWO)
    agents = fleet.taken(StartDeployment)
    fleet.answer()
    fleet.turn()
    starts = fleet.taken(StartDeployment)
    await fleet.placement.reach_placement(None)
    fleet.turn()
    assert fleet.taken(StopDeployment) == [], "the models are members still"
    await fleet.begin_again(*map(running, starts), running(agents[0]))
    fleet.turn()
    again = [one.program for one in fleet.taken(StartDeployment)]
    assert again == ["unit"], "one has died meanwhile"
    for one in starts:
        fleet.report_end(one.deployment)
    fleet.specs.clear()
    fleet.catalogue()
    fleet.turn()
    fleet.turn()
    assert len(fleet.taken(StopDeployment)) == 2


async def test_what_no_agent_can_do_is_refused_with_a_sentence(fleet: PlacedFleet) -> None:
    said = await fleet.refused(placed(("left", [0, 1], "a b")))
    assert "gpus has 2, must have 1 at most with arena_bytes" in said
    for name in ("a/b", "i0", "a: b", "\0", "x" * 65, "ä"):
        said = await fleet.refused(placed((name, [0], "a b")))
        assert "must be letters, digits and . _ : , -, at most 64" in said
    fleet.add("a", **ALONE, engine="toy")
    assert "engine is toy, must be vllm" in await fleet.refused(TWO)
    fleet.add("a", **ALONE, flags=("--unit-guarantee=1GiB",))
    assert "flags has --unit-guarantee, must be without" in await fleet.refused(TWO)


async def test_a_units_name_is_of_the_placement_or_of_specifications(fleet: PlacedFleet) -> None:
    fleet.add("c", unit="left")
    assert "which models have as unit" in await fleet.refused(TWO)
    del fleet.specs["c"]
    fleet.catalogue()
    fleet.turn()
    await fleet.want_placement(TWO)
    with pytest.raises(ConfigError, match="unit left: the placement has a unit of this name"):
        fleet.models.units.check("left", list(fleet.specs.values()))


async def test_a_model_that_runs_without_the_agents_is_refused_with_the_way_out(
    fleet: PlacedFleet,
) -> None:
    fleet.want("a")
    await asyncio.sleep(0)
    assert await fleet.refused(TWO) == (
        "placement: model a was not started for the agent of unit left, must start as a member:"
        " kvmig model off a, set the placement, kvmig model on a"
    )


async def test_another_arena_is_refused_while_the_agent_runs(fleet: PlacedFleet) -> None:
    await fleet.want_placement(TWO)
    await fleet.placement.reach_placement(None)
    other = placed(("left", [0], "a b"))
    other["units"][0]["arena_bytes"] = 9 * GIB
    said = await fleet.refused(other)
    assert f"arena_bytes is {9 * GIB}, must be {8 * GIB} as long as its agent runs" in said


async def test_another_gpu_is_refused_while_the_agent_runs(fleet: PlacedFleet) -> None:
    await fleet.want_placement(placed(("left", [0], "a b")))
    fleet.answer()
    fleet.turn()
    await fleet.placement.reach_placement(None)
    said = await fleet.refused(placed(("left", [1], "a b")))
    assert "gpus is GPU-1, must be GPU-0 as long as its agent runs" in said
