"""A llumlet's connections to its peers: made when first needed, dropped when lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvmig.controlplane.messages import ClusterMessage
from kvmig.ground.errors import PeerError, TransportError
from kvmig.kvtransfer.link import Client
from kvmig.kvtransfer.messages import Message, PeerMessage
from kvmig.kvtransfer.wire import Frame, Refusals

log = logging.getLogger(__name__)


class Peers:
    """Connections by endpoint. on_message and on_lost run on the event loop."""

    def __init__(
        self,
        name: str,
        secret: bytes,
        on_message: Callable[[str, Message, list[memoryview]], None],
        on_lost: Callable[[str], None],
        refusals: Refusals,
    ) -> None:
        self._refusals = refusals
        self._name = name
        self._secret = secret
        self._on_message = on_message
        self._on_lost = on_lost
        self._clients: dict[str, tuple[Client, asyncio.Task[None]]] = {}

    def send(self, endpoint: str, message: Message, payload: Sequence[Frame] = ()) -> None:
        """Raises TransportError if the peer is known to be gone or takes no more."""
        if endpoint not in self._clients:
            client = Client(
                endpoint,
                self._secret,
                "peer",
                self._name,
                ClusterMessage | PeerMessage,
                refusals=self._refusals,
            )
            hearing = asyncio.create_task(self._hear(endpoint, client), name=f"peer {endpoint}")
            self._clients[endpoint] = (client, hearing)
        self._clients[endpoint][0].send(message, payload)

    async def close(self) -> None:
        """Disconnect from all; nobody hears of it."""
        tasks = [task for _, task in self._clients.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client, _ in self._clients.values():
            client.close()  # of a task that has never begun
        self._clients.clear()

    async def _hear(self, endpoint: str, client: Client) -> None:
        try:
            while True:
                try:
                    message, payload = await client.recv()
                except PeerError as error:
                    log.warning("ignored from peer %s: %s", endpoint, error)
                    continue
                self._on_message(endpoint, message, payload)
        except TransportError as error:
            log.warning("peer %s is lost: %s", endpoint, error)
            del self._clients[endpoint]
            self._on_lost(endpoint)
        finally:
            client.close()
