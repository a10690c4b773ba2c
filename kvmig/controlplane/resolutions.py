"""Questions of a source to a front end: who runs the request, when the destination is mute."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvmig.controlplane.messages import Resolve, Resolved


class Resolutions:
    """Those that are open, by migration."""

    def __init__(self, send: Callable[[bytes, Resolve], None]) -> None:
        """send: to a front end; raises TransportError if it is gone."""
        self._send = send
        self._open: dict[str, asyncio.Future[bool]] = {}

    async def ask(self, front: bytes, question: Resolve) -> bool:
        """Whether the request has moved; whoever asks knows how long to wait, and asks again.

        Raises TransportError if the front end is gone.
        """
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._open[question.mid] = answer
        try:
            self._send(front, question)
            return await answer
        finally:
            del self._open[question.mid]

    def answer(self, message: Resolved) -> None:
        """The front end's word. One that nobody waits for any more is ignored."""
        answer = self._open.get(message.mid)
        if answer is not None and not answer.done():
            answer.set_result(message.moved)
