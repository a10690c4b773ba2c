"""One call's requests: to the router, their tokens back as text, their text to the client.

A `ChoiceGeneration` is one request, `CallChoices` are those of one call (`n`), `whole` and `stream`
answer the call; its client may leave at any time.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Send

from kvmig.asgi.errors import GatewayError
from kvmig.asgi.problems import problem
from kvmig.core.errors import Failure, NoInstance, QuotaUsedUp
from kvmig.engines.client_request import ClientRequest
from kvmig.engines.transformers.payload import StepOutput, SubmittedRequest, decode, encode
from kvmig.frontend.openai.answers import AnswerWriter, ChoicePiece, OutputToken, usage
from kvmig.frontend.openai.bodies import StreamOptions
from kvmig.frontend.openai.text import StopStrings, StreamDetokenizer
from kvmig.frontend.ports import OutputBatch, OutputItem
from kvmig.frontend.requests import priority_of_call
from kvmig.frontend.router import FrontendRouter

_STATUSES: dict[Failure, HTTPStatus] = {
    "retry": HTTPStatus.SERVICE_UNAVAILABLE,
    "quota": HTTPStatus.TOO_MANY_REQUESTS,
    "refused": HTTPStatus.BAD_REQUEST,
}


class GenerationFailed(GatewayError):
    """A request that began can't go on."""

    def __init__(self, message: str, kind: Failure) -> None:
        super().__init__(message)
        if kind != "final":
            self.status = _STATUSES[kind]


class TokenizerPort(Protocol):
    """Tokenizer of one model."""

    @property
    def max_tokens(self) -> int | None:
        """Most tokens that the model's positions allow; None: unknown."""
        ...

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        ...

    @property
    def longest(self) -> int:
        """Most characters of one token."""
        ...

    @property
    def eos_ids(self) -> Sequence[int]:
        """Tokens that end an answer."""
        ...

    def encode(self, text: str) -> list[int]:
        """Encode a text with the special tokens that the model wants around it."""
        ...

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]
    ) -> list[int]:
        """The conversation and the head of an answer. options: the template's own variables.

        Raises ValueError if the conversation can't be written down.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode without special tokens; bytes that are no text become U+FFFD."""
        ...

    def spell(self, token_ids: Sequence[int]) -> str:
        """Decode with special tokens."""
        ...


class RequestQueues:
    """Implements `Sink` with a queue for each request; one object for the whole front end."""

    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[StepOutput | GenerationFailed]] = {}

    def open(self, request_id: str) -> asyncio.Queue[StepOutput | GenerationFailed]:
        """Queue of all that comes for this request from now on."""
        self._queues[request_id] = queue = asyncio.Queue[StepOutput | GenerationFailed]()
        return queue

    def close(self, request_id: str) -> None:
        """Drop the request's queue."""
        self._queues.pop(request_id, None)

    def deliver(self, index: int, items: Sequence[OutputItem], meta: object) -> None:
        """See `Sink`."""
        for item in items:
            assert isinstance(item, StepOutput)
            if (queue := self._queues.get(item.request_id)) is not None:
                queue.put_nowait(item)

    def finish(self, request_ids: Sequence[str]) -> None:
        """See `Sink`."""
        for request_id in request_ids:
            if (queue := self._queues.get(request_id)) is not None:
                queue.put_nowait(StepOutput(request_id, [], "length"))

    def fail(self, request_ids: Sequence[str], reason: str, kind: Failure) -> None:
        """See `Sink`."""
        for request_id in request_ids:
            if (queue := self._queues.get(request_id)) is not None:
                queue.put_nowait(GenerationFailed(reason, kind))


def decode_outputs(payload: Sequence[memoryview]) -> OutputBatch:
    """The payload of an Outputs message."""
    return OutputBatch(decode(payload[0], list[StepOutput]))


@dataclass(frozen=True)
class GenerationBackend:
    """The router, the queues and the tokenizer that all requests of a front end share."""

    router: FrontendRouter
    queues: RequestQueues
    tokenizer: TokenizerPort


