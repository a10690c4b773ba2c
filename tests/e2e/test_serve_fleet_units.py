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
from tests.support.fleets import answer, ask, counted, ended, kill
from tests.support.waiting import until

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
    assert leased(fleet).keys() == {"a", "b"}
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
