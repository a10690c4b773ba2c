"""The llumlet as its migrations see it: connections to peers, front ends, whose requests it has."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

from kvmig.controlplane.fronts import FrontendRegistry, OwnershipTable
from kvmig.controlplane.messages import (
    AbortRequests,
    ClusterMessage,
    PauseAhead,
    Resolve,
    Resolved,
)
from kvmig.core.background import cancel_tasks
from kvmig.core.clock import monotonic
from kvmig.core.config import MigrationConfig
from kvmig.core.errors import MigrationRefused, TransportError
from kvmig.engines.base import ServingEngine
from kvmig.kvtransfer.messages import PeerMessage
from kvmig.kvtransfer.migrations import MigrationSessions
from kvmig.kvtransfer.transports.base import StagingPool
from kvmig.kvtransfer.transports.select import site_of
from kvmig.rpc.codec import Frames
from kvmig.rpc.messages import RpcMessage
from kvmig.rpc.zmq_sockets import RpcClient, RpcServer

log = logging.getLogger(__name__)


class MigrationHost:
    """The `Host` of a llumlet's migrations. Connections are made when first needed."""

    def __init__(
        self,
        instance: str,
        secret: bytes,
        engine: ServingEngine,
        config: MigrationConfig,
        stagings: Mapping[str, StagingPool],
        server: RpcServer,
        fronts: FrontendRegistry,
        tracking: OwnershipTable,
        on_exit: Callable[[BaseException], None],
    ) -> None:
        """on_exit: gets an error after which the instance can't go on."""
        self._instance = instance
        self._secret = secret
        self._engine = engine
        self._server = server
        self._fronts = fronts
        self._tracking = tracking
        self.on_no_memory = on_exit
        self.reply = server.send
        self.has_front = fronts.has
        self._clients: dict[str, tuple[RpcClient, asyncio.Task[None]]] = {}
        """Connections to peers, by endpoint, and the tasks that receive their answers."""
        self._questions: dict[str, asyncio.Future[bool]] = {}
        """Questions to front ends that are open, by migration."""
        site = site_of(config, engine.layout.gpu, server.refusals, server.host)
        self.migrations = MigrationSessions(instance, engine, config, stagings, self, site)

    # -- peers

    def send_to(self, endpoint: str, message: RpcMessage, payload: Frames = ()) -> None:
        """Send to a peer. Raises TransportError if it is known to be gone or takes no more."""
        if endpoint not in self._clients:
            client = RpcClient(
                endpoint,
                self._secret,
                "peer",
                self._instance,
                ClusterMessage | PeerMessage,
                refusals=self._server.refusals,
            )
            hearing = asyncio.create_task(self._hear(endpoint, client), name=f"peer {endpoint}")
            self._clients[endpoint] = (client, hearing)
        self._clients[endpoint][0].send(message, payload)

    async def _hear(self, endpoint: str, client: RpcClient) -> None:
        try:
            async for message, _ in client.messages(f"peer {endpoint}"):
                self.migrations.receive_reply(endpoint, message)
        except TransportError as error:
            del self._clients[endpoint]
            # Without a migration it is nobody's loss: instances come and go.
            level = logging.WARNING if self.migrations.peer_lost(endpoint) else logging.DEBUG
            log.log(level, "peer %s is lost: %s", endpoint, error)
        finally:
            client.close()

    async def close(self) -> None:
        """Disconnect from all peers; no migration is informed."""
        tasks = [task for _, task in self._clients.values()]
        await cancel_tasks(*tasks)
        for client, _ in self._clients.values():
            client.close()  # of a task that has never begun
        self._clients.clear()

    # -- requests

    def on_commit(self, request_id: str, epoch: int, output_tokens: int, gateway: str) -> None:
        """A request is about to start here. Raises MigrationRefused without its front end."""
        client = self._fronts.number_of(gateway)
        if client is None:
            raise MigrationRefused("incompatible", f"front end {gateway} is not connected here")
        self._engine.assign(request_id, client)
        self._tracking.begin(request_id, epoch, output_tokens, gateway, arrived_at=monotonic())

    def on_commit_failed(self, request_id: str) -> None:
        """The request doesn't start."""
        self._tracking.end(request_id)

    def on_left(self, request_id: str, endpoint: str) -> None:
        """A request runs at `endpoint` from now on; it ends there if it was aborted meanwhile."""
        aborted = self._tracking.get(request_id) is None
        self._tracking.left(request_id, endpoint)
        if aborted:
            with contextlib.suppress(TransportError):  # the request is gone with it
                self.send_to(endpoint, AbortRequests([request_id]))

    # -- front ends

    async def resolve(self, mid: str, request_id: str, epoch: int, destination: str) -> bool:
        """Ask the front end whether the request moved. Raises TransportError if it is gone."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._questions[mid] = answer
        try:
            question = Resolve(mid, request_id, epoch, destination)
            self._server.send(self._owner(request_id), question)
            return await answer
        finally:
            del self._questions[mid]

    def resolved(self, message: Resolved) -> None:
        """Take a front end's answer. One that is not waited for any more is ignored."""
        answer = self._questions.get(message.mid)
        if answer is not None and not answer.done():
            answer.set_result(message.moved)

    def announce_pause(self, request_id: str, pause_ms: float, stretch_ms: float) -> bool:
        """Announce a pause to the front end; False if it is gone."""
        try:
            message = PauseAhead(request_id, pause_ms, stretch_ms)
            self._server.send(self._owner(request_id), message)
        except TransportError:
            return False
        return True

    def _owner(self, request_id: str) -> bytes:
        """The front end whose stream a request is. Raises TransportError if it is gone."""
        track = self._tracking.get(request_id)
        front = self._fronts.identity(track.gateway) if track else None
        if front is None:
            raise TransportError(f"the front end of {request_id} is gone")
        return front
