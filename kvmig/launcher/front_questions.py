"""Questions that the launcher asks front ends, for itself or for another one, and the answers."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kvmig.controlplane.front_messages import FrontAnswer, FrontAsked, FrontQuestion, FrontReply
from kvmig.core.patience import wait_for_answer
from kvmig.rpc.messages import RpcMessage

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenQuestion:
    """A question that a front end hasn't answered yet."""

    front: bytes
    reply: asyncio.Future[FrontReply | None]
    """A reply, or None where the front end is gone."""


class FrontQuestions:
    """Questions of front ends to each other, which the launcher passes on, in one event loop.

    Front ends are named by their sockets' identities.
    """

    def __init__(self, send: Callable[[bytes, RpcMessage], bool]) -> None:
        """send: a message to a front end; whether it is there."""
        self._send = send
        self._ids = itertools.count(1)
        self._open: dict[int, OpenQuestion] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def ask_all(
        self, asked: FrontAsked, fronts: Iterable[bytes], timeout_s: float
    ) -> dict[str, FrontReply]:
        """Ask these front ends the same, see `ask_each`."""
        return await self.ask_each(dict.fromkeys(fronts, asked), timeout_s)

    async def ask_each(
        self, asked: Mapping[bytes, FrontAsked], timeout_s: float
    ) -> dict[str, FrontReply]:
        """Ask front ends at once, and wait for all. One that is gone, or doesn't answer within
        `timeout_s`, is left out."""
        replies = await asyncio.gather(
            *(self._ask_one(one, front, timeout_s) for front, one in asked.items())
        )
        return {
            front.decode(errors="replace"): reply
            for front, reply in zip(asked, replies, strict=True)
            if reply is not None
        }

    async def _ask_one(
        self, asked: FrontAsked, front: bytes, timeout_s: float
    ) -> FrontReply | None:
        call_id = next(self._ids)
        reply: asyncio.Future[FrontReply | None] = asyncio.get_running_loop().create_future()
        self._open[call_id] = OpenQuestion(front, reply)
        try:
            if not self._send(front, FrontQuestion(call_id, asked)):
                return None
            return await wait_for_answer(reply, timeout_s)
        except TimeoutError:
            name = type(asked).__name__
            log.warning("front end %r did not answer %s within %g s", front, name, timeout_s)
            return None
        finally:
            del self._open[call_id]

    def take_answer(self, front: bytes, answer: FrontAnswer) -> None:
        """Hand an answer to its question; ignored if that has ended, or was another one's."""
        question = self._open.get(answer.call_id)
        if question is not None and question.front == front and not question.reply.done():
            question.reply.set_result(answer.reply)

    def lose_front(self, front: bytes) -> None:
        """End the questions to a front end that is gone."""
        for question in self._open.values():
            if question.front == front and not question.reply.done():
                question.reply.set_result(None)
