"""Two llumlets without engines or front end: real links and transports, real
`MigrationSessions`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kvmig.core.background import cancel_tasks
from kvmig.core.config import MigrationConfig, Transport
from kvmig.core.errors import MigrationRefused, PeerError, TransportError
from kvmig.kvtransfer.context import LlumletPort
from kvmig.kvtransfer.measured import slot_bytes
from kvmig.kvtransfer.messages import PeerMessage
from kvmig.kvtransfer.migrations import MigrationSessions
from kvmig.kvtransfer.report import MigrationReport
from kvmig.kvtransfer.transports.select import TransportSite, open_staging
from kvmig.rpc.codec import Frame
from kvmig.rpc.messages import Hello, RpcMessage
from kvmig.rpc.zmq_sockets import RpcClient, RpcServer
from tests.support.fake_engine import FakeEngine
from tests.support.skipped_time import Skip, skipped_time
from tests.support.waiting import PATIENCE_S, until

SLACK_S = 0.001

SECRET = b"a secret of the cluster"

Drop = Callable[[RpcMessage], bool]


class Node(LlumletPort):
    """One llumlet. drop: messages that it loses when they come."""

    def __init__(self, name: str, engine: FakeEngine, config: MigrationConfig) -> None:
        self.name = name
        self.engine = engine
        self.server = RpcServer(SECRET, "llumlet", name, PeerMessage)
        self.stagings = open_staging(
            *(config.transport, "test", name, config.staging_buffers),
            slot_bytes(config.chunk_bytes, engine.layout),
            TransportSite(gpu=engine.layout.gpu),
        )
        self.migrations = MigrationSessions(
            name,
            engine,
            config,
            self.stagings,
            self,
        )
        engine.on_started = lambda request_id: self.migrations.stepped(request_id, 1)
        self.drop: Drop = lambda message: False
        self.no_memory: list[MemoryError] = []
        self.foretell: Callable[[str, float, float], bool] = lambda *told: False
        self.heard: list[RpcMessage] = []
        self.committing: dict[str, tuple[int, int, str]] = {}
        self.left: list[tuple[str, str]] = []
        self.asked: list[str] = []
        self.refuse_commit = False
        self.fronts = {"g", ""}
        self.peers: dict[str, Node] = {}
        self.front_end_is_gone = False
        self.front_end_is_stuck = False
        self._clients: dict[str, tuple[RpcClient, asyncio.Task[None]]] = {}
        self._serving = asyncio.create_task(self._serve())

    def on_commit(self, request_id: str, epoch: int, outputs: int, gateway: str) -> None:
        if self.refuse_commit:
            raise MigrationRefused("incompatible", "no front end")
        self.committing[request_id] = (epoch, outputs, gateway)

    def on_left(self, request_id: str, endpoint: str) -> None:
        self.left.append((request_id, endpoint))

    def on_no_memory(self, error: MemoryError) -> None:
        self.no_memory.append(error)

    def has_front(self, gateway: str) -> bool:
        return gateway in self.fronts

    def announce_pause(self, request_id: str, pause_ms: float, stretch_ms: float) -> bool:
        return self.foretell(request_id, pause_ms, stretch_ms)

    def on_commit_failed(self, request_id: str) -> None:
        self.committing.pop(request_id, None)

    async def resolve(self, mid: str, request_id: str, epoch: int, destination: str) -> bool:
        """As the front end does: the destination's word, or nobody's."""
        self.asked.append(request_id)
        if self.front_end_is_gone:
            raise TransportError("the front end is gone")
        if self.front_end_is_stuck:
            await asyncio.get_running_loop().create_future()
        return await self.peers[destination].migrations.fence(request_id, epoch)

    def send_to(self, endpoint: str, message: RpcMessage, payload: Sequence[Frame] = ()) -> None:
        if endpoint not in self._clients:
            client = RpcClient(endpoint, SECRET, "peer", self.name, PeerMessage)
            self._clients[endpoint] = (client, asyncio.create_task(self._hear(endpoint, client)))
        self._clients[endpoint][0].send(message, payload)

    def reply(self, sender: bytes, message: RpcMessage) -> None:
        self.server.send(sender, message)

    async def _serve(self) -> None:
        while True:
            sender, message, payload = await self.server.recv()
            if not isinstance(message, Hello) and not self._lost(message):
                self.migrations.receive(sender, message, payload)

    async def _hear(self, endpoint: str, client: RpcClient) -> None:
        try:
            while True:
                message, _ = await client.recv()
                if not self._lost(message):
                    self.migrations.receive_reply(endpoint, message)
        except (TransportError, PeerError):
            self.migrations.peer_lost(endpoint)

    def _lost(self, message: RpcMessage) -> bool:
        self.heard.append(message)
        return self.drop(message)

    def die(self) -> None:
        """The connections break, and nothing is heard any more."""
        self._serving.cancel()
        self.server.close()

    async def close(self) -> None:
        await self.migrations.close(PATIENCE_S)
        tasks = [self._serving, *(task for _, task in self._clients.values())]
        await cancel_tasks(*tasks)
        for client, _ in self._clients.values():
            client.close()
        self.server.close()
        held = {name: staging.held for name, staging in self.stagings.items()}
        for staging in self.stagings.values():
            staging.close()
        assert not any(held.values()), f"{self.name} holds slots: {held}"
        assert self.engine.is_clean(), f"{self.name}'s engine holds something"


class Cluster:
    """Nodes a and b, and a request r that decodes on a. skip: lets time pass on both."""

    def __init__(self, a: Node, b: Node, config: MigrationConfig, skip: Skip) -> None:
        self.a = a
        self.b = b
        self.skip = skip
        self._config = config
        a.peers, b.peers = {"b": b}, {"a": a}

    async def move(
        self, request_id: str = "r", epoch: int = 0, urgent: bool = False
    ) -> MigrationReport:
        """a to b."""
        return await self.a.migrations.migrate(
            request_id,
            "b",
            self.b.server.endpoint,
            gateway="g",
            epoch=epoch,
            output_tokens=3,
            urgent=urgent,
        )

    def skip_answer(self) -> None:
        """Let the time pass that an answer, or a call of an engine, may take."""
        self.skip(self._config.reply_timeout_ms / 1e3 + SLACK_S)

    def skip_lease(self) -> None:
        """Let the time pass that a destination waits for its source."""
        self.skip(self._config.lease_ms / 1e3 + SLACK_S)

    def in_vain(self, drop: Drop) -> Drop:
        """Loses the same, and whoever waits for an answer then has waited long enough."""

        def lose(message: RpcMessage) -> bool:
            lost = drop(message)
            if lost:
                self.skip_answer()
            return lost

        return lose

    async def run_out(self, moving: asyncio.Task[MigrationReport]) -> MigrationReport:
        """The end of a migration whose next answers will not come."""
        deadline = time.monotonic() + PATIENCE_S
        while not moving.done():
            if time.monotonic() > deadline:
                raise TimeoutError
            self.skip_answer()
            await asyncio.sleep(0.001)
        return await moving

    def hang_in(self, method: str, at: Node) -> None:
        """That engine's call takes longer than it may, until a asks the arbiter."""

        async def hang(called: str) -> None:
            while called == method and not self.a.asked:
                self.skip_answer()
                await asyncio.sleep(0)

        at.engine.before = hang

    def stop_in(self, method: str, at: Node, stops: Node) -> list[asyncio.Task[None]]:
        """In that engine's call a node stops: has its `close`, once it is begun."""
        closing: list[asyncio.Task[None]] = []

        async def stop(called: str) -> None:
            if called != method or closing:
                return
            closing.append(asyncio.create_task(stops.migrations.close(PATIENCE_S)))
            if at is self.a and stops is self.b:
                await until(lambda: self.b.migrations.incoming == 0)
            for _ in range(3):  # enough for it to begin
                await asyncio.sleep(0)

        at.engine.before = stop
        return closing

    def moved(self) -> bool:
        """Whether r is b's, and a waits for nothing but word of its first token."""
        return bool(self.a.left) and self.a.migrations.outgoing == 0

    def owners(self, request_id: str = "r") -> str:
        """Where the request decodes, by name."""
        return "".join(
            node.name
            for node in (self.a, self.b)
            if request_id in node.engine.running and not node.engine.running[request_id].suspended
        )


