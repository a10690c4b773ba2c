"""A fleet's unit on a GPU of the tests' own: two models of real vLLM share KV cache by an agent
that the fleet has started, whoever is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmig_tools.fleet import FleetUp
from tests.support.fake_devices import GIB, FakeMachine, devices
from tests.support.fleets import answer, ask, counted, ended, instances_by_socket, kill
from tests.support.waiting import until, until_yes

pytestmark = [pytest.mark.server, pytest.mark.long]

FIRST, SECOND = (one.uuid for one in devices(2))
ARENA, OWN = GIB // 4, 4 * GIB
MODEL = Path(__file__).parents[2] / "kvmig" / "models" / "count"
FLAGS = ["--enforce-eager", "--block-size=32", "--max-num-seqs=16", "--max-model-len=2048"]
AGENT, SERVER = "kvmig.sharing", "kvmig.fleet.server"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[FleetUp]:
    (tmp_path / "machine").mkdir()
    machine = FakeMachine(tmp_path / "machine")
    machine.install(devices(2, 10 * GIB))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in machine.environment.items():
            patch.setenv(name, value)
        patch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        with FleetUp(tmp_path) as made:
            yield made


def add(fleet: FleetUp, name: str, **more: Any) -> None:
    spec = {"name": name, "source": f"path:{MODEL}", "flags": FLAGS, "gpus": ["1"]}
    fleet.add({**spec, "unit": "u", "unit_memory": ARENA, "gpu_memory": OWN, **more})


def unit(fleet: FleetUp) -> dict[str, Any]:
    """As the server shows it; empty: there is no server, or no unit."""
    units: list[dict[str, Any]] = fleet.get("status")["units"] if fleet.listens() else []
    return units[0] if units else {}


def leased(fleet: FleetUp) -> dict[str, int]:
    """Bytes by model."""
    return unit(fleet).get("leased_bytes") or {}


async def another(fleet: FleetUp, words: str, before: int = 0) -> int:
    """The process that comes after one."""

    def found() -> list[int]:
        return [one for one in fleet.processes(words) if one != before]

    await until(found)
    (pid,) = found()
    return pid


async def both_answer(fleet: FleetUp) -> None:
    async with fleet.client() as client:
        bodies = [ask(name, 20, start) for name in "ab" for start in (17, 300)]
        answers = await asyncio.gather(*(answer(client, body) for body in bodies))
        assert answers == [counted(20, 17), counted(20, 300)] * 2


async def test_two_models_of_a_unit_answer_whoever_dies_and_nothing_is_left(
    fleet: FleetUp,
) -> None:
    for name in "ab":
        await asyncio.to_thread(add, fleet, name)
    answers = asyncio.create_task(both_answer(fleet))
    await another(fleet, AGENT)
    kill(server := await another(fleet, SERVER))  # before a model has joined
    await answers
    (first,) = fleet.processes(AGENT)  # the next server may have ended the other one
    assert unit(fleet)["gpus"] == [SECOND]
    await until(lambda: leased(fleet).keys() == {"a", "b"})
    assert sum(leased(fleet).values()) <= ARENA
    gpus = {one["uuid"]: one["models"] for one in fleet.get("status")["gpus"]}
    assert gpus == {FIRST: {}, SECOND: {"unit u": ARENA, "a": OWN, "b": OWN}}
    models = fleet.processes("kvmig.launcher.llumlet_main")

    kill(first)
    await both_answer(fleet)
    second = await another(fleet, AGENT, first)
    await until(lambda: leased(fleet).keys() == {"a", "b"})
    assert fleet.processes("kvmig.launcher.llumlet_main") == models, "they serve on"

    kill(server := await another(fleet, SERVER, server))
    await another(fleet, SERVER, server)
    await until(lambda: leased(fleet).keys() == {"a", "b"})
    assert fleet.processes(AGENT) == [second], "it outlives the server"
    await both_answer(fleet)

    fleet.ask("DELETE", "models/b")
    await until(lambda: leased(fleet) == {"a": ARENA})
    async with fleet.client() as client:
        assert await answer(client, ask("a", 20)) == counted(20)

    fleet.ask("DELETE", "models/a")
    kill(await another(fleet, SERVER))  # while model and agent end
    await until(lambda: ended(second))
    assert not fleet.processes(AGENT)


def placement(left: str, right: str) -> dict[str, Any]:
    """Two units with agents, on a GPU each, and the models in them."""

    def unit_of(name: str, gpu: int, models: str) -> dict[str, Any]:
        there = [
            {"name": one, "kv_bytes": ARENA // 4, "held_bytes": OWN, "decode_share": 0.6}
            for one in models.split()
        ]
        return {"name": name, "gpus": [gpu], "memory_bytes": 9 * GIB, "arena_bytes": ARENA,
                "models": there}  # fmt: skip

    return {"placement": {"units": [unit_of("left", 0, left), unit_of("right", 1, right)]}}


def members(fleet: FleetUp) -> dict[str, set[str]]:
    """The models of which each unit's agent has members."""
    return {one["name"]: set(one["leased_bytes"] or {}) for one in fleet.get("status")["units"]}


async def test_a_placements_units_get_agents_and_its_models_move_between_them(
    fleet: FleetUp,
) -> None:
    for name in "ab":
        own = {"unit": "", "unit_memory": 0, "gpus": []}
        await asyncio.to_thread(add, fleet, name, **own)
    said = fleet.ask("PUT", "placement", placement("a b", ""))
    assert said.json() == {"plan": ["a, b start in their units, once they are on"]}, said.text
    await until_yes(lambda: fleet.get("placement")["state"] == "reached")
    await until_yes(lambda: members(fleet) == {"left": {"a", "b"}, "right": set()})
    await both_answer(fleet)
    rows = [row for found in instances_by_socket(fleet).values() for row in found]
    assert {(row["model"], row["unit"], tuple(row["gpus"])) for row in rows} == {
        ("a", "left", ("0",)),
        ("b", "left", ("0",)),
    }
    given = {(row["shared"]["guarantee_bytes"], row["shared"]["decode_share"]) for row in rows}
    assert given == {(ARENA // 4, 60)}, "as planned"

    async with fleet.client() as client:
        streams = [asyncio.create_task(answer(client, ask("b", 1500, start=40))) for _ in range(2)]
        await until_yes(lambda: fleet.get("models/b")["running"] == 2)
        said = fleet.ask("PUT", "placement", placement("a", "b"))
        assert said.status_code == 200, said.text
        await until_yes(lambda: members(fleet) == {"left": {"a"}, "right": {"b"}})
        assert await asyncio.gather(*streams) == [counted(1500, 40)] * 2
    await until_yes(lambda: fleet.get("placement")["state"] == "reached")
    await both_answer(fleet)
