"""Two llumlets without engines or front end: real links and transports, real `Migrations`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kvmig.ground.config import MigrationConfig, Transport
from kvmig.ground.errors import MigrationRefused, PeerError, TransportError
from kvmig.kvtransfer.link import Client, Server
from kvmig.kvtransfer.messages import Hello, Message, PeerMessage
from kvmig.kvtransfer.migrations import Migrations
from kvmig.kvtransfer.report import MigrationReport
from kvmig.kvtransfer.transports.select import open_staging
from kvmig.kvtransfer.wire import Frame
from tests.fake_engine import FakeEngine

SECRET = b"a secret of the cluster"

Drop = Callable[[Message], bool]


class Node:
    """One llumlet. drop: messages that it loses when they come."""

    def __init__(self, name: str, engine: FakeEngine, config: MigrationConfig) -> None:
        self.name = name
        self.engine = engine
        self.server = Server(SECRET, "llumlet", name, PeerMessage)
        self.stagings = open_staging(
            config.transport, "test", name, config.staging_chunks, config.chunk_bytes
        )
        self.migrations = Migrations(
            name,
            engine,
            config,
            self.stagings,
            send_to=self._send_to,
            reply=self._reply,
            resolve=self._resolve,
            on_commit=self._on_commit,
            on_commit_failed=self._on_commit_failed,
            on_left=lambda request_id, endpoint: self.left.append((request_id, endpoint)),
            on_no_memory=lambda error: self.on_no_memory(error),
        )
        engine.on_started = self.migrations.stepped
        self.drop: Drop = lambda message: False
        self.on_no_memory: Callable[[MemoryError], None] = lambda error: None
        self.heard: list[Message] = []
        self.committing: dict[str, tuple[int, int, str]] = {}
        self.left: list[tuple[str, str]] = []
        self.asked: list[str] = []
        self.refuse_commit = False
        self.peers: dict[str, Node] = {}
        self.front_end_is_gone = False
        self._clients: dict[str, tuple[Client, asyncio.Task[None]]] = {}
        self._serving = asyncio.create_task(self._serve())

    def _on_commit(self, request_id: str, epoch: int, outputs: int, gateway: str) -> None:
        if self.refuse_commit:
            raise MigrationRefused("incompatible", "no front end")
        self.committing[request_id] = (epoch, outputs, gateway)

    def _on_commit_failed(self, request_id: str) -> None:
        self.committing.pop(request_id, None)

    async def _resolve(self, mid: str, request_id: str, epoch: int, destination: str) -> bool:
        """As the front end does: the destination's word, or nobody's."""
        self.asked.append(request_id)
        if self.front_end_is_gone:
            raise TransportError("the front end is gone")
        return await self.peers[destination].migrations.fence(request_id, epoch)

    def _send_to(self, endpoint: str, message: Message, payload: Sequence[Frame] = ()) -> None:
        if endpoint not in self._clients:
            client = Client(endpoint, SECRET, "peer", self.name, PeerMessage)
            self._clients[endpoint] = (client, asyncio.create_task(self._hear(endpoint, client)))
        self._clients[endpoint][0].send(message, payload)

    def _reply(self, sender: bytes, message: Message, payload: Sequence[Frame] = ()) -> None:
        self.server.send(sender, message, payload)

    async def _serve(self) -> None:
        while True:
            sender, message, payload = await self.server.recv()
            if not isinstance(message, Hello) and not self._lost(message):
                self.migrations.receive(sender, message, payload)

    async def _hear(self, endpoint: str, client: Client) -> None:
        try:
            while True:
                message, payload = await client.recv()
                if not self._lost(message):
                    self.migrations.receive_reply(endpoint, message, payload)
        except (TransportError, PeerError):
            self.migrations.peer_lost(endpoint)

    def _lost(self, message: Message) -> bool:
        self.heard.append(message)
        return self.drop(message)

    def die(self) -> None:
        """The connections break, and nothing is heard any more."""
        self._serving.cancel()
        self.server.close()

    async def close(self) -> None:
        await self.migrations.close(2.0)
        tasks = [self._serving, *(task for _, task in self._clients.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client, _ in self._clients.values():
            client.close()
        self.server.close()
        held = {name: staging.held for name, staging in self.stagings.items()}
        for staging in self.stagings.values():
            staging.close()
        assert not any(held.values()), f"{self.name} holds slots: {held}"
        assert self.engine.is_clean(), f"{self.name}'s engine holds something"


async def until(holds: Callable[[], object]) -> None:
    """Wait for something that nobody announces."""
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Cluster:
    """Nodes a and b, and a request r that decodes on a."""

    def __init__(self, a: Node, b: Node) -> None:
        self.a = a
        self.b = b
        a.peers, b.peers = {"b": b}, {"a": a}

    async def move(self, request_id: str = "r", epoch: int = 0) -> MigrationReport:
        """a to b."""
        return await self.a.migrations.migrate(
            request_id, "b", self.b.server.endpoint, gateway="g", epoch=epoch, output_tokens=3
        )

    def owners(self, request_id: str = "r") -> str:
        """Where the request decodes, by name."""
        return "".join(
            node.name
            for node in (self.a, self.b)
            if request_id in node.engine.running and not node.engine.running[request_id].suspended
        )


def dropping(kind: type[Message], times: int = 1) -> Drop:
    """Loses the first messages of a kind."""
    left = [times]

    def drop(message: Message) -> bool:
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
    timeout_ms: float = 2000.0,
    lease_ms: float = 10000.0,
    transport: Transport = "auto",
    chunks: int = 2,
    stages: int = 8,
    source: FakeEngine | None = None,
    destination: FakeEngine | None = None,
    **more: Any,
) -> AsyncIterator[Cluster]:
    """Checks when it is left that no block, reservation, slot or suspended request is.

    more: of MigrationConfig's fields.
    """
    config = MigrationConfig(
        reply_timeout_ms=timeout_ms,
        lease_ms=lease_ms,
        transport=transport,
        chunk_bytes=4096,
        staging_chunks=chunks,
        max_stages=stages,
        **more,
    )
    a = Node("a", source or FakeEngine(), config)
    b = Node("b", destination or FakeEngine(), config)
    if "r" not in a.engine.running:
        a.engine.start("r")
    try:
        yield Cluster(a, b)
    finally:
        await asyncio.gather(a.close(), b.close())
