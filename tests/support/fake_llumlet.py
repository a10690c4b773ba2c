"""A llumlet without an engine: a real control socket, and outputs as the test wants them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from kvmig.controlplane.messages import (
    ClusterMessage,
    ListedRequests,
    ListRequests,
    LoadReport,
    Migrate,
    Migrated,
    Outputs,
    OutputSpan,
    Welcome,
)
from kvmig.core.background import cancel_tasks
from kvmig.core.clock import TimeSource, monotonic
from kvmig.core.config import ClusterConfig
from kvmig.core.errors import Failure
from kvmig.engines.base import EngineLoad
from kvmig.engines.client_request import ClientRequest
from kvmig.engines.held_marks import PrefixNews
from kvmig.frontend.ports import OutputBatch, OutputItem, RouterObserver
from kvmig.frontend.router import FrontendRouter
from kvmig.kvtransfer.report import DowntimeParts, MigrationReport, StageReport
from kvmig.rpc.messages import VERSION, Hello, RpcMessage
from kvmig.rpc.zmq_sockets import RpcServer
from kvmig.sharing.messages import InUnit
from tests.support.waiting import PATIENCE_S, until

SECRET = b"a secret of the cluster"
LOAD = EngineLoad(100, 10, 1, 0, 0, 0)


Kind = TypeVar("Kind", bound=RpcMessage)


class Tokens(msgspec.Struct):
    """What a step gave a request."""

    request_id: str
    new_token_ids: list[int]
    finished: bool = False


def decode(payload: Sequence[memoryview]) -> OutputBatch:
    """The decoder of `FakeLlumlet.step`; the meta is the frame that names the step."""
    items = msgspec.msgpack.decode(payload[0], type=list[Tokens])
    return OutputBatch(items, bytes(payload[1]))


def report(
    request_id: str = "r", source: str = "0", destination: str = "1", reason: str = ""
) -> MigrationReport:
    return MigrationReport(
        id="m1",
        request_id=request_id,
        source=source,
        destination=destination,
        state="aborted" if reason else "committed",
        reason=reason,
        why="by-hand",
        stages=[StageReport(3, 3000, 1.5)],
        bytes=4000,
        downtime_ms=None if reason else DowntimeParts(1.0, 2.0, 3.0, 4.0),
    )


class FakeLlumlet:
    """Answers Hello; everything else as `on` says. `heard`: all messages but Hello."""

    def __init__(self, instance: str, weights: str = "") -> None:
        self.instance = instance
        self.server = RpcServer(SECRET, "llumlet", instance, ClusterMessage)
        self.endpoint = self.server.endpoint
        self.heard: asyncio.Queue[RpcMessage] = asyncio.Queue()
        self.on: dict[type[RpcMessage], Callable[[RpcMessage], RpcMessage | None]] = {
            ListRequests: lambda asked: ListedRequests(getattr(asked, "call_id", 0), [])
        }
        self.payload: list[bytes] = []
        """Of the last message that had one; also of the answers."""
        self._gateway = b""
        self._seq = 0
        self._reported = LOAD, "serving"
        self.silent = False
        self.weights = weights
        self.numerics = "n"
        self.shared: InUnit | None = None
        self.parked = False
        self.bandwidth = 0.0
        self.migrations_out = 0
        self.prefixes: PrefixNews | None = None
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._report())]

    async def _run(self) -> None:
        while True:
            sender, message, payload = await self.server.recv()
            self.payload = [bytes(frame) for frame in payload] or self.payload
            if isinstance(message, Hello):
                self._gateway = sender
                told = Welcome(
                    VERSION.major,
                    self.instance,
                    b"engine",
                    VERSION.minor,
                    weights=self.weights,
                    pid=7,
                    host="here",
                    gpus=("1",),
                )
                self.send(told)
                self.report()
                continue
            answer = self.on[type(message)](message) if type(message) in self.on else None
            if answer is not None:
                self.send(answer, self.payload)
            self.heard.put_nowait(message)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            if self._gateway and not self.silent:
                self.report(*self._reported)

    def send(self, message: RpcMessage, payload: Sequence[bytes] = ()) -> None:
        self.server.send(self._gateway, message, payload)

    def report(self, load: EngineLoad = LOAD, state: str = "serving") -> None:
        self._seq += 1
        self._reported = load, state
        told = LoadReport(
            self.instance,
            self._seq,
            load,
            0,
            self.migrations_out,
            state,
            bandwidth=self.bandwidth,
            prefixes=self.prefixes,
            weights=self.weights,
            numerics=self.numerics,
            shared=self.shared,
            parked=self.parked,
            beside_kv=5,
        )
        self.send(told)

    def step(self, *spans: tuple[str, int, int, list[int]], last: Sequence[str] = ()) -> None:
        """Outputs: (request, epoch, start, tokens) each; `last`: requests that end."""
        items = [Tokens(rid, given, rid in last) for rid, _, _, given in spans]
        self.send(
            Outputs([OutputSpan(rid, epoch, start) for rid, epoch, start, _ in spans]),
            [msgspec.msgpack.encode(items), f"step of {self.instance}".encode()],
        )

    def moves(self, reason: str = "") -> None:
        """Answer Migrate with a report."""

        def answer(message: RpcMessage) -> RpcMessage:
            assert isinstance(message, Migrate)
            told = report(message.request_id, self.instance, message.destination, reason)
            return Migrated(message.call_id, told)

        self.on[Migrate] = answer

    async def hear(self) -> RpcMessage:
        """The next message."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.heard.get()

    async def hear_one(self, kind: type[Kind]) -> Kind:
        """The next message, which is of this kind."""
        message = await self.hear()
        assert isinstance(message, kind)
        return message

    async def close(self) -> None:
        """As if the process had died."""
        await cancel_tasks(*self._tasks)
        self.server.close()


