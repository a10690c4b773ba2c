"""One request: to the router, and its tokens back as text."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kvmig.engines.transformers.payload import Output, Submitted, decode, encode
from kvmig.gateway.ports import Batch, Item
from kvmig.gateway.router import Router
from kvmig.ground.errors import NoInstance
from kvmig.openai_server.errors import Failed
from kvmig.openai_server.text import Detokenizer, StopStrings
from kvmig.openai_server.tokens import Token


class Tokenizer(Protocol):
    """Of one model."""

    @property
    def max_tokens(self) -> int | None:
        """That the model's positions allow; None: not known."""
        ...

    @property
    def vocabulary(self) -> int:
        """Ids are smaller."""
        ...

    @property
    def longest(self) -> int:
        """Characters of a token at most."""
        ...

    @property
    def eos_ids(self) -> Sequence[int]:
        """Tokens that end an answer."""
        ...

    def encode(self, text: str) -> list[int]:
        """With the special tokens that the model wants around a text."""
        ...

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]
    ) -> list[int]:
        """The conversation and the head of an answer. options: the template's own variables.

        Raises ValueError if the conversation can't be written down.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Without special tokens; bytes that are no text become U+FFFD."""
        ...

    def spell(self, token_ids: Sequence[int]) -> str:
        """As `decode`, with special tokens."""
        ...


class Outlet:
    """Where the router's streams end: implements `Sink`; one for the whole front end."""

    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[Output | Failed]] = {}

    def open(self, request_id: str) -> asyncio.Queue[Output | Failed]:
        """What comes for this request from now on."""
        self._queues[request_id] = queue = asyncio.Queue[Output | Failed]()
        return queue

    def close(self, request_id: str) -> None:
        """Nobody listens to it any more."""
        self._queues.pop(request_id, None)

    def deliver(self, index: int, items: Sequence[Item], meta: object) -> None:
        """See `Sink`."""
        for item in items:
            assert isinstance(item, Output)
            if (queue := self._queues.get(item.request_id)) is not None:
                queue.put_nowait(item)

    def fail(self, request_ids: Sequence[str], reason: str, retry: bool) -> None:
        """See `Sink`."""
        for request_id in request_ids:
            if (queue := self._queues.get(request_id)) is not None:
                queue.put_nowait(Failed(reason, retry=retry))


def decode_outputs(payload: Sequence[memoryview]) -> Batch:
    """The payload of an Outputs message."""
    return Batch(decode(payload[0], list[Output]))


@dataclass(frozen=True)
class Engines:
    """What all requests of a front end share."""

    router: Router
    outlet: Outlet
    tokenizer: Tokenizer


class Piece(NamedTuple):
    """More of an answer. tokens: output tokens so far; logprobs: of those of this piece, if they
    are asked for, whether their text is in it or held back."""

    text: str
    tokens: int
    finish_reason: str | None
    logprobs: Sequence[Token] = ()


class Generation:
    """`begin`, `next` until a piece has a finish reason, `close` in any case."""

    def __init__(
        self,
        engines: Engines,
        external_id: str,
        request: Submitted,
        stops: Sequence[str],
        choice: int | None = None,
    ) -> None:
        """external_id: of the call; the request's own has it in it. choice: of several."""
        self._router, self._outlet = engines.router, engines.outlet
        self._external_id = external_id
        # As vLLM ends its ids: `kvmig.gateway.foreign` reads them.
        place = "" if choice is None else f"{choice}_"
        self._request_id = f"{place}{external_id}-{secrets.token_hex(4)}"
        self._request = request
        self._detokenizer = Detokenizer(engines.tokenizer.decode, request.prompt_token_ids)
        self._stops = StopStrings(stops)
        self._queue = self._outlet.open(self._request_id)
        self._tokens = 0
        self._logprobs: list[Token] = []
        self._runs = False

    async def begin(self) -> None:
        """Raises Failed if there is no instance to run it."""
        try:
            await self._router.submit(
                self._request_id,
                self._external_id,
                len(self._request.prompt_token_ids),
                self._request.priority,
                [encode(self._request)],
            )
        except NoInstance as error:
            raise Failed(str(error), retry=True) from error
        self._runs = True

    async def next(self) -> Piece:
        """More of the text, or its end. Raises Failed."""
        while True:
            came = [await self._queue.get()]
            while not self._queue.empty():
                came.append(self._queue.get_nowait())
            text, reason = "", None
            for one in came:
                more, reason = await self._take(one)
                text += more
                if reason is not None:
                    break
            if text or reason is not None:
                logprobs, self._logprobs = self._logprobs, []
                return Piece(text, self._tokens, reason, logprobs)

    async def close(self) -> None:
        """Nobody wants more of it. May be called twice."""
        self._outlet.close(self._request_id)
        if self._runs:
            self._runs = False
            await self._router.abort([self._request_id])

    async def _take(self, output: Output | Failed) -> tuple[str, str | None]:
        """Its text, and why it is the last."""
        if isinstance(output, Failed):
            self._runs = False
            raise output
        if output.finish_reason == "error":
            self._runs = False
            raise Failed(output.error, retry=False)
        text = ""
        for at, token in enumerate(output.token_ids, 1):
            self._tokens += 1
            if output.logprobs:
                self._logprobs.append(Token(token, output.logprobs[at - 1]))
            ends = output.finish_reason == "stop" and at == len(output.token_ids)
            cut = self._stops.add("" if ends else self._detokenizer.add(token))
            text += cut.text
            if cut.stopped:
                if not output.finished:
                    await self._router.abort([self._request_id], complete=True)
                self._runs = False
                return text, "stop"
        if not output.finished:
            return text, None
        self._runs = False
        cut = self._stops.add(self._detokenizer.rest())
        text += cut.text + self._stops.rest()
        return text, "stop" if cut.stopped else output.finish_reason
