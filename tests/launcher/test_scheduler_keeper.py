"""Who keeps the scheduler running, on one that is only made up."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvmig.controlplane.messages import (
    ClusterMember,
    ClusterMessage,
    Members,
    MessagesRefused,
    ScaleInstances,
)
from kvmig.controlplane.scheduler_process import SchedulerLaunch
from kvmig.core.background import cancel_tasks
from kvmig.core.config import ClusterConfig
from kvmig.core.errors import StartupError
from kvmig.launcher import scheduler
from kvmig.launcher.scheduler import SchedulerKeeper
from kvmig.process import kept_child
from kvmig.process.supervisor import ChildProcess
from kvmig.rpc.codec import RefusalCounter
from kvmig.rpc.zmq_sockets import RpcServer
from tests.support.waiting import until

SECRET = b"a secret of 16 b"


class FakeCluster:
    """One instance."""

    whose = ""

    def __init__(self) -> None:
        self.on_change: list[Any] = []
        self.refusals = RefusalCounter()
        self.scheduler_refusals: dict[str, int] = {}

    def members(self) -> list[ClusterMember]:
        return [ClusterMember("i0", "tcp://i0")]


class FakeChild:
    """A process that never ends by itself."""

    pid = 0

    def __init__(self) -> None:
        self.server = RpcServer(SECRET, "scheduler", "scheduler", ClusterMessage)
        self.stopped = False

    async def ready(self, timeout_s: float) -> str:
        return self.server.endpoint

    async def ended(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def stop(self, timeout_s: float) -> None:
        self.stopped = True
        self.server.close()

    async def told(self) -> Members:
        while not isinstance(message := (await self.server.recv())[1], Members):
            pass
        return message


@asynccontextmanager
async def kept(cluster: FakeCluster) -> AsyncIterator[None]:
    """A scheduler is kept for the cluster, for 20 s at the most."""
    keeper = SchedulerKeeper(ClusterConfig(), SECRET, cluster)  # type: ignore[arg-type]
    keeping = asyncio.create_task(keeper.run())
    async with asyncio.timeout(20):
        yield
    await cancel_tasks(keeping)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[FakeChild]:
    """The processes that were started."""
    started: list[FakeChild] = []

    async def start(*_: object) -> FakeChild:
        started.append(FakeChild())
        return started[-1]

    monkeypatch.setattr(ChildProcess, "start", start)
    monkeypatch.setattr(scheduler, "GRACE_S", 0.01)
    return started


async def test_a_scheduler_that_lives_without_its_connection_gives_way_to_another(
    children: list[FakeChild],
) -> None:
    cluster = FakeCluster()
    async with kept(cluster):
        await until(lambda: children)
        await children[0].told()
        children[0].server.send(b"launcher", MessagesRefused("scheduler", {"early": 1}))
        await until(lambda: cluster.scheduler_refusals == {"early": 1})
        children[0].server.close()
        await until(lambda: len(children) == 2)
        assert children[0].stopped
        assert [one.instance for one in (await children[1].told()).members] == ["i0"]
        assert cluster.scheduler_refusals == {}, "the other one has refused nothing yet"
    assert children[1].stopped


async def test_while_no_scheduler_is_there_nothing_is_said_of_what_it_has_refused(
    children: list[FakeChild], monkeypatch: pytest.MonkeyPatch
) -> None:
    start_one = ChildProcess.start

    async def start(*given: Any) -> ChildProcess:
        if children:
            raise StartupError("no process can be started")
        return await start_one(*given)

    monkeypatch.setattr(ChildProcess, "start", start)
    cluster = FakeCluster()
    async with kept(cluster):
        await until(lambda: children)
        await children[0].told()
        children[0].server.send(b"launcher", MessagesRefused("scheduler", {"early": 1}))
        await until(lambda: cluster.scheduler_refusals)
        children[0].server.close()
        await until(lambda: not cluster.scheduler_refusals)


async def test_a_scheduler_that_hangs_gives_way_to_another(
    children: list[FakeChild], monkeypatch: pytest.MonkeyPatch
) -> None:
    start_one = ChildProcess.start

    async def start(name: str, spawn: Any, launch: SchedulerLaunch) -> ChildProcess:
        os.write(launch.heartbeat, b".")  # and never again
        return await start_one(name, spawn, launch)

    monkeypatch.setattr(ChildProcess, "start", start)
    monkeypatch.setattr(kept_child, "HEARTBEAT_TIMEOUT_S", 0.2)
    async with kept(FakeCluster()):
        await until(lambda: len(children) == 2)
        assert children[0].stopped


async def test_a_decision_that_the_launcher_fails_at_does_not_end_its_keeping(
    children: list[FakeChild],
) -> None:
    class FailingCluster(FakeCluster):
        def scale(self, order: ScaleInstances) -> None:
            raise RuntimeError("out of luck")

    async with kept(FailingCluster()):
        await until(lambda: children)
        await children[0].told()
        children[0].server.send(b"launcher", ScaleInstances(add=1))
        await until(lambda: len(children) == 2)
    assert all(one.stopped for one in children)
