"""A cluster whose launcher makes up its processes, over real sockets."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from unittest import mock

import zmq

from kvmig.controlplane.messages import (
    ClusterMember,
    ClusterMessage,
    DrainInstance,
    EvacuateInstance,
    LoadReport,
    Members,
    MessagesRefused,
    SetState,
)
from kvmig.core.background import cancel_tasks
from kvmig.core.config import ClusterConfig, LifecycleConfig, RayConfig, UnitConfig
from kvmig.core.errors import ConfigError, StartupError, TransportError
from kvmig.engines.base import EngineLoad
from kvmig.frontend.launcher_link import LauncherLink, News
from kvmig.launcher import cluster, instance
from kvmig.launcher.cluster import InstanceManager
from kvmig.launcher.control import ControlServer
from kvmig.launcher.launch import LlumletLaunch, PlannedInstance
from kvmig.launcher.shapes import InstanceShape, InstanceShapes
from kvmig.process.supervisor import ProcessHandle
from kvmig.rpc.messages import Hello
from kvmig.rpc.zmq_sockets import RpcServer
from kvmig.sharing.messages import InUnit
from tests.support.inside import instance_of, report_of, socket_of
from tests.support.waiting import PATIENCE_S, until

SECRET = b"a secret of the cluster"
IDLE = EngineLoad(100, 0, 0, 0, 0, 0)
BUSY = EngineLoad(100, 20, 2, 0, 0, 0)


class Process:
    """A `ProcessHandle`: a llumlet's socket that reports `load`, in the state that it is told."""

    pid = 0

    def __init__(self, launch: LlumletLaunch, broken: str, weights: str) -> None:
        self.launch = launch
        self.load = IDLE
        self.untold = 0
        self.shared: InUnit | None = None
        self.state = "serving"
        self.silent = False
        self.stopped = False
        self.may_stop = asyncio.Event()
        self.may_stop.set()
        self.weights = weights
        self._broken = broken
        self._died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._server = RpcServer(SECRET, "llumlet", launch.instance, ClusterMessage)
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        listener, seq = b"", 0
        receiving = asyncio.ensure_future(self._server.recv())
        while True:
            done, _ = await asyncio.wait([receiving], timeout=0.01)
            if done:
                sender, message, _ = receiving.result()
                if isinstance(message, Hello):
                    listener = sender
                elif isinstance(message, SetState):
                    self.state = message.state
                receiving = asyncio.ensure_future(self._server.recv())
            seq += 1
            if self.silent:
                continue
            with suppress(TransportError):
                name = self.launch.instance
                report = LoadReport(
                    name, seq, self.load, 0, 0, state=self.state, weights=self.weights,
                    untold=self.untold, shared=self.shared,
                )  # fmt: skip
                self._server.send(listener, report)

    async def send(self, data: bytes) -> None:
        """To the launcher, once it is connected."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    await socket_of(self._server).send_multipart([b"launcher", data])
                    return
                except zmq.ZMQError as error:
                    if error.errno != zmq.EHOSTUNREACH:
                        raise
                await asyncio.sleep(0.01)

    def die(self, how: str = "killed by SIGKILL") -> None:
        self._died.set_result(how)

    async def ready(self, timeout_s: float) -> str:
        if self._broken:
            raise StartupError(f"instance {self.launch.instance}: {self._broken}")
        return self._server.endpoint

    async def ended(self) -> str:
        return await asyncio.shield(self._died)

    async def stop(self, timeout_s: float = 5.0) -> None:
        await self.may_stop.wait()
        self.stopped = True
        await cancel_tasks(self._task)
        self._server.close()


class FakeLauncher:
    """broken: why the next processes can't start; starts: all that were ever started."""

    def __init__(self) -> None:
        self.starts: list[Process] = []
        self.broken = ""
        self.bug: Exception | None = None
        self.closed = False
        self.renewals = 0
        self.loaded = asyncio.Event()
        """What the last renewal began."""
        self.loaded.set()
        self.tree = ""
        """Of the last renewal."""
        self.bad_tree = ""
        """Nothing starts on it."""
        self.bad_flag = ""
        """Nor with it."""
        self.weights = "old"
        """On disk."""
        self.look: Callable[[], str] = lambda: self.weights

    def check_room(self, instances: Sequence[PlannedInstance], gpus: Sequence[str]) -> None:
        """Takes any."""

    def renew(self, tree: str) -> None:
        self.renewals += 1
        self.tree = tree

    async def renewed(self) -> None:
        await self.loaded.wait()

    async def open(self) -> None:
        return

    async def llumlet(self, launch: LlumletLaunch, workers: int) -> ProcessHandle:
        if self.bug is not None:
            raise self.bug
        bad = self.bad_tree and launch.engine_tree == self.bad_tree
        bad = bad or self.bad_flag in launch.engine_argv
        broken = "no such name" if bad else ""
        self.starts.append(Process(launch, broken or self.broken, self.weights))
        return self.starts[-1]

    async def close(self) -> None:
        self.closed = True

    def process(self, name: str) -> Process:
        """The last one of that name."""
        return [one for one in self.starts if one.launch.instance == name][-1]


