"""Who runs a request whose commit got no answer: the front end's word is final.

The source has suspended the request and asks. Either the destination says that it
committed, or its tokens have been seen: then it runs it. Otherwise its epoch is fenced
here, so that no token of it ever reaches the client, and the source goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from kvmig.controlplane.messages import Discard, Fence, Fenced, Resolve
from kvmig.gateway.calls import Calls
from kvmig.gateway.errors import CallTimeout, InstanceLost
from kvmig.gateway.requests import RequestTable
from kvmig.gateway.verdict import Verdicts
from kvmig.ground.errors import PeerError
from kvmig.kvtransfer.messages import Message

FENCE_TIMEOUT_S = 2.0

log = logging.getLogger(__name__)

Send = Callable[[str, Message], None]
"""To an instance, at once. Raises InstanceLost."""


class Arbiter:
    """Answers `Resolve`, the same to the same question however often it is asked."""

    def __init__(
        self,
        table: RequestTable,
        calls: Calls,
        send: Send,
        fit: Callable[[str], bool],
        timeout_s: float = FENCE_TIMEOUT_S,
    ) -> None:
        """fit: whether an instance is likely to answer."""
        self._verdicts = Verdicts(table, self._discard)
        self._calls = calls
        self._send = send
        self._fit = fit
        self._timeout_s = timeout_s
        self._asking: dict[tuple[str, int], asyncio.Task[bool]] = {}

    async def moved(self, question: Resolve) -> bool:
        """Whether the destination runs the request; if not, it never will under that epoch."""
        known = self._verdicts.known(question)
        if known is not None:
            return known
        key = (question.request_id, question.epoch)
        if key not in self._asking:
            task = asyncio.create_task(self._committed(question))
            task.add_done_callback(lambda _: self._asking.pop(key))
            self._asking[key] = task
        committed = await asyncio.shield(self._asking[key])
        return self._verdicts.after(question, committed)

    async def close(self) -> None:
        """Stop asking."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _committed(self, question: Resolve) -> bool:
        destination = question.destination
        if not self._fit(destination):
            # What it would say can't matter: from now on none of its tokens does.
            log.warning("request %s stays: %s is not fit", question.request_id, destination)
            return False

        def send(call_id: int) -> None:
            self._send(destination, Fence(call_id, question.request_id, question.epoch))

        try:
            answer, _ = await self._calls.ask(destination, send, Fenced, self._timeout_s, "Fence")
        except (CallTimeout, InstanceLost, PeerError) as error:
            log.warning("request %s stays where it is: %s", question.request_id, error)
            return False
        return answer.committed

    def _discard(self, question: Resolve) -> None:
        # Lost: its outputs, should it ever come back, are answered with Discard then.
        with contextlib.suppress(InstanceLost):
            self._send(question.destination, Discard(question.request_id, question.epoch))