@dataclass
class Front:
    """A `Sink` that keeps what it gets: tokens by request, and where each came from."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    places: dict[str, list[int]] = field(default_factory=dict)
    metas: list[object] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    final: list[str] = field(default_factory=list)
    """Of those that failed, the ones that are to blame themselves."""
    finished: list[str] = field(default_factory=list)
    """Those that were ended before their time, with what they had."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def deliver(self, index: int, items: Sequence[OutputItem], meta: object) -> None:
        for item in items:
            self.tokens.setdefault(item.request_id, []).extend(item.new_token_ids)
            self.places.setdefault(item.request_id, []).extend([index] * len(item.new_token_ids))
        if meta is not None:
            self.metas.append(meta)
        self.changed.set()

    def finish(self, request_ids: Sequence[str]) -> None:
        self.finished += request_ids
        self.changed.set()

    def fail(self, request_ids: Sequence[str], reason: str, kind: Failure) -> None:
        self.failed.update(dict.fromkeys(request_ids, reason))
        self.final += [] if kind == "retry" else request_ids
        self.changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                self.changed.clear()
                await self.changed.wait()


@dataclass
class Cluster:
    """A router on two fake llumlets, "0" and "1"."""

    router: FrontendRouter
    front: Front
    llumlets: list[FakeLlumlet]

    def state(self, llumlet: FakeLlumlet) -> str:
        """What the router knows of an instance."""
        return {row.id: row.state for row in self.router.fleet.rows()}[llumlet.instance]

    async def submit(self, request_id: str = "r", external_id: str = "cmpl-x-0") -> FakeLlumlet:
        """Submit a request and return the llumlet that got it."""
        place = await self.router.submit(
            ClientRequest(request_id, external_id, 20, 0, [b"payload"])
        )
        llumlet = self.llumlets[int(place)]
        await llumlet.hear()
        return llumlet

    def others(self, *these: FakeLlumlet) -> list[FakeLlumlet]:
        return [one for one in self.llumlets if one not in these]

    async def submitted(
        self, request_id: str = "r", external_id: str = "cmpl-x-0"
    ) -> list[FakeLlumlet]:
        """Submit a request; the llumlet that got it, then the others."""
        llumlet = await self.submit(request_id, external_id)
        return [llumlet, *self.others(llumlet)]

    async def come_back(self, llumlet: FakeLlumlet) -> FakeLlumlet:
        """The instance has a new process, which is added."""
        again = FakeLlumlet(llumlet.instance, llumlet.weights)
        self.llumlets.append(again)
        await self.router.add_instance(again.instance, again.endpoint)
        return again

    async def addressed(self, *these: FakeLlumlet) -> FakeLlumlet:
        """The first other than these that has something to hear."""
        them = self.others(*these)
        await until(lambda: any(not one.heard.empty() for one in them))
        return next(one for one in them if not one.heard.empty())


@asynccontextmanager
async def cluster(
    config: ClusterConfig | None = None,
    *,
    observer: RouterObserver | None = None,
    clock: TimeSource = monotonic,
    lost_after_s: float = 10.0,
    fence_timeout_s: float = 0.1,
    instances: int = 2,
    weights: Sequence[str] = (),
) -> AsyncIterator[Cluster]:
    """Instances "0", "1", ... that are alive; everything is closed at the end.

    weights: of each, in place of `instances`.
    """
    front = Front()
    each = weights or [""] * instances
    llumlets = [FakeLlumlet(str(number), one) for number, one in enumerate(each)]
    router = FrontendRouter(
        "front", SECRET, config or ClusterConfig(), front, decode,
        observer=observer or RouterObserver(), clock=clock, lost_after_s=lost_after_s,
        fence_timeout_s=fence_timeout_s,
    )  # fmt: skip
    try:
        for llumlet in llumlets:
            await router.add_instance(llumlet.instance, llumlet.endpoint)
        await until(lambda: all(row.blocks_total for row in router.fleet.rows()))
        yield Cluster(router, front, llumlets)
    finally:
        await router.close()
        for llumlet in llumlets:
            await llumlet.close()
