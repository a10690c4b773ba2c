"""A fleet of toys whose models change places while they stream."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from bench.models import model_folder
from kvmig.placement.problem import ModelLoad
from kvmig.placement.step_costs import DeviceCosts, FitErrors, ModelCost, StepCost
from tests.placement.test_replace import placement_text
from tests.support.fleets import (
    Streamed,
    ToyFleet,
    answer,
    ask,
    counted,
    instances_by_socket,
    kill,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.server

BEFORE = {"left": "a b", "right": "b c"}
AFTER = {"left": "a c", "right": "a b"}


def body(units: dict[str, str], **more: bool) -> dict[str, Any]:
    return {"placement": tomllib.loads(placement_text(0, **units)), **more}


@pytest.fixture
def three(fleet: ToyFleet) -> Iterator[ToyFleet]:
    """Of a, b and c, that serve as BEFORE."""
    for name, count in (("a", 1), ("b", 2), ("c", 1)):
        fleet.add_toy(name, instances={"min": count, "max": 3})
    for name in "abc":
        fleet.until(f"models/{name}", state="serving")
    fleet.until("models/b", serving=2)
    assert fleet.ask("PUT", "placement", body(BEFORE)).json() == {"plan": ["nothing moves"]}
    fleet.until("placement", state="reached")
    yield fleet
    assert fleet.ask("DELETE", "placement").status_code == 200


def places(fleet: ToyFleet) -> dict[str, list[str]]:
    """Units of each model's instances that were started for one."""
    return {
        rows[0]["model"]: sorted(row["unit"] for row in rows)
        for rows in instances_by_socket(fleet).values()
    }


async def test_models_change_places_and_their_streams_lose_nothing(three: ToyFleet) -> None:
    three.hold(8)
    streams = [Streamed(three, ask(name, 40)) for name in "abc"]
    for one in streams:
        await one.reach(8)
    planned = three.ask("PUT", "placement", body(AFTER, dry_run=True))
    assert planned.status_code == 200, planned.text
    assert planned.json()["plan"][0].startswith("4 waves")
    assert three.get("placement")["state"] == "reached"
    assert three.ask("PUT", "placement", body(AFTER)).status_code == 200
    second = three.ask("PUT", "placement", body(BEFORE))
    assert second.status_code == 409
    assert "a re-placement runs already" in second.json()["error"]["message"]
    three.until("placement", state="reached")
    three.hold(None)
    assert [await one.task for one in streams] == [counted(40)] * 3
    assert places(three) == {"a": ["", "right"], "b": [""], "c": ["left"]}


def test_a_server_that_dies_on_the_way_goes_on_from_what_is_there(three: ToyFleet) -> None:
    assert three.ask("PUT", "placement", body(AFTER)).status_code == 200
    (server,) = three.processes("kvmig.fleet.server")
    kill(server)
    wait_until(lambda: three.listens_after(server))
    three.until("placement", state="reached")
    assert places(three)["c"] == ["left"]


def test_what_cant_be_used_is_refused_in_one_sentence(three: ToyFleet) -> None:
    cases = [
        ({"left": "a b", "right": "c d"}, "placement: model is 'd', which isn't in the catalogue"),
        ({"left": "a", "right": "b"}, "placement: model c runs, and has no place in it"),
        ({"left": "a a"}, "placement: unit left: model a is there twice, a unit has one of each"),
    ]
    for units, sentence in cases:
        answer = three.ask("PUT", "placement", body(units))
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, sentence)
    assert three.get("placement")["state"] == "reached"


def rule(**more: float) -> dict[str, Any]:
    """Models that are planned for one request a second each, and need 0.5 s of a batch of 10."""
    cost = StepCost(
        (0.1, 0.0, 0.0, 0.0), (50.0, 0.0, 0.0, 0.0, 0.0, 0.0), FitErrors((0, 0), (0, 0))
    )
    device = DeviceCosts("toy", "made up", 2000, 1e9, 1.0, 0, {"toy": ModelCost(1, 1, {"1": cost})})
    models = [ModelLoad(name, "toy", 1.0, 10.0, 10.0, 0.0) for name in "abc"]
    given: dict[str, Any] = msgspec.to_builtins({"device": device, "models": models})
    return given | more


@pytest.mark.long
async def test_models_follow_the_rates_of_their_requests(three: ToyFleet) -> None:
    planned = three.ask("PUT", "placement", body(BEFORE) | {"replan": rule(span_s=4, horizon_s=99)})
    assert planned.status_code == 200, planned.text
    three.until("placement", state="reached")

    async def call(client: httpx.AsyncClient) -> None:
        for _ in range(200):
            assert await answer(client, ask("a", 10)) == counted(10)
            await asyncio.sleep(0.1)

    async with three.client() as client:
        await asyncio.gather(*(call(client) for _ in range(5)))
    shown = three.get("placement")
    assert shown["planned"]["a"] > 10, shown
    assert shown["replan"].startswith("rates changed of a"), shown
    three.until("placement", state="reached")
    units = {unit["name"]: {one["name"] for one in unit["models"]} for unit in
             three.get("placement")["placement"]["units"]}  # fmt: skip
    assert sum("a" in models for models in units.values()) == 2
    assert len(places(three)["a"]) == 2


def test_a_rule_that_doesnt_fit_is_refused_before_anything_changes(three: ToyFleet) -> None:
    few = rule() | {"models": rule()["models"][:2]}
    answered = three.ask("PUT", "placement", body(AFTER) | {"replan": few})
    assert answered.status_code == 400
    assert answered.json()["error"]["message"] == (
        "replan: models has c 0 times, must have each model of the placement once"
    )
    assert three.get("placement")["rates"] == {}


@pytest.mark.long
async def test_real_engines_change_places_and_their_streams_lose_nothing(fleet: ToyFleet) -> None:
    flags = ["--enforce-eager", "--block-size=32", f"--kv-cache-memory-bytes={64 << 20}"]
    for name in "ab":
        spec = {"name": name, "source": f"path:{model_folder('count')}", "flags": flags}
        fleet.add({**spec, "instances": {"min": 1, "max": 3}, "memory": 1 << 30})
    for name in "ab":
        fleet.until(f"models/{name}", state="serving")
    try:
        fleet.ask("PUT", "placement", body({"left": "a", "right": "b"})).raise_for_status()
        fleet.until("placement", state="reached")
        streams = [Streamed(fleet, ask(name, 1500)) for name in "ab"]
        for one in streams:
            await one.reach(20)
        planned = fleet.ask("PUT", "placement", body({"left": "b", "right": "a"}))
        assert planned.status_code == 200, planned.text
        await asyncio.to_thread(fleet.until, "placement", state="reached")
        assert places(fleet) == {"a": ["right"], "b": ["left"]}
        assert [await one.task for one in streams] == [counted(1500)] * 2
    finally:
        fleet.ask("DELETE", "placement")
