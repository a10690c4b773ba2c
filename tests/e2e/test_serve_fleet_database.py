"""A fleet whose database can't be used: inference goes on, orders hear why, then all is well."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from kvmig.core.errors import StartupError
from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.support import postgres
from tests.support.fleets import ToyFleet, kill

pytestmark = pytest.mark.server

PROMPT = "Count: 0017 0018"
NEXT = " 0019 0020"


async def answered(client: httpx.AsyncClient, model: str) -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": len(NEXT), "temperature": 0}
    found = await client.post("/v1/completions", json=body)
    assert found.status_code == 200, found.text
    return str(found.json()["choices"][0]["text"])


async def refused(fleet: ToyFleet, sentence: str) -> None:
    """An order, by 503; the API answers on."""
    answer = await asyncio.to_thread(fleet.ask, "POST", "users", {"name": "carl"})
    assert answer.status_code == 503
    assert sentence in answer.json()["error"]["message"]


def kvmig(fleet: ToyFleet, *words: str) -> subprocess.CompletedProcess[str]:
    """The command, which fails by a sentence."""
    command = [sys.executable, "-m", "kvmig", f"--data={fleet.folder}", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=SERVER_PATIENCE_S
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    return done


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[ToyFleet]:
    with ToyFleet(tmp_path) as made:
        made.add_toy("warm")
        made.add_toy("cold")
        yield made


@pytest.mark.long
async def test_while_the_database_is_locked_models_serve_and_start(fleet: ToyFleet) -> None:
    file = fleet.folder / "kvmig.sqlite"
    async with fleet.client() as client:
        assert await answered(client, "warm") == NEXT
        with closing(sqlite3.connect(file, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            order = asyncio.create_task(refused(fleet, f"{file} is locked by another program"))
            assert await answered(client, "warm") == NEXT
            assert await answered(client, "cold") == NEXT
            assert not order.done()
            await order
    assert fleet.ask("POST", "users", {"name": "carl"}).status_code == 201


@pytest.mark.long
async def test_without_postgres_models_serve_and_the_next_server_waits_for_it(
    postgres_cluster: postgres.Cluster, tmp_path: Path
) -> None:
    with ToyFleet(tmp_path, f"--database={postgres_cluster.new()}") as fleet:
        fleet.add_toy("warm")
        async with fleet.client() as client:
            assert await answered(client, "warm") == NEXT
            postgres_cluster.stop()
            try:
                await refused(fleet, "can't be used: connection")
                listed = await asyncio.to_thread(kvmig, fleet, "model", "ls")
                assert "can't be used: connection" in listed.stderr
                (server,) = fleet.processes("kvmig.fleet.server")
                kill(server)
                await asyncio.sleep(2)
                listed = await asyncio.to_thread(kvmig, fleet, "model", "ls")
                assert fleet.process is not None
                supervisor = f"its supervisor, process {fleet.process.pid}, restarts the server"
                assert supervisor in listed.stderr
                assert await answered(client, "warm") == NEXT
            finally:
                postgres_cluster.start()
            async with asyncio.timeout(SERVER_PATIENCE_S):
                while not fleet.listens():  # noqa: ASYNC110 - the server starts by itself
                    await asyncio.sleep(0.1)
            made = await asyncio.to_thread(fleet.ask, "POST", "users", {"name": "carl"})
            assert made.status_code == 201, made.text
            assert await answered(client, "warm") == NEXT


async def test_a_damaged_database_is_refused_by_name_and_left_as_it_is(tmp_path: Path) -> None:
    fleet = ToyFleet(tmp_path)
    file = fleet.folder / "kvmig.sqlite"
    file.parent.mkdir(mode=0o700)
    file.write_bytes(b"certainly no database, " * 500)
    with pytest.raises(StartupError, match=r"kvmig\.sqlite is no SQLite database"):
        fleet.start()
    assert fleet.process is not None
    assert fleet.process.wait(10) == 2
    assert file.read_bytes() == b"certainly no database, " * 500
