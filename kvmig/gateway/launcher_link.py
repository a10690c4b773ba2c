"""A front end's connection to the launcher: who the instances are, and orders about them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Protocol

from kvmig.controlplane.messages import ClusterMessage, Members, MessagesRefused
from kvmig.controlplane.orders import Evacuate, OrderDone
from kvmig.gateway.errors import LauncherGone, OrderFailed
from kvmig.ground.errors import PeerError, TransportError
from kvmig.kvtransfer.link import Client
from kvmig.kvtransfer.messages import Message

RETRY_S = 0.5
"""Between two attempts to connect."""
ORDER_TIMEOUT_S = 30.0
"""The launcher answers at once, but for the time that vLLM takes to read flags."""

log = logging.getLogger(__name__)


class Hearer(Protocol):
    """Who hears what the launcher tells."""

    def take(self, members: Members) -> None:
        """These are the instances now."""
        ...

    def evacuate(self, told: Evacuate) -> None:
        """An instance's requests shall run again elsewhere."""
        ...

    def messages_refused(self, told: MessagesRefused) -> None:
        """What the launcher or the scheduler has refused."""
        ...

    def refused(self, error: PeerError) -> None:
        """A message of the launcher's that can't be read, or isn't for a front end."""
        ...


class LauncherLink:
    """Make it inside a running event loop; `close` it. name: the front end's."""

    def __init__(self, endpoint: str, secret: bytes, name: str, hearer: Hearer) -> None:
        self._endpoint = endpoint
        self._secret = secret
        self._name = name
        self._hearer = hearer
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[OrderDone]] = {}
        self._client: Client | None = None
        self._task = asyncio.create_task(self._run(), name="link to the launcher")

    async def order(self, make: Callable[[int], Message]) -> tuple[str, ...]:
        """Give an order, made from its number; the instances that it is about.

        Raises OrderFailed with the launcher's sentence, or LauncherGone.
        """
        call_id = next(self._ids)
        answer: asyncio.Future[OrderDone] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = answer
        try:
            if self._client is None:
                raise LauncherGone("the launcher is not connected")
            self._client.send(make(call_id))
            async with asyncio.timeout(ORDER_TIMEOUT_S):
                done = await answer
        except TransportError as error:
            raise LauncherGone(f"the launcher is gone: {error}") from error
        except TimeoutError as error:
            raise LauncherGone(
                f"the launcher did not answer within {ORDER_TIMEOUT_S:g} s"
            ) from error
        finally:
            del self._waiting[call_id]
        if done.refused:
            raise OrderFailed(done.refused, done.error)
        return done.instances

    async def close(self) -> None:
        """Disconnect."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            client = Client(self._endpoint, self._secret, "gateway", self._name, ClusterMessage)
            self._client = client
            try:
                await self._hear(client)
            except TransportError as error:
                log.warning("the launcher is lost: %s", error)
            except Exception:  # a new connection begins with all that the launcher knows
                log.exception("what the launcher told could not be done")
            finally:
                self._client = None
                client.close()
                for answer in self._waiting.values():
                    if not answer.done():
                        answer.set_exception(TransportError("connection lost"))
            await asyncio.sleep(RETRY_S)

    async def _hear(self, client: Client) -> None:
        while True:
            try:
                message, _ = await client.recv()
            except PeerError as error:
                log.warning("ignored from the launcher: %s", error)
                self._hearer.refused(error)
                continue
            match message:
                case Members():
                    self._hearer.take(message)
                case Evacuate():
                    self._hearer.evacuate(message)
                case MessagesRefused():
                    self._hearer.messages_refused(message)
                case OrderDone():
                    answer = self._waiting.get(message.call_id)
                    if answer is not None and not answer.done():
                        answer.set_result(message)
                case _:
                    name = type(message).__name__
                    log.warning("the launcher sent %s", name)
                    self._hearer.refused(PeerError(f"{name} isn't for a front end"))
