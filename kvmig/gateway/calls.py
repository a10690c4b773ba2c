"""Questions to instances and their answers: numbered, with a time-out, failed with the instance."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvmig.gateway.errors import CallTimeout, InstanceLost
from kvmig.ground.errors import PeerError
from kvmig.kvtransfer.messages import Message

M = TypeVar("M", bound=Message)
Payload = list[memoryview]


@dataclass(frozen=True, slots=True)
class _Waiting:
    instance: str
    future: asyncio.Future[tuple[Message, Payload]]


class Calls:
    """Open questions of one front end."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def ask(
        self,
        instance: str,
        send: Callable[[int], None],
        answer: type[M],
        timeout_s: float,
        what: str,
    ) -> tuple[M, Payload]:
        """Send a question under a new id and wait for the answer and its payload.

        send: gets the id and sends the message. what: names the question in errors.
        Raises CallTimeout, InstanceLost, PeerError for an answer of another type, and
        what `send` raises.
        """
        call_id = next(self._ids)
        future: asyncio.Future[tuple[Message, Payload]] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = _Waiting(instance, future)
        try:
            send(call_id)
            async with asyncio.timeout(timeout_s):
                message, payload = await future
        except TimeoutError as error:
            late = f"instance {instance} did not answer {what} within {timeout_s:g} s"
            raise CallTimeout(late) from error
        finally:
            del self._waiting[call_id]
        if not isinstance(message, answer):
            raise PeerError(f"{instance} answered {what} with {type(message).__name__}")
        return message, payload

    def answer(self, call_id: int, message: Message, payload: Payload) -> None:
        """An answer came. One that nobody waits for any more is ignored."""
        waiting = self._waiting.get(call_id)
        if waiting is not None and not waiting.future.done():
            waiting.future.set_result((message, payload))

    def lost(self, instance: str, reason: str) -> None:
        """The instance is gone: so are its answers."""
        for waiting in self._waiting.values():
            if waiting.instance == instance and not waiting.future.done():
                waiting.future.set_exception(InstanceLost(reason))
