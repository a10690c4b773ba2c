"""Usage of a fleet: what clients got is in the ledger once, whatever moves, ends or dies."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from typing import Any

import httpx
import pytest

from bench.unwritable import full
from kvmig.accounts.usage import UsageSpool
from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.support.fleets import PATH, ToyFleet, answer, ask, counted, hold_streams, kill
from tests.support.waiting import until

pytestmark = pytest.mark.server


def used(fleet: ToyFleet, key: str, wanted: int | None = None) -> dict[str, Any]:
    """Sums of a key; wanted: once it has so much output."""
    deadline = time.monotonic() + SERVER_PATIENCE_S
    while True:
        rows = fleet.get("usage?by=key")["data"]
        row = next((one for one in rows if one["key"] == key.split("-")[1]), None)
        if row is not None and (wanted is None or row["output"] >= wanted):
            return dict(row)
        assert time.monotonic() < deadline, rows
        time.sleep(0.05)


def next_server(fleet: ToyFleet, killed: set[int]) -> int:
    """The process of a server that isn't killed yet; it needn't serve."""
    deadline = time.monotonic() + SERVER_PATIENCE_S
    while not (found := set(fleet.processes("kvmig.fleet.server")) - killed):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found.pop()


@pytest.fixture
def key(fleet: ToyFleet) -> str:
    """Another for each test."""
    return str(fleet.ask("POST", "keys", {"user": "admin"}).json()["key"])


def moves_of(fleet: ToyFleet, key: str) -> int:
    """Of all calls with the key."""
    wanted = "SELECT sum(moves) FROM usage JOIN api_keys ON id = key_id WHERE prefix = ?"
    with contextlib.closing(sqlite3.connect(fleet.folder / "kvmig.sqlite")) as file:
        return int(file.execute(wanted, (key.split("-")[1],)).fetchone()[0])


def spooled(fleet: ToyFleet) -> int:
    """Output tokens of calls that run, as front ends have written them."""
    every = (fleet.folder / "spools").glob("*/*.sqlite")
    records = (record for path in every for record in UsageSpool(path).read())
    return sum(record.output for record in records if record.status == "running")


async def usage_of(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, int]:
    """Prompt and output tokens, as the client is told."""
    found = (await http.post(PATH, json=body)).json()["usage"]
    return found["prompt_tokens"], found["completion_tokens"]


async def test_the_ledger_has_what_clients_were_told(fleet: ToyFleet, key: str) -> None:
    fleet.add_toy("a")
    async with fleet.client(key) as http:
        bodies = [ask("a", 10 + number, number, n=1 + number % 2) for number in range(20)]
        told = await asyncio.gather(*(usage_of(http, body) for body in bodies))
    prompt, output = (sum(both) for both in zip(*told, strict=True))
    found = await asyncio.to_thread(used, fleet, key, output)
    assert (found["calls"], found["prompt"], found["output"]) == (20, prompt, output)


async def test_a_stream_that_moves_is_counted_once(fleet: ToyFleet, key: str) -> None:
    fleet.add_toy("a", instances={"min": 2, "max": 2, "target": 1})
    fleet.until("models/a", state="serving", serving=2)
    streams = await hold_streams(fleet, *(ask("a", 60, start) for start in range(8)), key=key)
    assert fleet.ask("POST", "models/a/scale", {"min": 1, "max": 1}).status_code == 200
    # Else streams end where they are: an instance that drains isn't serving either.
    await until(lambda: len(fleet.processes("kvmig.launcher.llumlet_main")) == 1)
    fleet.hold(None)
    assert [await stream.task for stream in streams] == [counted(60, start) for start in range(8)]
    found = await asyncio.to_thread(used, fleet, key, 480)
    assert (found["calls"], found["output"]) == (8, 480)
    assert moves_of(fleet, key) > 0


@pytest.mark.long
async def test_a_server_that_is_killed_again_and_again_counts_everything_once(
    fleet: ToyFleet, key: str
) -> None:
    fleet.add_toy("a")
    total, killed = 0, set[int]()
    async with fleet.client(key) as http:
        await answer(http, ask("a"))
        total += 10
        for number in range(3):
            bodies = [ask("a", 20 + number, start) for start in range(10)]
            told = await asyncio.gather(*(usage_of(http, body) for body in bodies))
            total += sum(output for _, output in told)
            server = await asyncio.to_thread(next_server, fleet, killed)
            kill(server)
            killed.add(server)
            await asyncio.sleep(0.3 * number)
    await asyncio.to_thread(fleet.until_it_listens)
    found = await asyncio.to_thread(used, fleet, key, total)
    await asyncio.sleep(2.5)
    assert used(fleet, key)["output"] == total
    assert found["calls"] == 31


async def test_a_client_that_leaves_has_used_what_it_got(fleet: ToyFleet, key: str) -> None:
    fleet.add_toy("a")
    (stream,) = await hold_streams(fleet, ask("a", 4000), key=key)
    stream.task.cancel()
    await asyncio.wait([stream.task])
    fleet.hold(None)
    found = await asyncio.to_thread(used, fleet, key, 8)
    assert found["output"] < 4000


async def test_a_front_end_that_is_killed_has_lost_a_second_at_most(
    fleet: ToyFleet, key: str
) -> None:
    fleet.add_toy("a")
    (stream,) = await hold_streams(fleet, ask("a", 60), key=key)
    await until(lambda: spooled(fleet) == 8, pause_s=0.05)  # a second, on a machine that is free
    spools = list((fleet.folder / "spools").iterdir())
    for one in fleet.processes("kvmig.serve"):
        kill(one)
    await asyncio.wait([stream.task])
    fleet.hold(None)
    assert used(fleet, key, 8)["output"] == len(stream.text)
    await until(lambda: not any(spool.exists() for spool in spools))


async def test_a_deployment_that_ends_has_written_all(fleet: ToyFleet, key: str) -> None:
    fleet.add_toy("a")
    async with fleet.client(key) as http:
        await answer(http, ask("a", 33))
    assert fleet.ask("DELETE", "models/a").status_code == 200
    assert (await asyncio.to_thread(used, fleet, key, 33))["output"] == 33


async def test_a_deployment_whose_disk_is_full_hands_its_counts_over_before_it_ends(
    fleet: ToyFleet, key: str
) -> None:
    fleet.add_toy("a")
    async with fleet.client(key) as http:
        await answer(http, ask("a", 5))
        async with full(fleet.processes("kvmig.frontend.process_main")):
            for _ in range(10):
                await answer(http, ask("a", 30))
            deleted = await asyncio.to_thread(fleet.ask, "DELETE", "models/a")
            assert deleted.status_code == 200
            found = await asyncio.to_thread(used, fleet, key, 305)
    assert (found["calls"], found["output"]) == (11, 305)


@pytest.mark.long
async def test_calls_are_refused_while_nobody_can_keep_what_they_use(
    fleet: ToyFleet, key: str
) -> None:
    fleet.add_toy("a")
    answers: list[httpx.Response] = []
    async with fleet.client(key) as http:
        await answer(http, ask("a", 5))
        pids = [
            *fleet.processes("kvmig.frontend.process_main"),
            *fleet.processes("kvmig.fleet.server"),
        ]
        async with full(pids), asyncio.timeout(SERVER_PATIENCE_S):
            while not answers or answers[-1].is_success:
                answers.append(await http.post(PATH, json=ask("a", 10)))
                await asyncio.sleep(0.25)
        refused = answers.pop()
        assert refused.status_code == 503
        assert "what calls use can't be kept" in refused.json()["error"]["message"]
        async with asyncio.timeout(SERVER_PATIENCE_S):
            while not (await http.post(PATH, json=ask("a", 10))).is_success:  # noqa: ASYNC110
                await asyncio.sleep(0.25)
    output = 5 + 10 * (len(answers) + 1)
    found = await asyncio.to_thread(used, fleet, key, output)
    assert found["output"] == output


async def test_records_and_spools_that_cannot_be_read_are_set_aside_and_the_server_goes_on(
    fleet: ToyFleet, key: str
) -> None:
    fleet.add_toy("a")
    (server,) = fleet.processes("kvmig.fleet.server")
    async with fleet.client(key) as client:
        await answer(client, ask("a"))
        await asyncio.to_thread(used, fleet, key, 10)
        spool = max(
            (fleet.folder / "spools").rglob("front-*.sqlite"), key=lambda one: one.stat().st_mtime
        )
        with contextlib.closing(sqlite3.connect(spool)) as file, file:
            file.execute("INSERT INTO records VALUES (1000000, ?)", (b'{"seq":1000000,"call',))
        broken = spool.with_name("front-broken.sqlite")
        broken.write_bytes(b"no database" * 1000)
        aside = fleet.folder / "set-aside"
        await until(lambda: len(list(aside.glob("*"))) == 2)
        await answer(client, ask("a"))
    await asyncio.to_thread(used, fleet, key, 20)
    assert (aside / "front-broken.sqlite").read_bytes() == b"no database" * 1000
    (record,) = (aside / f"{spool.stem}.jsonl").read_text().splitlines()
    assert "truncated" in record
    assert fleet.processes("kvmig.fleet.server") == [server]
    text = fleet.ask("GET", "metrics").text
    assert 'kvmig_set_aside_total{kind="record"} 1.0' in text
    assert 'kvmig_set_aside_total{kind="spool"} 1.0' in text