def dropping(kind: type[RpcMessage], times: int = 1) -> Drop:
    """Loses the first messages of a kind."""
    left = [times]

    def drop(message: RpcMessage) -> bool:
        if not isinstance(message, kind) or left[0] == 0:
            return False
        left[0] -= 1
        return True

    return drop


def failing(method: str, error: Exception, after: int = 0) -> Callable[[str], Awaitable[None]]:
    """The engine raises at a method's call, once `after` earlier ones went well."""
    left = [after]

    async def before(called: str) -> None:
        if called == method:
            left[0] -= 1
            if left[0] < 0:
                raise error

    return before


@asynccontextmanager
async def cluster(
    *,
    timeout_ms: float = PATIENCE_S * 1e3,
    transport: Transport = "auto",
    chunks: int = 2,
    stages: int = 8,
    source: FakeEngine | None = None,
    destination: FakeEngine | None = None,
    **more: Any,
) -> AsyncIterator[Cluster]:
    """Checks when it is left that no block, reservation, slot or suspended request is.

    more: of MigrationConfig's fields. A lease is four times as long as an answer may take.
    """
    config = MigrationConfig(
        reply_timeout_ms=timeout_ms,
        lease_ms=4 * timeout_ms,
        transport=transport,
        chunk_bytes=4096,
        staging_buffers=chunks,
        max_stages=stages,
        **more,
    )
    a = Node("a", source or FakeEngine(), config)
    b = Node("b", destination or FakeEngine(), config)
    if "r" not in a.engine.running:
        a.engine.start("r")
    with skipped_time() as skip:
        try:
            yield Cluster(a, b, config, skip)
        finally:
            await asyncio.gather(a.close(), b.close())
