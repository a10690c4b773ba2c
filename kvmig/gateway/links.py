"""The connection to one instance: made again whenever it is lost, until closed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

import msgspec

from kvmig.controlplane.messages import ClusterMessage, Welcome
from kvmig.gateway.errors import InstanceLost
from kvmig.ground.errors import PeerError, TransportError
from kvmig.kvtransfer.link import Client
from kvmig.kvtransfer.messages import VERSION, Message
from kvmig.kvtransfer.wire import Frame

RETRY_S = 0.5
"""Between two attempts to connect."""

log = logging.getLogger(__name__)


class Listener(Protocol):
    """Who hears what comes over a link."""

    def on_message(self, link: Link, message: Message, payload: list[memoryview]) -> None:
        """A message after the instance's Welcome."""
        ...

    def on_refused(self, link: Link, error: PeerError) -> None:
        """A message that can't be read, or taken."""
        ...

    def on_lost(self, link: Link, reason: str) -> None:
        """The connection is gone, and what was on its way with it. Called once a connection."""
        ...


class Link:
    """One instance. welcome: its answer to our Hello, while the connection lives."""

    def __init__(
        self, instance: str, endpoint: str, secret: bytes, name: str, listener: Listener
    ) -> None:
        self.instance = instance
        self.endpoint = endpoint
        self.welcome: Welcome | None = None
        self._secret = secret
        self._name = name
        self._listener = listener
        self._client: Client | None = None
        self._serving: asyncio.Task[None] | None = None
        self._closed = False
        self._up = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"link to {instance}")

    @property
    def alive(self) -> bool:
        """Whether it was welcomed over the present connection."""
        return self.welcome is not None

    async def connected(self, timeout_s: float) -> Welcome:
        """Wait for the instance's Welcome. Raises InstanceLost."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        except TimeoutError as error:
            message = f"instance {self.instance} at {self.endpoint} did not answer Hello"
            raise InstanceLost(f"{message} within {timeout_s:g} s") from error
        assert self.welcome is not None
        return self.welcome

    def send(self, message: Message, payload: Sequence[Frame] = ()) -> None:
        """Raises InstanceLost if it is not connected or can't take more."""
        if self._client is None or self.welcome is None:
            raise InstanceLost(f"instance {self.instance} is not connected")
        try:
            self._client.send(message, payload)
        except TransportError as error:
            raise InstanceLost(f"instance {self.instance}: {error}") from error

    def drop(self, reason: str) -> None:
        """Give this connection up and tell the listener; a new one is tried."""
        self._lose(reason)
        if self._serving is not None:
            self._serving.cancel()

    async def close(self) -> None:
        """Disconnect for good; the listener hears nothing of it."""
        self._closed = True
        self.welcome = self._client = None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _lose(self, reason: str) -> None:
        welcomed = self.welcome
        self.welcome = self._client = None
        self._up.clear()
        if welcomed is not None:
            self._listener.on_lost(self, reason)

    async def _run(self) -> None:
        while True:
            self._serving = asyncio.create_task(self._serve())
            try:
                await self._serving
            except asyncio.CancelledError:
                if self._closed:
                    raise
            except (TransportError, PeerError) as error:
                self._lose(str(error))
            except Exception as error:
                log.exception("instance %s: handling its messages failed", self.instance)
                self._lose(f"internal error: {error!r}")
            await asyncio.sleep(RETRY_S)

    async def _serve(self) -> None:
        client = Client(self.endpoint, self._secret, "gateway", self._name, ClusterMessage)
        try:
            self._client = client
            while True:
                try:
                    message, payload = await client.recv()
                except PeerError as error:
                    self._listener.on_refused(self, error)
                    if self.welcome is None:
                        raise
                    log.warning("ignored from instance %s: %s", self.instance, error)
                    continue
                if isinstance(message, Welcome):
                    self._greet(message)
                elif self.welcome is not None:
                    self._take(message, payload)
        finally:
            client.close()

    def _take(self, message: Message, payload: list[memoryview]) -> None:
        """What can't be taken costs the connection: what it brought is lost, like tokens."""
        try:
            self._listener.on_message(self, message, payload)
        except PeerError as error:
            self._listener.on_refused(self, error)
            raise
        except msgspec.MsgspecError as error:
            refused = PeerError(f"{type(message).__name__} can't be used: {error}", "unusable")
            self._listener.on_refused(self, refused)
            raise refused from error

    def _greet(self, welcome: Welcome) -> None:
        if not VERSION.understands(welcome.version) or welcome.instance != self.instance:
            raise PeerError(
                f"{self.endpoint} is {welcome.instance} with protocol {welcome.version}, "
                f"not {self.instance} with {VERSION}"
            )
        self.welcome = welcome
        self._up.set()
