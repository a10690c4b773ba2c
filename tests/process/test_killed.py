"""A killed process that does not go, as one that waits for a driver: no wait for it has no end."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvmig.command.server_process import ServerProcess
from kvmig.core import killed
from kvmig.core.background import cancel_tasks
from kvmig.fleet import cluster_watch
from kvmig.fleet import supervisor as fleet_supervisor
from kvmig.fleet.cluster_watch import ClusterWatch
from kvmig.fleet.fetcher_child import FetcherChild
from kvmig.launcher.fork_servers import end_now
from kvmig.launcher.node_files import ClusterWish
from kvmig.process.child import StartAnnouncement
from kvmig.process.fork_server import ForkServerClient
from kvmig.process.supervisor import ChildProcess, HeartbeatPipe

PATIENCE_S = 5.0


class LastingProcess:
    """A process that is its group's only one, and whose end nobody sees."""

    returncode = None

    def __init__(self) -> None:
        self._process = subprocess.Popen(["sleep", "600"], process_group=0)
        self.pid = self._process.pid

    async def wait(self) -> int:
        await asyncio.Event().wait()
        raise AssertionError

    @property
    def stdin(self) -> SimpleNamespace:
        return SimpleNamespace(close=lambda: None, write=lambda _: None)

    @property
    def stdout(self) -> asyncio.StreamReader:
        return asyncio.StreamReader()

    def terminate(self) -> None: ...
    def kill(self) -> None: ...

    def reap(self) -> None:
        """Let it go after all."""
        self._process.kill()
        self._process.wait(PATIENCE_S)


@pytest.fixture
def lasting(monkeypatch: pytest.MonkeyPatch) -> Iterator[LastingProcess]:
    monkeypatch.setattr(killed, "KILLED_S", 0.05)
    process = LastingProcess()
    yield process
    process.reap()


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def named(caplog: pytest.LogCaptureFixture, name: str, pid: int) -> bool:
    return f"{name} (process {pid}) is there still, 0.05 s after it was killed" in caplog.text


async def test_the_stop_of_a_child_that_stays_frees_what_is_ours(
    lasting: LastingProcess, caplog: pytest.LogCaptureFixture
) -> None:
    async def spawn(stdin: int, announced: int) -> LastingProcess:
        os.write(announced, b'{"endpoint": "here"}\n')
        return lasting

    before = open_files()
    child = await ChildProcess.start("llumlet i3", spawn, StartAnnouncement())
    async with asyncio.timeout(PATIENCE_S):
        assert await child.ready(PATIENCE_S) == "here"
        await child.stop(0.01)
    assert named(caplog, "llumlet i3", lasting.pid)
    assert open_files() == before


async def test_a_nursery_that_stays_is_named(
    lasting: LastingProcess, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await end_now(lasting, "the fork server of toy")
    assert named(caplog, "the fork server of toy", lasting.pid)


async def test_a_guard_that_stays_is_named(
    lasting: LastingProcess, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmig.command.server_process.STOP_S", 0.0)
    monkeypatch.setattr("kvmig.command.server_process.GRACE_S", 0.01)
    server: Any = ServerProcess(lasting, -1, 0)  # type: ignore[arg-type]
    async with asyncio.timeout(PATIENCE_S):
        await server.stop()
    assert named(caplog, "the guard of a server", lasting.pid)


async def test_a_deployment_that_hangs_and_stays_ends_for_the_server(
    lasting: LastingProcess, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_supervisor, "HANG_S", 0.01)
    heartbeats = HeartbeatPipe()
    os.write(heartbeats.descriptor, b".")
    try:
        async with asyncio.timeout(PATIENCE_S):
            how = await fleet_supervisor.lives(lasting, heartbeats, "deployment a-1")
    finally:
        heartbeats.close()
    assert how == "no heartbeat for 0.01 s; it waits"
    assert named(caplog, "deployment a-1", lasting.pid)


async def test_a_fork_server_that_stays_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def wait(timeout: float | None = None) -> int:
        assert timeout is not None, "it waits without an end"
        raise subprocess.TimeoutExpired("a", timeout)

    process: Any = SimpleNamespace(pid=7, kill=lambda: None, wait=wait)
    ours, theirs = socket.socketpair()
    with theirs:
        ForkServerClient(ours, process).close()
    assert "the fork server (process 7) is there still, 10 s after it was killed" in caplog.text


async def test_a_fetcher_that_its_disk_keeps_is_named(
    lasting: LastingProcess, caplog: pytest.LogCaptureFixture
) -> None:
    child = FetcherChild(lasting)  # type: ignore[arg-type]
    async with asyncio.timeout(2 * PATIENCE_S):
        await child.end()
    assert named(caplog, "a fetcher of models' files", lasting.pid)


async def test_a_watch_of_a_cluster_ends_though_its_process_stays(
    lasting: LastingProcess, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is to lead no more waits for that end."""

    async def begin(*_: object, **__: object) -> LastingProcess:
        return lasting

    monkeypatch.setattr(asyncio, "create_subprocess_exec", begin)
    for name in ("END_S", "AGAIN_S"):
        monkeypatch.setattr(cluster_watch, name, 0.01)
    watching = asyncio.create_task(ClusterWatch("auto", lambda _: None, ClusterWish).run())
    await asyncio.sleep(0.01)
    async with asyncio.timeout(PATIENCE_S):
        await cancel_tasks(watching)
    assert watching.cancelled()
    assert named(caplog, "the process that watches the cluster", lasting.pid)
