"""Who keeps the scheduler running, on one that is only made up."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from kvmig.controlplane.messages import (
    ClusterMember,
    ClusterMessage,
    Members,
    MessagesRefused,
    Scale,
)
from kvmig.controlplane.scheduler_process import SchedulerLaunch
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


async def test_a_scheduler_that_lives_without_its_connection_gives_way_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    children: list[FakeChild] = []

    async def start(*_: object) -> FakeChild:
        children.append(FakeChild())
        return children[-1]

    monkeypatch.setattr(ChildProcess, "start", start)
    monkeypatch.setattr(scheduler, "GRACE_S", 0.01)
    cluster = FakeCluster()
    keeper = SchedulerKeeper(ClusterConfig(), SECRET, cluster)  # type: ignore[arg-type]
    keeping = asyncio.create_task(keeper.run())
    async with asyncio.timeout(20):
        await until(lambda: children)
        await children[0].told()
        children[0].server.send(b"launcher", MessagesRefused("scheduler", {"early": 1}))
        await until(lambda: cluster.scheduler_refusals == {"early": 1})
        children[0].server.close()
        await until(lambda: len(children) == 2)
        assert children[0].stopped
        assert [one.instance for one in (await children[1].told()).members] == ["i0"]
        assert cluster.scheduler_refusals == {}, "the other one has refused nothing yet"
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    assert children[1].stopped


async def test_while_no_scheduler_is_there_nothing_is_said_of_what_it_has_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    children: list[FakeChild] = []

    async def start(*_: object) -> FakeChild:
        if children:
            raise StartupError("no process can be started")
        children.append(FakeChild())
        return children[0]

    monkeypatch.setattr(ChildProcess, "start", start)
    monkeypatch.setattr(scheduler, "GRACE_S", 0.01)
    cluster = FakeCluster()
    keeper = SchedulerKeeper(ClusterConfig(), SECRET, cluster)  # type: ignore[arg-type]
    keeping = asyncio.create_task(keeper.run())
    async with asyncio.timeout(20):
        await until(lambda: children)
        await children[0].told()
        children[0].server.send(b"launcher", MessagesRefused("scheduler", {"early": 1}))
        await until(lambda: cluster.scheduler_refusals)
        children[0].server.close()
        await until(lambda: not cluster.scheduler_refusals)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_a_scheduler_that_hangs_gives_way_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[FakeChild] = []

    async def start(_name: str, _spawn: object, launch: SchedulerLaunch) -> FakeChild:
        os.write(launch.heartbeat, b".")  # and never again
        children.append(FakeChild())
        return children[-1]

    monkeypatch.setattr(ChildProcess, "start", start)
    monkeypatch.setattr(kept_child, "HEARTBEAT_TIMEOUT_S", 0.2)
    keeper = SchedulerKeeper(ClusterConfig(), SECRET, FakeCluster())  # type: ignore[arg-type]
    keeping = asyncio.create_task(keeper.run())
    async with asyncio.timeout(20):
        await until(lambda: len(children) == 2)
    assert children[0].stopped
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_a_decision_that_the_launcher_fails_at_does_not_end_its_keeping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    children: list[FakeChild] = []

    async def start(*_: object) -> FakeChild:
        children.append(FakeChild())
        return children[-1]

    class FailingCluster(FakeCluster):
        def scale(self, order: Scale) -> None:
            raise RuntimeError("out of luck")

    monkeypatch.setattr(ChildProcess, "start", start)
    keeper = SchedulerKeeper(ClusterConfig(), SECRET, FailingCluster())  # type: ignore[arg-type]
    keeping = asyncio.create_task(keeper.run())
    async with asyncio.timeout(20):
        await until(lambda: children)
        await children[0].told()
        children[0].server.send(b"launcher", Scale(add=1))
        await until(lambda: len(children) == 2)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    assert all(one.stopped for one in children)