class ChoiceGeneration:
    """`begin`, `next` until a piece has a finish reason, `close` in any case."""

    def __init__(
        self,
        backend: GenerationBackend,
        external_id: str,
        request: SubmittedRequest,
        stops: Sequence[str],
        choice: int | None = None,
        *,
        whole: bool = False,
    ) -> None:
        """external_id: of the call; the request's own has it in it. choice: of several.

        whole: nothing is given out before the end.
        """
        self._whole = whole
        self._router, self._queues = backend.router, backend.queues
        self._external_id = external_id
        # As vLLM ends its ids: `kvmig.frontend.inventory` reads them.
        place = "" if choice is None else f"{choice}_"
        self._request_id = f"{place}{external_id}-{secrets.token_hex(4)}"
        self._request = request
        self._detokenizer = StreamDetokenizer(backend.tokenizer.decode, request.prompt_token_ids)
        self._stops = StopStrings(stops)
        self._queue = self._queues.open(self._request_id)
        self._tokens = 0
        self._logprobs: list[OutputToken] = []
        self._runs = False
        self._left: list[StepOutput | GenerationFailed] = []
        """Outputs that were taken out of the queue, but not given out yet."""

    async def begin(self) -> None:
        """Raises GenerationFailed if there is no instance to run it."""
        priority = priority_of_call(self._request.priority)
        request = msgspec.structs.replace(self._request, priority=priority)
        try:
            await self._router.submit(
                ClientRequest(
                    self._request_id,
                    self._external_id,
                    len(request.prompt_token_ids),
                    priority,
                    [encode(request)],
                    request.max_tokens,
                    whole=self._whole,
                    logprobs=0 if request.logprobs is None else request.logprobs + 1,
                )
            )
        except NoInstance as error:
            raise GenerationFailed(str(error), "retry") from error
        except QuotaUsedUp as error:
            raise GenerationFailed(str(error), "quota") from error
        self._runs = True

    async def next(self) -> ChoicePiece:
        """More of the text, or its end. Raises GenerationFailed."""
        while True:
            came, self._left = self._left or [await self._queue.get()], []
            while not self._queue.empty():
                came.append(self._queue.get_nowait())
            text, reason = "", None
            for one in came:
                if text and isinstance(one, GenerationFailed):
                    self._left = [one]  # the client gets what came before
                    break
                more, reason = await self._take(one)
                text += more
                if reason is not None:
                    break
            if text or reason is not None:
                logprobs, self._logprobs = self._logprobs, []
                return ChoicePiece(text, self._tokens, reason, logprobs)

    async def close(self) -> None:
        """Abort the request if it still runs. May be called twice."""
        self._queues.close(self._request_id)
        if self._runs:
            self._runs = False
            await self._router.abort([self._request_id])

    async def _take(self, output: StepOutput | GenerationFailed) -> tuple[str, str | None]:
        """The output's text, and its finish reason if it is the last."""
        if isinstance(output, GenerationFailed):
            self._runs = False
            raise output
        if output.finish_reason == "error":
            self._runs = False
            raise GenerationFailed(output.error, "final")
        text = ""
        for at, token in enumerate(output.token_ids, 1):
            self._tokens += 1
            if output.logprobs:
                self._logprobs.append(OutputToken(token, output.logprobs[at - 1]))
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


CLIENT_LEFT = 499
"""Status as nginx logs it; no client reads it."""


