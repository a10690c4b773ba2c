"""Questions to instances and their answers: numbered, with a timeout, failed with the instance."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvmig.asgi.errors import CallFailed, CallTimeout, InstanceLost
from kvmig.controlplane.messages import CallDone, EngineCall
from kvmig.core.errors import PeerError
from kvmig.core.patience import wait_for_answer
from kvmig.engines.base import Frames
from kvmig.rpc.messages import RpcMessage

M = TypeVar("M", bound=RpcMessage)
Payload = list[memoryview]
Send = Callable[[str, RpcMessage, Frames], None]
"""Sends a message to an instance, at once. Raises InstanceLost."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    instance: str
    future: asyncio.Future[tuple[RpcMessage, Payload]]


class PendingCalls:
    """Open questions of one front end to its instances."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._ids = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def call_instance(
        self,
        instance: str,
        make: Callable[[int], RpcMessage],
        answer: type[M],
        timeout_s: float,
        what: str,
        payload: Frames = (),
    ) -> tuple[M, Payload]:
        """Send a question under a new id and wait for the answer and its payload.

        make: the question, from its id. what: names it in errors. Raises CallTimeout, InstanceLost,
        and PeerError for an answer of another type.
        """
        call_id = next(self._ids)
        future: asyncio.Future[tuple[RpcMessage, Payload]] = (
            asyncio.get_running_loop().create_future()
        )
        self._waiting[call_id] = _Waiting(instance, future)
        try:
            self._send(instance, make(call_id), payload)
            message, came = await wait_for_answer(future, timeout_s)
        except TimeoutError as error:
            late = f"instance {instance} did not answer {what} within {timeout_s:g} s"
            raise CallTimeout(late) from error
        finally:
            del self._waiting[call_id]
        if not isinstance(message, answer):
            raise PeerError(f"{instance} answered {what} with {type(message).__name__}")
        return message, came

    def answer(self, call_id: int, message: RpcMessage, payload: Payload) -> None:
        """Hand an answer to its question; ignored if that has ended."""
        waiting = self._waiting.get(call_id)
        if waiting is not None and not waiting.future.done():
            waiting.future.set_result((message, payload))

    def lost(self, instance: str, reason: str, kind: type[InstanceLost] = InstanceLost) -> None:
        """The instance is gone: so are its answers, in place of which questions get this error."""
        for waiting in self._waiting.values():
            if waiting.instance == instance and not waiting.future.done():
                waiting.future.set_exception(kind(reason))

    async def run(self, instance: str, method: str, payload: Frames, timeout_s: float) -> Payload:
        """Run an engine method. Raises CallFailed, CallTimeout, InstanceLost."""
        done, result = await self.call_instance(
            instance,
            lambda call_id: EngineCall(call_id, method),
            CallDone,
            timeout_s,
            method,
            payload,
        )
        if done.error is not None:
            raise CallFailed(f"{method} failed on instance {instance}: {done.error}")
        return result
