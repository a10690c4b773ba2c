"""A fleet of toys: each model from zero and back, whoever dies, and nothing of a stream lost."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from kvmig.core.errors import StartupError
from kvmig.fleet.supervisor import HANG_S
from tests.support.fleets import (
    PATH,
    Streamed,
    ToyFleet,
    answer,
    ask,
    counted,
    ended,
    hold_streams,
    kill,
)
from tests.support.waiting import until, until_yes

pytestmark = pytest.mark.server


async def test_fifty_clients_of_a_cold_model_start_it_once_and_all_are_answered(
    fleet: ToyFleet,
) -> None:
    fleet.add_toy("a")
    before = fleet.get("status")["starts"]

    async with fleet.client() as client:
        asked = [answer(client, ask("a", 20, start)) for start in range(50)]
        answers = await asyncio.gather(*asked)

    assert answers == [counted(20, start) for start in range(50)]
    assert fleet.get("status")["starts"] == before + 1


async def test_an_idle_model_goes_to_zero_and_comes_back(fleet: ToyFleet) -> None:
    fleet.add_toy("a", instances={"zero_after_s": 0.5})
    async with fleet.client() as client:
        first = await answer(client, ask("a"))
        fleet.until("models/a", state="zero")
        assert fleet.processes("kvmig.serve") == []
        again = await answer(client, ask("a"))
    assert first == again == counted(10)


@pytest.mark.parametrize(("warm", "idle"), [("none", "zero"), ("parked", "parked")])
async def test_a_stream_keeps_its_model_and_a_request_that_comes_keeps_it_longer(
    fleet: ToyFleet, warm: str, idle: str
) -> None:
    fleet.add_toy("a", warm=warm, instances={"zero_after_s": 0.5})
    (stream,) = await hold_streams(fleet, ask("a", 40))
    await asyncio.sleep(2)
    assert fleet.get("models/a")["state"] == "serving"
    fleet.hold(None)
    assert await stream.task == counted(40)
    fleet.until("models/a", state=idle)


async def test_a_model_that_is_removed_under_forty_streams_ends_after_them(fleet: ToyFleet) -> None:
    fleet.add_toy("a")
    streams = await hold_streams(fleet, *(ask("a", 60, start) for start in range(40)))
    assert fleet.ask("DELETE", "models/a").status_code == 200
    async with fleet.client() as client:
        gone = await client.post(PATH, json=ask("a"))
    fleet.hold(None)
    texts = [await stream.task for stream in streams]

    assert gone.status_code == 404
    assert gone.json()["error"]["code"] in (404, "model_not_found")
    assert texts == [counted(60, start) for start in range(40)]
    await until_yes(lambda: not fleet.processes("kvmig.serve"))


async def test_a_model_that_has_a_removed_ones_name_is_another_one(fleet: ToyFleet) -> None:
    fleet.add_toy("a")
    (stream,) = await hold_streams(fleet, ask("a", 40))
    starts = fleet.get("status")["starts"]
    assert fleet.ask("DELETE", "models/a").status_code == 200
    fleet.add_toy("a", flags=["--max-model-len=64"])
    async with fleet.client() as client:
        later = asyncio.create_task(client.post(PATH, json=ask("a", 80)))
        await asyncio.to_thread(fleet.until, "models/a", held=1)
        fleet.hold(None)
        assert await stream.task == counted(40)
        assert (await later).status_code == 400, "it allows 64 tokens, as the removed one did not"
    assert fleet.get("status")["starts"] == starts + 1


async def test_a_start_that_fails_is_answered_with_its_own_sentence(
    fleet: ToyFleet, tmp_path: Path
) -> None:
    fleet.add_toy("a", flags=[f"--script={tmp_path}"])  # a folder
    async with fleet.client() as client:
        refused = await client.post(PATH, json=ask("a"))
        at_once = await client.post(PATH, json=ask("a"))
    assert refused.status_code == at_once.status_code == 503
    assert "instance i0 died while starting" in refused.json()["error"]["message"]
    assert int(at_once.headers["retry-after"]) >= 1
    assert fleet.get("models/a")["state"] == "failed"


def test_flags_that_the_engine_does_not_know_are_refused_at_the_door(fleet: ToyFleet) -> None:
    spec = {"name": "a", "source": "path:/toy", "engine": "toy", "flags": ["--nonsense=1"]}
    added = fleet.ask("POST", "models", spec)
    applied = fleet.ask("POST", "apply", {"fleet": {"models": [spec]}, "dry_run": True})
    assert added.status_code == applied.status_code == 400
    assert "model a: " in added.json()["error"]["message"]
    assert "--nonsense" in added.json()["error"]["message"]
    assert fleet.get("models")["data"] == []


async def test_streams_and_warm_models_go_on_without_the_server_and_the_next_one_takes_over(
    fleet: ToyFleet,
) -> None:
    fleet.add_toy("a", instances={"min": 1})
    await asyncio.to_thread(fleet.until, "models/a", state="serving")
    (stream,) = await hold_streams(fleet, ask("a", 60))
    (server,) = fleet.processes("kvmig.fleet.server")
    deployments = fleet.processes("kvmig.serve")
    kill(server)
    fleet.hold(None)
    assert await stream.task == counted(60)
    async with fleet.client() as client:
        assert await answer(client, ask("a", 10, 5)) == counted(10, 5)
    await until_yes(lambda: fleet.listens_after(server))
    fleet.until("models/a", state="serving")

    assert fleet.processes("kvmig.serve") == deployments
    assert fleet.get("status")["starts"] == 0
    assert stream.error is None


@pytest.mark.long
async def test_a_server_that_is_stopped_is_as_one_that_is_dead(fleet: ToyFleet) -> None:
    fleet.add_toy("a")
    async with fleet.client() as client:
        await answer(client, ask("a"))
        (server,) = fleet.processes("kvmig.fleet.server")
        os.kill(server, signal.SIGSTOP)
        assert await answer(client, ask("a", 10, 5)) == counted(10, 5)
        await until_yes(lambda: fleet.listens_after(server))
        assert await answer(client, ask("a", 10, 6)) == counted(10, 6)
    assert fleet.get("status")["starts"] == 0


async def cut_and_served_again(fleet: ToyFleet, stream: Streamed) -> None:
    """The stream ends with an error, and the model answers the next call."""
    await asyncio.wait([stream.task])
    fleet.hold(None)
    assert stream.error is not None
    async with fleet.client() as client:
        assert await answer(client, ask("a")) == counted(10)


async def test_a_stream_of_a_deployment_that_dies_ends_with_an_error_and_the_model_comes_back(
    fleet: ToyFleet,
) -> None:
    fleet.add_toy("a")
    (stream,) = await hold_streams(fleet, ask("a", 60))
    for one in fleet.processes("kvmig.serve"):
        kill(one)
    await cut_and_served_again(fleet, stream)
    sockets = len(list((fleet.folder / "run").glob("d-*.sock")))
    assert sockets == len(fleet.processes("kvmig.serve"))


@pytest.mark.long
async def test_a_deployment_that_hangs_is_ended_with_its_streams_and_starts_again(
    fleet: ToyFleet,
) -> None:
    fleet.add_toy("a")
    (stream,) = await hold_streams(fleet, ask("a", 60))
    (launcher,) = fleet.processes("kvmig.serve")
    os.kill(launcher, signal.SIGSTOP)
    async with asyncio.timeout(HANG_S + 15):
        await asyncio.wait([stream.task])
    await cut_and_served_again(fleet, stream)
    said = [one["what"] for one in fleet.get("models/a")["events"]]
    assert f"serving -> zero: no heartbeat for {HANG_S:g} s; it is stopped" in said
    assert ended(launcher)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_front_end_that_dies_or_hangs_leaves_the_instances(
    fleet: ToyFleet, how: signal.Signals
) -> None:
    fleet.add_toy("a")
    (stream,) = await hold_streams(fleet, ask("a", 60))
    starts = fleet.get("status")["starts"]
    (front,) = fleet.processes("kvmig.frontend.process_main")
    os.kill(front, how)
    await cut_and_served_again(fleet, stream)
    assert fleet.get("status")["starts"] == starts, "the model was loaded again"
    assert fleet.processes("kvmig.frontend.process_main") not in ([], [front])


@pytest.mark.long
async def test_a_nursery_that_hangs_is_ended_and_what_it_has_forked_goes_on(
    fleet: ToyFleet,
) -> None:
    fleet.add_toy("a")
    fleet.add_toy("b")
    starts = fleet.get("status")["starts"]
    async with fleet.client() as client:
        await answer(client, ask("a"))
        nursery = min(
            fleet.processes("kvmig.launcher.shared_fork_server")
        )  # what it forks has its name for a moment
        os.kill(nursery, signal.SIGSTOP)
        await until(lambda: ended(nursery))
        assert await answer(client, ask("a", 10, 5)) == counted(10, 5)
        assert await answer(client, ask("b")) == counted(10)
    assert fleet.processes("kvmig.launcher.shared_fork_server") not in ([], [nursery])
    assert fleet.get("status")["starts"] == starts + 2


async def test_server_and_proxy_that_die_with_what_they_were_forked_from_are_started_again(
    fleet: ToyFleet,
) -> None:
    fleet.add_toy("a")
    words = "kvmig.fleet.fork_server", "kvmig.fleet.server", "kvmig.proxy"
    (forks,), (server,), (proxy,) = map(fleet.processes, words)
    for one in (forks, server, proxy):
        kill(one)
    async with fleet.client() as client:
        assert await answer(client, ask("a")) == counted(10)
    await asyncio.to_thread(fleet.until_it_listens)
    (other_forks,), (other_server,), (other_proxy,) = map(fleet.processes, words)
    assert (other_forks, other_server, other_proxy) != (forks, server, proxy)


async def test_a_key_sees_and_uses_its_models_only(fleet: ToyFleet) -> None:
    fleet.add_toy("a")
    fleet.add_toy("b")
    assert fleet.ask("POST", "users", {"name": "eve"}).status_code == 201
    key = fleet.ask("POST", "keys", {"user": "eve", "models": ["a"]}).json()["key"]
    async with fleet.client(key) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [one["id"] for one in listed] == ["a"]
        assert await answer(client, ask("a")) == counted(10)
        denied = await client.post(PATH, json=ask("b"))
        unknown = await client.post(PATH, json=ask("c"))
        admin = await client.get("/kvmig/v2/models")
    assert denied.status_code == unknown.status_code == 404
    assert admin.status_code == 403


async def test_a_revoked_key_is_refused_within_a_second(fleet: ToyFleet) -> None:
    made = fleet.ask("POST", "keys", {"user": "admin"}).json()
    async with fleet.client(made["key"]) as client:
        assert (await client.get("/v1/models")).status_code == 200
        assert fleet.ask("DELETE", f"keys/{made['prefix']}").status_code == 200
        await asyncio.sleep(1)
        assert (await client.get("/v1/models")).status_code == 401


async def test_without_a_key_nothing_is_answered(fleet: ToyFleet) -> None:
    async with httpx.AsyncClient(base_url=fleet.url) as client:
        for path in ("/v1/models", "/kvmig/v2/status"):
            assert (await client.get(path)).status_code == 401
        assert (await client.post(PATH, json=ask("a"))).status_code == 401


async def test_an_alias_is_another_name(fleet: ToyFleet) -> None:
    fleet.add_toy("a", aliases=["gpt-4"])
    async with fleet.client() as client:
        assert await answer(client, ask("gpt-4")) == counted(10)


async def test_a_model_that_nobody_needs_any_more_frees_its_instances_live(fleet: ToyFleet) -> None:
    """From three instances to one under forty streams: all are whole."""
    fleet.add_toy("a", instances={"min": 3, "max": 3, "target": 1})
    fleet.until("models/a", state="serving", serving=3)
    streams = await hold_streams(fleet, *(ask("a", 60, start) for start in range(40)))
    assert fleet.ask("POST", "models/a/scale", {"min": 1, "max": 1}).status_code == 200
    fleet.until("models/a", serving=1)
    fleet.hold(None)
    assert [await stream.task for stream in streams] == [counted(60, start) for start in range(40)]


def test_a_model_may_have_more_instances_than_it_was_started_with(fleet: ToyFleet) -> None:
    fleet.add_toy("a", instances={"min": 1, "max": 1})
    fleet.until("models/a", state="serving", serving=1)
    assert fleet.ask("POST", "models/a/scale", {"min": 2, "max": 2}).status_code == 200
    fleet.until("models/a", serving=2)


# -- fleets of their own


async def test_a_second_fleet_in_the_same_folder_is_refused_by_name(tmp_path: Path) -> None:
    with ToyFleet(tmp_path) as first:
        other = ToyFleet(tmp_path)
        with pytest.raises(StartupError):
            other.start()
        assert other.process is not None
        assert other.process.returncode == 2
        assert first.process is not None
        assert f"is in use by process {first.process.pid}" in other.log.read_text()


async def test_nothing_outlives_init(tmp_path: Path) -> None:
    with ToyFleet(tmp_path) as fleet:
        fleet.add_toy("a", instances={"min": 1})
        fleet.until("models/a", state="serving")
        children = fleet.processes("kvmig")
        assert fleet.process is not None
        fleet.process.kill()
        fleet.process.wait()
        await until_yes(lambda: all(map(ended, children)))


async def test_what_the_catalogue_holds_is_there_after_a_restart(tmp_path: Path) -> None:
    with ToyFleet(tmp_path) as fleet:
        fleet.add_toy("a")
        key = fleet.key
        said = fleet.log.read_text()
        assert f"the first admin's key is in {fleet.folder}/admin-key" in said
        assert key not in said
        async with fleet.client() as client:
            await answer(client, ask("a"))
        children = fleet.processes("kvmig")
        assert fleet.stop(signal.SIGINT) == 0
        assert all(map(ended, children))
        logs = {one.name: one.read_text() for one in [fleet.log, *fleet.folder.rglob("*.log")]}
        assert len(logs) > 1, logs
        assert not [name for name, log in logs.items() if "Traceback" in log], logs
        fleet.log.write_bytes(b"")
        fleet.start()
        async with fleet.client(key) as client:
            assert await answer(client, ask("a")) == counted(10)
        assert "first admin" not in fleet.log.read_text()