class Told:
    """What a front end hears."""

    def __init__(self) -> None:
        self.members: list[ClusterMember] = []
        self.evacuated: list[str] = []
        self.ended: list[bool] = []
        self.preferred = ""
        self.history: list[dict[str, str]] = []
        self.refusals: dict[str, dict[str, int]] = {}

    def hear(self, news: News) -> None:
        match news:
            case Members():
                self.members, self.preferred = news.members, news.weights
                self.history.append(self.states())
            case EvacuateInstance():
                self.evacuated.append(news.instance)
                self.ended.append(news.ends)
            case MessagesRefused():
                self.refusals[news.process] = news.counts

    def states(self) -> dict[str, str]:
        return {one.instance: one.state for one in self.members}


class World:
    """A cluster with its control socket and one front end."""

    def __init__(
        self,
        lifecycle: LifecycleConfig,
        shares: tuple[int, int] | None = None,
        ray: RayConfig | None = None,
    ) -> None:
        def parse(argv: list[str]) -> Namespace:
            if "--bug" in argv:
                raise KeyError("bug")
            if "--bad" in argv:
                raise ConfigError("unrecognized arguments: --bad")
            size = int(argv[-1]) if "--block-size" in argv else None
            return Namespace(tensor_parallel_size=1, block_size=size)

        self.launcher = FakeLauncher()
        self.said: list[str] = []
        unit = UnitConfig(path="unit", guarantee=400, model="m", shares=shares)
        config = ClusterConfig(lifecycle=lifecycle, unit=unit, ray=ray)

        def check_tree(folder: str) -> str:
            if folder != "/new":
                raise ConfigError(f"{folder!r} holds no vLLM")
            return "0.33.0"

        started = [InstanceShape()] * 2
        shapes = InstanceShapes(["MODEL"], {}, started, 0, parse, check_tree=check_tree)
        self.cluster = InstanceManager(
            "test",
            config,
            SECRET,
            shapes,
            self.launcher,
            lambda argv: self.launcher.look(),
            {"i1": "east"},
        )
        self.control = ControlServer(self.cluster, SECRET, "127.0.0.1")
        self.front = Told()
        self.link = LauncherLink(self.control.endpoint, SECRET, "front-1", self.front.hear)

    async def hears(self, **states: str) -> None:
        await until(lambda: self.front.states() == states)


@asynccontextmanager
async def world(
    shares: tuple[int, int] | None = None, ray: RayConfig | None = None, **lifecycle: float
) -> AsyncIterator[World]:
    """i0 and i1 serve; at the end no process is left. shares: of their unit."""
    it = World(LifecycleConfig(**lifecycle), shares, ray)  # type: ignore[arg-type]
    try:
        with (
            mock.patch.object(cluster, "say", it.said.append),
            mock.patch.object(instance, "say", it.said.append),
        ):
            await it.cluster.start()
            it.control.open()
            await it.hears(i0="serving", i1="serving")
            yield it
    finally:
        await it.link.close()
        await it.control.close()
        await it.cluster.stop()
        assert all(process.stopped for process in it.launcher.starts)
        assert it.launcher.closed


def drain(name: str, **more: object) -> Callable[[int], DrainInstance]:
    return lambda call_id: DrainInstance(call_id, name, **more)  # type: ignore[arg-type]


async def asks(it: World, name: str, size: int) -> None:
    """It was told to ask for that guarantee, and its launcher has heard so."""
    shared = InUnit(0, 0, 0, 0.0, connected=True, asked=size)
    it.launcher.process(name).shared = shared

    def heard() -> bool:
        report = report_of(instance_of(it.cluster, name))
        return report is not None and report.shared == shared

    await until(heard)


def guarantee(process: Process) -> int:
    unit = process.launch.config.unit
    assert unit is not None
    return unit.guarantee