class CallChoices:
    """The choices of one call, side by side: `begin`, then `pieces`; `close` in any case."""

    def __init__(self, generations: Sequence[ChoiceGeneration]) -> None:
        self._generations = generations
        self._counts = [0] * len(generations)
        self._waiting: dict[asyncio.Future[ChoicePiece], int] = {}

    def __len__(self) -> int:
        return len(self._generations)

    @property
    def tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(self._counts)

    async def begin(self) -> None:
        """Raises GenerationFailed if there is no instance to run one of them."""
        for generation in self._generations:
            await generation.begin()

    async def pieces(self) -> AsyncIterator[tuple[int, ChoicePiece]]:
        """(choice, piece), as they come, to the last one's end. Raises GenerationFailed."""
        if len(self) == 1:  # nearly always: no task for each piece
            ended = False
            while not ended:
                piece = await self._generations[0].next()
                self._counts[0], ended = piece.tokens, piece.finish_reason is not None
                yield 0, piece
            return
        for choice in range(len(self)):
            self._ask(choice)
        while self._waiting:
            done, _ = await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in sorted(done, key=self._waiting.__getitem__):
                choice = self._waiting.pop(future)
                piece = future.result()
                self._counts[choice] = piece.tokens
                if piece.finish_reason is None:
                    self._ask(choice)
                yield choice, piece

    async def close(self) -> None:
        """Abort all that still runs. May be called twice."""
        # First, and nothing else is waited for: the caller may be cancelled at each wait.
        for generation in self._generations:
            await generation.close()
        for future in self._waiting:
            if not future.cancel() and not future.cancelled():
                future.exception()  # that of another choice was told
        self._waiting.clear()

    def _ask(self, choice: int) -> None:
        self._waiting[asyncio.ensure_future(self._generations[choice].next())] = choice


async def whole(
    request: Request, choices: CallChoices, answer: AnswerWriter, prompt_tokens: int
) -> Response:
    """The answer, or none if the client leaves before. Raises GenerationFailed."""

    async def run() -> Response:
        came: list[list[ChoicePiece]] = [[] for _ in range(len(choices))]
        await choices.begin()
        async for choice, piece in choices.pieces():
            came[choice].append(piece)
        body = answer.whole([_joined(pieces) for pieces in came])
        return JSONResponse({**body, "usage": usage(prompt_tokens, choices.tokens)})

    running, left = asyncio.create_task(run()), asyncio.create_task(_left(request))
    try:
        await asyncio.wait((running, left), return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() else Response(status_code=CLIENT_LEFT)
    finally:
        running.cancel()
        left.cancel()
        await asyncio.gather(running, left, return_exceptions=True)
        await choices.close()


def _joined(pieces: Sequence[ChoicePiece]) -> ChoicePiece:
    """Join the pieces of one choice."""
    text = "".join(piece.text for piece in pieces)
    logprobs = [token for piece in pieces for token in piece.logprobs]
    return pieces[-1]._replace(text=text, logprobs=logprobs)


async def stream(
    choices: CallChoices, answer: AnswerWriter, prompt_tokens: int, options: StreamOptions
) -> Response:
    """Server-sent events. Raises GenerationFailed where nothing could begin."""
    try:
        await choices.begin()
    except BaseException:
        await choices.close()
        raise
    return _Events(_events(choices, answer, prompt_tokens, options), choices)


class _Events(StreamingResponse):
    """Ends the choices with the response, however that ends."""

    def __init__(self, events: AsyncIterator[bytes], choices: CallChoices) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._choices = choices

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        finally:
            await self._choices.close()


async def _events(
    choices: CallChoices, answer: AnswerWriter, prompt_tokens: int, options: StreamOptions
) -> AsyncIterator[bytes]:
    def event(chunk: dict[str, Any], counted: bool = options.continuous_usage_stats) -> bytes:
        if counted:
            chunk["usage"] = usage(prompt_tokens, choices.tokens)
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    for choice in range(len(choices)):
        if (head := answer.head(choice)) is not None:
            yield event(head)
    try:
        async for choice, piece in choices.pieces():
            yield event(answer.chunk(choice, piece))
    except GenerationFailed as error:
        body = bytes(problem(HTTPStatus(error.status), str(error)).body)
        yield b"data: " + body + b"\n\n"
    else:
        if options.include_usage:
            yield event(answer.last(), counted=True)
    yield b"data: [DONE]\n\n"


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
