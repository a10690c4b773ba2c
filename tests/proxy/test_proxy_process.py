"""A proxy as a process: started as by init, alone with its file, ended."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import msgspec
import pytest

from kvmig.process.supervisor import ChildProcess, ProcessPort
from kvmig.proxy.control_link import ProxyLinks
from kvmig.proxy.messages import (
    FleetSnapshot,
    ModelRoute,
    ModelWanted,
    ProxyDemand,
    ProxyLaunch,
    ProxyMetrics,
)
from tests.support.certificates import BOTH, Authority
from tests.support.proxy_site import EVENT, PEPPER, Answer, Deployment, Got, key, says_ok
from tests.support.waiting import until

START_S = 30.0


@asynccontextmanager
async def proxy(
    folder: Path, files: str = "hard", authority: Authority | None = None
) -> AsyncIterator[tuple[ChildProcess, httpx.AsyncClient]]:
    """files: how many it may have open. authority: signs its certificate; None: it has none."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port, descriptor = listening.getsockname()[1], listening.fileno()
        launch = ProxyLaunch(
            name="p0", links=str(folder / "links"), api=str(folder / "api"),
            snapshot=str(folder / "snapshot"), pepper=str(folder / "pepper"),
            shutdown_timeout_s=20.0,
            certificate=None if authority is None else authority.write(folder),
        )  # fmt: skip
        beats = os.open(os.devnull, os.O_WRONLY)

        async def spawn(stdin: int, announced: int) -> ProcessPort:
            passed = announced, descriptor, beats
            words = sys.executable, "-m", "kvmig.proxy", *map(str, passed)
            limited = "sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *words
            return await asyncio.create_subprocess_exec(*limited, stdin=stdin, pass_fds=passed)

        child = await ChildProcess.start("proxy", spawn, launch)
        os.close(beats)
    try:
        assert await child.ready(START_S) == "shared"
        base, trust = f"http://127.0.0.1:{port}", None
        if authority is not None:
            base, trust = f"https://127.0.0.1:{port}", authority.trusting()
        async with httpx.AsyncClient(base_url=base, timeout=30, verify=trust or True) as client:
            yield child, client
    finally:
        await child.stop()


def knowing(folder: Path, *, older: bool = False) -> str:
    """What a proxy in the folder knows of a model that is ready; a key that opens it.

    older: as a kvmig kept it that had the pepper in the same file.
    """
    given, grant = key()
    route = ModelRoute(name="count", state="ready", socket=str(folder / "count"))
    known = FleetSnapshot(
        version=3, pepper=PEPPER if older else b"", keys=(grant,), routes=(route,)
    )
    if not older:
        (folder / "pepper").write_bytes(PEPPER)
    (folder / "snapshot").write_bytes(msgspec.msgpack.encode(known))
    return f"Bearer {given}"


@asynccontextmanager
async def alone(
    folder: Path,
    answer: Answer = says_ok,
    *,
    files: str = "hard",
    older: bool = False,
    authority: Authority | None = None,
) -> AsyncIterator[tuple[Deployment, ChildProcess, httpx.AsyncClient]]:
    """A proxy with its file in place of a server, a model that is ready, a client with a key."""
    bearer, there = knowing(folder, older=older), Deployment(str(folder / "count"), answer)
    await there.open()
    try:
        async with proxy(folder, files, authority) as (child, client):
            client.headers["authorization"] = bearer
            yield there, child, client
    finally:
        await there.close()


def streaming(go_on: asyncio.Event) -> Answer:
    """Two events, the second one once it may."""

    async def streams(got: Got) -> None:
        got.events()
        got.chunk()
        await go_on.wait()
        got.chunk()
        got.last()

    return streams


async def served_anew(
    client: httpx.AsyncClient, authority: Authority | None = None
) -> httpx.Response:
    """On a new connection, as soon as there may be one more."""
    trust = True if authority is None else authority.trusting()
    async with asyncio.timeout(START_S):
        while True:
            async with httpx.AsyncClient(
                base_url=client.base_url, headers=client.headers, verify=trust
            ) as new:
                with suppress(httpx.TransportError):
                    return await new.post("/v1/completions", json={"model": "count"})
            await asyncio.sleep(0.02)


async def until_refused(client: httpx.AsyncClient) -> None:
    """Until new connections aren't taken."""
    while True:
        try:
            await client.get("/health")
        except httpx.ConnectError:
            return
        except (httpx.NetworkError, httpx.RemoteProtocolError):
            pass  # it came while the proxy stopped listening, or on a connection that was idle
        await asyncio.sleep(0.02)


async def test_a_proxy_serves_what_the_server_tells_and_says_what_there_is_to_do(
    tmp_path: Path,
) -> None:
    given, grant = key()
    heard: list[ModelWanted | ProxyDemand | ProxyMetrics | None] = []
    routes = (
        ModelRoute(name="count", state="ready", socket=str(tmp_path / "count")),
        ModelRoute(name="cold", state="cold", start_timeout_s=1.0),
    )
    links = ProxyLinks(
        str(tmp_path / "links"),
        lambda: [FleetSnapshot(version=7, pepper=PEPPER, keys=(grant,), routes=routes)],
        lambda _, message: heard.append(message),
    )
    there = Deployment(str(tmp_path / "count"))
    await links.open()
    await there.open()
    try:
        async with proxy(tmp_path) as (_, client):
            await until(lambda: any(isinstance(one, ProxyDemand) for one in heard))
            client.headers["authorization"] = f"Bearer {given}"
            warm = await client.post("/v1/completions", json={"model": "count"})
            cold = await client.post("/v1/completions", json={"model": "cold"})
    finally:
        await links.close()
        await there.close()
    demands = [one for one in heard if isinstance(one, ProxyDemand)]
    assert (warm.status_code, cold.status_code) == (200, 503)
    assert {one.version for one in demands} == {7}
    assert sum(model.arrivals for one in demands for model in one.models) == 2
    waited = [model for one in demands for model in one.models if model.model == "cold"]
    assert 0.4 < sum(one.request_s for one in waited) <= 1.5
    assert ModelWanted("cold") in heard


