"""A fleet whose model gets other weights under load: no stream is mixed, lost or cut."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from bench.models import model_flags
from kvmig.engines.toy.script import ScriptFile, ToyScript
from kvmig.models import BUNDLED
from kvmig_tools.fleet import FleetUp
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import SMALL
from scripts.check import NEXT, ROOT
from tests.support import count_down
from tests.support.fleets import (
    Streamed,
    ToyFleet,
    answer,
    ask,
    counted,
    hold_streams,
    instances_by_socket,
    kill,
)
from tests.support.streams import Door, Stream, count_from, start_streams
from tests.support.streams import counted as counts
from tests.support.waiting import until_yes

pytestmark = pytest.mark.server

BY_TWO = "".join(f" {number:04}" for number in range(20, 60, 2))
OLD, NEW = counted(5), BY_TWO[:5]


def apply(fleet: FleetUp, spec: dict[str, Any], **rollout: Any) -> None:
    """Change a model."""
    found = fleet.ask("POST", "apply", {"fleet": {"models": [spec]}, "rollout": rollout})
    assert found.status_code == 200, found.text


def count_by_two(fleet: ToyFleet, **rollout: Any) -> None:
    """Give the model `a` other weights."""
    other_toys(fleet, ToyScript(counts_by=2), **rollout)


def other_toys(fleet: ToyFleet, script: ToyScript, *more: str, **rollout: Any) -> None:
    """Give the model `a` other weights, whose engines do what the script says."""
    other = fleet.folder.parent / "other-script"
    ScriptFile(str(other)).write(script)
    spec = fleet.get("models/a")["spec"]
    own = [f"--script={other}" if "--script" in one else one for one in spec["flags"]]
    apply(fleet, {**spec, "flags": [*own, *more]}, **rollout)


def rollout(fleet: FleetUp, name: str = "a") -> Any:
    return fleet.get(f"models/{name}/rollout")["rollout"]


def order(fleet: FleetUp, **body: Any) -> None:
    found = fleet.ask("POST", "models/a/rollout", body)
    assert found.status_code == 200, found.text


async def answers(fleet: ToyFleet, count: int) -> set[str]:
    async with fleet.client() as client:
        return {await answer(client, ask("a", 5)) for _ in range(count)}


async def until_answers(fleet: ToyFleet, *wanted: str) -> None:
    """Until new calls are answered so: proxies learn of a step a moment later."""
    async with asyncio.timeout(SERVER_PATIENCE_S):
        found: set[str] = set()
        while found != set(wanted):
            found = await answers(fleet, 30)


async def test_streams_keep_the_weights_that_they_began_with_whatever_dies(
    fleet: ToyFleet,
) -> None:
    fleet.add_toy("a")
    streams = await hold_streams(fleet, *(ask("a", 40, start) for start in range(20)))
    count_by_two(fleet, canary=[50], hold_s=3600)
    await until_answers(fleet, OLD, NEW)

    (server,) = fleet.processes("kvmig.fleet.server")
    kill(server)
    await until_yes(lambda: fleet.listens_after(server))
    await until_yes(lambda: (rollout(fleet)["new"] or {}).get("serving"))
    await until_answers(fleet, OLD, NEW)

    order(fleet, action="promote")
    await until_answers(fleet, NEW)
    assert rollout(fleet)["old"]["running"] == 20

    fleet.hold(None)
    texts = [await stream.task for stream in streams]
    assert texts == [counted(40, start) for start in range(20)]
    await until_yes(lambda: rollout(fleet) is None)
    assert await answers(fleet, 5) == {NEW}
    assert len(instances_by_socket(fleet)) == 1
    assert fleet.get("status")["starts"] == 0, "of the server that took over"


@pytest.mark.parametrize("instances", [1, pytest.param(2, marks=pytest.mark.long)])
async def test_flags_of_scheduling_go_from_instance_to_instance_while_streams_move(
    fleet: ToyFleet, instances: int
) -> None:
    fleet.add_toy("a", instances={"min": instances, "max": instances})
    await until_yes(lambda: fleet.get("models/a")["serving"] == instances)
    streams = await hold_streams(fleet, *(ask("a", 60, start) for start in range(6)))
    (socket,) = instances_by_socket(fleet)
    spec = fleet.get("models/a")["spec"]
    spec["flags"] = [one.replace("-seqs=64", "-seqs=48") for one in spec["flags"]]
    apply(fleet, spec)
    await until_yes(lambda: rollout(fleet) is None)
    fleet.hold(None)
    assert [await one.task for one in streams] == [counted(60, start) for start in range(6)]
    ((path, rows),) = instances_by_socket(fleet).items()
    assert path == socket, "the deployment is the same"
    assert {one["flags"] for one in rows if one["state"] == "serving"} == {"--max-num-seqs=48"}
    assert not fleet.get("models/a")["stale"]


@pytest.mark.long
async def test_going_back_leaves_new_streams_where_they_are(fleet: ToyFleet) -> None:
    fleet.add_toy("a")
    assert await answers(fleet, 1) == {OLD}
    count_by_two(fleet)
    await until_yes(lambda: rollout(fleet) is None)
    assert await answers(fleet, 3) == {NEW}

    other = ScriptFile(str(fleet.folder.parent / "other-script"))
    other.write(ToyScript(counts_by=2, hold=8))
    (stream,) = await hold_streams(fleet, ask("a", 40))
    fleet.hold(None)
    order(fleet, action="undo")
    await until_answers(fleet, OLD)
    other.write(ToyScript(counts_by=2))
    assert await stream.task == BY_TWO[:40]
    await until_yes(lambda: rollout(fleet) is None)
    assert [one["revision"] for one in fleet.get("models/a")["revisions"]] == [3, 2, 1]


async def test_one_that_can_not_start_stops_its_roll_out_and_the_old_one_answers(
    fleet: ToyFleet, tmp_path: Path
) -> None:
    fleet.add_toy("a")
    assert await answers(fleet, 1) == {OLD}
    spec = fleet.get("models/a")["spec"]
    spec["flags"] = [f"--script={tmp_path}"]  # a folder
    apply(fleet, spec)
    await until_yes(lambda: rollout(fleet)["state"] == "stopped")
    assert "instance i0 died while starting" in rollout(fleet)["why"]
    assert await answers(fleet, 3) == {OLD}
    order(fleet, action="undo")
    assert rollout(fleet) is None
    assert await answers(fleet, 3) == {OLD}


@pytest.mark.long
async def test_streams_of_the_old_one_gather_on_one_instance(fleet: ToyFleet) -> None:
    fleet.add_toy("a", instances={"min": 2, "max": 2})
    await until_yes(lambda: fleet.get("models/a")["serving"] == 2)
    streams = await hold_streams(fleet, *(ask("a", 40, start) for start in range(40)))
    count_by_two(fleet)
    await until_yes(lambda: rollout(fleet)["share"] == 100 and rollout(fleet)["old"]["serving"] < 2)
    old = rollout(fleet)["old"]
    assert (old["serving"], old["running"]) == (1, 40)
    fleet.hold(None)
    texts = [await stream.task for stream in streams]
    assert texts == [counted(40, start) for start in range(40)]


async def until_stopped(fleet: ToyFleet, call: Callable[[], Awaitable[object]]) -> str:
    """Call, ten at a time, until the roll-out has stopped by itself; why it has."""
    async with asyncio.timeout(SERVER_PATIENCE_S):
        while rollout(fleet)["state"] == "running":
            await asyncio.gather(*(call() for _ in range(10)))
    found = rollout(fleet)
    assert (found["state"], found["share"]) == ("stopped", 0)
    return str(found["why"])


@pytest.mark.long
async def test_one_whose_first_tokens_come_late_gets_no_more_calls(fleet: ToyFleet) -> None:
    fleet.add_toy("a")
    assert await answers(fleet, 1) == {OLD}
    other_toys(fleet, ToyScript(counts_by=2), "--step-ms=400", canary=[50], hold_s=3600)
    async with fleet.client() as client:
        why = await until_stopped(fleet, lambda: answer(client, ask("a", 2)))
    assert "the new revision's median time to the first token is" in why
    await until_answers(fleet, OLD)


@pytest.mark.long
async def test_one_whose_streams_are_cut_gets_no_more_calls(fleet: ToyFleet) -> None:
    fleet.add_toy("a")
    assert await answers(fleet, 1) == {OLD}
    other_toys(fleet, ToyScript(counts_by=2, hold=3), canary=[50], hold_s=3600)

    async def call() -> None:
        """Its client leaves where nothing more comes."""
        stream = Streamed(fleet, ask("a", 5))
        await asyncio.wait([stream.task], timeout=1.0)
        if not stream.task.done():
            stream.task.cancel()
            await asyncio.wait([stream.task])

    why = await until_stopped(fleet, call)
    assert "calls at the new revision" in why
    assert "were cut" in why
    await until_answers(fleet, OLD)


@pytest.mark.long
async def test_a_real_models_streams_end_under_the_weights_that_they_began_with(
    tmp_path: Path,
) -> None:
    up, down = tmp_path / "up", count_down.make(tmp_path / "down")
    shutil.copytree(BUNDLED, up)
    flags = [*SMALL, *model_flags("device20ms")]
    spec = {"name": "a", "source": f"path:{up}", "flags": flags}
    with FleetUp(tmp_path) as fleet:
        fleet.add(spec)
        door = Door(fleet.url, "a", fleet.key)
        bodies = [count_from(1000 * n, 2000) for n in range(4)]
        streams = await start_streams(door, bodies, 20)
        await asyncio.to_thread(apply, fleet, {**spec, "source": f"path:{down}"})
        await until_yes(lambda: rollout(fleet)["share"] == 100)
        body = {**count_from(0, 100), "prompt": "Count: 5001 5000"}
        later = Stream(door, "/v1/completions", body)
        counts(await later.end(), 4999, by=-1)
        assert not any(one.task.done() for one in streams), "2000 tokens are too few"
        for n, one in enumerate(streams):
            counts(await one.end(), 1000 * n)
        await until_yes(lambda: rollout(fleet) is None)


@pytest.mark.long
async def test_a_real_models_streams_move_through_an_upgrade_of_vllm(tmp_path: Path) -> None:
    tree = ROOT / ".vllm" / NEXT
    if not (tree / "complete").exists():
        pytest.skip(f"python scripts/setup_env.py --vllm {NEXT} makes the other vLLM")
    flags = [*SMALL, *model_flags("device20ms")]
    spec = {
        "name": "a", "source": f"path:{BUNDLED}", "flags": flags,
        "instances": {"min": 2, "max": 2},
    }  # fmt: skip
    with FleetUp(tmp_path) as fleet:
        fleet.add(spec)
        door = Door(fleet.url, "a", fleet.key)
        upgraded, ended = asyncio.Event(), Counter[int]()

        async def client(number: int) -> None:
            """One stream after the other, each counted to its end."""
            while not upgraded.is_set() or not ended[number]:
                stream = Stream(door, "/v1/completions", count_from(1000 * number, 500))
                counts(await stream.end(), 1000 * number)
                ended[number] += 1

        async with asyncio.TaskGroup() as clients:
            for number in range(3):
                clients.create_task(client(number))
            await until_yes(lambda: fleet.get("models/a")["serving"] == 2)
            (socket,) = instances_by_socket(fleet)
            await asyncio.to_thread(apply, fleet, {**spec, "vllm": str(tree)})
            await until_yes(lambda: rollout(fleet) is None)
            upgraded.set()
        ((path, rows),) = instances_by_socket(fleet).items()
        assert path == socket, "the deployment is the same"
        assert {one["vllm"] for one in rows} == {str(tree)}
