"""A server that a fleet holds: on a Unix socket, ended with its stdin, with any number of
instances, telling what happens."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvmig.engines.toy.script import ScriptFile, ToyScript
from kvmig_tools.patience import SERVER_PATIENCE_S

pytestmark = pytest.mark.server


class OnSocket:
    """`kvmig.serve --engine toy --uds`, held by its stdin."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.path = folder / "front.sock"
        self.script = ScriptFile(str(folder / "script"))
        self.log = folder / "log"
        command = [
            sys.executable, "-m", "kvmig.serve", "toy", "--engine=toy", "--end-with-stdin",
            f"--script={folder / 'script'}", f"--uds={self.path}", *flags,
        ]  # fmt: skip
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)

    def client(self) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(uds=str(self.path), retries=0)
        return httpx.AsyncClient(
            transport=transport, base_url="http://here", timeout=SERVER_PATIENCE_S
        )

    async def ready(self) -> None:
        async with self.client() as client, asyncio.timeout(SERVER_PATIENCE_S):
            while self.process.poll() is None:
                try:
                    if (await client.get("/health")).status_code == 200:
                        return
                except httpx.TransportError:  # it doesn't listen yet
                    await asyncio.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def stop(self) -> int:
        """End its stdin; its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(SERVER_PATIENCE_S)


@asynccontextmanager
async def held(folder: Path, *flags: str) -> AsyncIterator[OnSocket]:
    """One that is ready; it is ended in any case."""
    server = OnSocket(folder, *flags)
    try:
        await server.ready()
        yield server
    finally:
        server.stop()


def ask(tokens: int) -> dict[str, Any]:
    return {"model": "toy", "prompt": "Count: 0017 0018", "max_tokens": tokens, "temperature": 0}


async def events(server: OnSocket) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """What it tells, from now on."""
    async with server.client() as client, client.stream("GET", "/kvmig/v1/events") as answer:
        name = ""
        async for line in answer.aiter_lines():
            field, _, value = line.partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                yield name, json.loads(value)


def states(told: dict[str, Any]) -> dict[str, str]:
    return {one["id"]: one["state"] for one in told["data"]}


async def test_it_answers_at_a_socket_of_its_user_alone(tmp_path: Path) -> None:
    async with held(tmp_path, "--instances=1") as server, server.client() as client:
        answer = await client.post("/v1/completions", json=ask(10))
        admin = await client.get("/kvmig/v1/instances")
        spoken_for = await client.get(
            "/kvmig/v1/instances", headers={"x-forwarded-for": "192.0.2.1"}
        )

        assert answer.json()["choices"][0]["text"] == " 0019 0020"
        assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
        assert [row["state"] for row in admin.json()["data"]] == ["serving"]
        assert spoken_for.status_code == 403
        assert f"serving toy on unix:{server.path}" in server.log.read_text()


async def test_the_end_of_its_stdin_ends_it_and_unlinks_the_socket(tmp_path: Path) -> None:
    async with held(tmp_path, "--instances=1") as server:
        assert await asyncio.to_thread(server.stop) == 0
    assert not server.path.exists()


async def test_a_socket_that_somebody_listens_on_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "front.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        server = OnSocket(tmp_path)
        assert await asyncio.to_thread(server.stop) == 2
    assert f"--uds {path} can't be used" in server.log.read_text()


async def test_a_socket_that_nobody_listens_on_is_taken_over(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(tmp_path / "front.sock"))
    async with held(tmp_path, "--instances=1") as server, server.client() as client:
        assert (await client.get("/health")).status_code == 200


async def test_it_tells_of_instances_and_of_moves_as_they_happen(tmp_path: Path) -> None:
    async with held(tmp_path, "--instances=1", "--no-migration") as server:
        told = events(server)
        name, first = await anext(told)
        async with server.client() as client:
            added = await client.post("/kvmig/v1/instances", json={})
            came = [states(data) async for name, data in until_serving(told, 2)]

    assert (name, states(first)) == ("instances", {"i0": "serving"})
    assert added.status_code == 201
    assert came[-1] == {"i0": "serving", "i1": "serving"}


async def until_serving(
    told: AsyncIterator[tuple[str, dict[str, Any]]], count: int
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """What is told until so many serve."""
    async with asyncio.timeout(SERVER_PATIENCE_S):
        async for name, data in told:
            yield name, data
            if name == "instances" and list(states(data).values()) == ["serving"] * count:
                return


async def test_the_last_instance_leaves_when_it_is_empty_and_another_may_come(
    tmp_path: Path,
) -> None:
    async with held(tmp_path, "--instances=1") as server, server.client() as client:
        server.script.write(ToyScript(hold=5))
        running = asyncio.create_task(client.post("/v1/completions", json=ask(10)))
        refused = await client.delete("/kvmig/v1/instances/i0")
        await until_live(server, 1)
        leaving = await client.delete("/kvmig/v1/instances/i0", params={"last": True})
        serving = await client.get("/kvmig/v1/instances")
        later = asyncio.create_task(client.post("/v1/completions", json=ask(10)))
        await until_live(server, 2)
        server.script.write(ToyScript())
        answers = [(await one).json()["choices"][0]["text"] for one in (running, later)]
        await until_rows(client, [])
        vacant = await client.post("/v1/completions", json=ask(10))
        ready, live = await client.get("/health"), await client.get("/live")
        await client.post("/kvmig/v1/instances", json={})
        await until_rows(client, ["serving"])
        again = await client.post("/v1/completions", json=ask(10))

    assert refused.status_code == 409
    assert leaving.status_code == 202
    assert [row["state"] for row in serving.json()["data"]] == ["serving"]
    assert answers == [" 0019 0020"] * 2
    assert vacant.status_code == ready.status_code == 503
    assert ready.json() == vacant.json()
    assert live.status_code == 200
    assert again.json()["choices"][0]["text"] == " 0019 0020"


async def until_live(server: OnSocket, count: int) -> None:
    async with asyncio.timeout(SERVER_PATIENCE_S):
        async for name, data in events(server):
            if name == "instances" and data["live"] == count:
                return


async def until_rows(client: httpx.AsyncClient, wanted: list[str]) -> None:
    rows: list[str] | None = None
    async with asyncio.timeout(SERVER_PATIENCE_S):
        while rows != wanted:
            await asyncio.sleep(0.05)
            told = (await client.get("/kvmig/v1/instances")).json()["data"]
            rows = [row["state"] for row in told]