async def test_a_proxy_with_all_the_clients_that_its_files_are_for_says_so_to_the_next(
    tmp_path: Path,
) -> None:
    go_on = asyncio.Event()
    async with alone(tmp_path, streaming(go_on), files="200") as (there, _, client):
        calls = [client.post("/v1/completions", json={"model": "count"}) for _ in range(72)]
        asked = [asyncio.create_task(one) for one in calls]
        await until(lambda: len(there.got) + sum(map(asyncio.Task.done, asked)) == len(asked))
        refused = [one for one in asked if one.done()]
        go_on.set()
        answers = await asyncio.gather(*asked)
        after = await client.post("/v1/completions", json={"model": "count"})
    streamed = [one for one in answers if one.status_code == 200]
    assert len(streamed) == 67, (
        "two files a client, a quarter of all for the rest; then the last tenth of clients"
    )
    assert all(one.content == EVENT * 2 for one in streamed)
    assert [one.result().status_code for one in refused] == [503] * 5
    told = refused[0].result()
    assert told.json()["error"] == {
        "message": "this proxy has as many clients as its open files are for (ulimit -Hn)",
        "type": "api_error",
        "param": None,
        "code": "proxy_full",
    }
    assert (told.headers["retry-after"], told.headers["connection"]) == ("1", "close")
    assert after.status_code == 200


@BOTH
async def test_idle_clients_take_no_files_from_the_calls_of_those_that_were_there(
    tmp_path: Path, authority: Authority | None
) -> None:
    async with alone(tmp_path, files="200", authority=authority) as (_, _, client):
        before = await client.post("/v1/completions", json={"model": "count"})  # and connected
        address = "127.0.0.1", client.base_url.port
        idle = [await asyncio.open_connection(*address) for _ in range(300)]
        closed = [asyncio.create_task(reader.read()) for reader, _ in idle]
        await until(lambda: sum(map(asyncio.Task.done, closed)) >= 100)
        # Idle ones are closed after HEAD_S, 20 s, or HANDSHAKE_S, 10 s.
        during = await client.post("/v1/completions", json={"model": "count"}, timeout=5)
        for _, writer in idle:
            writer.close()
        await asyncio.gather(*closed, return_exceptions=True)
        after = await served_anew(client, authority)
    assert [one.status_code for one in (before, during, after)] == [200] * 3


async def serial_number(client: httpx.AsyncClient, authority: Authority) -> str:
    """The number of the certificate that a new connection is shown."""
    port, trust = client.base_url.port, authority.trusting()
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
    shown = writer.get_extra_info("ssl_object").getpeercert()
    writer.close()
    return str(shown["serialNumber"])


async def test_a_changed_certificate_is_shown_to_the_next_client_while_streams_go_on(
    tmp_path: Path,
) -> None:
    go_on, authority = asyncio.Event(), Authority.make()
    async with alone(tmp_path, streaming(go_on), authority=authority) as (_, _, client):
        body = {"model": "count", "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            parts = answer.aiter_bytes()
            first = await anext(parts)
            before = await serial_number(client, authority)
            authority.write(tmp_path)
            async with asyncio.timeout(START_S):
                while await serial_number(client, authority) == before:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            go_on.set()
            rest = b"".join([part async for part in parts])
    assert first + rest == EVENT * 2


async def test_a_proxy_keeps_what_it_was_told_for_its_own_user_only(tmp_path: Path) -> None:
    links = ProxyLinks(
        str(tmp_path / "links"),
        lambda: [FleetSnapshot(version=7, pepper=PEPPER)],
        lambda _, message: None,
    )
    file = tmp_path / "snapshot"
    await links.open()
    try:
        async with proxy(tmp_path):
            await until(file.exists)
    finally:
        await links.close()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    known = msgspec.msgpack.decode(file.read_bytes(), type=FleetSnapshot)
    assert (known.version, known.pepper) == (7, b"")
    assert PEPPER not in file.read_bytes()


@pytest.mark.parametrize("older", [False, True])
async def test_a_proxy_that_begins_alone_knows_the_keys_and_those_of_an_older_file(
    tmp_path: Path, older: bool
) -> None:
    async with alone(tmp_path, older=older) as (_, _, client):
        answer = await client.post("/v1/completions", json={"model": "count"})
    assert answer.status_code == 200


async def test_a_proxy_that_is_told_to_end_finishes_its_streams_and_takes_no_more(
    tmp_path: Path,
) -> None:
    go_on = asyncio.Event()
    async with alone(tmp_path, streaming(go_on)) as (_, child, client):
        body = {"model": "count", "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            parts = answer.aiter_bytes()
            first = await anext(parts)
            child.terminate()
            await until_refused(client)
            go_on.set()
            rest = b"".join([part async for part in parts])
        ended = await asyncio.wait_for(child.ended(), 10)
    assert first + rest == EVENT * 2
    assert ended == "exit code 0"
