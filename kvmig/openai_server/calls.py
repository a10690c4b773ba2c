"""A call's choices, answered as a whole or as a stream; its client may leave at any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Send

from kvmig.gateway.admin_errors import problem
from kvmig.openai_server.answers import Answer, usage
from kvmig.openai_server.bodies import StreamOptions
from kvmig.openai_server.choices import Choices
from kvmig.openai_server.errors import Failed
from kvmig.openai_server.generation import Piece

CLIENT_LEFT = 499
"""As nginx has it; nobody reads it."""


async def whole(request: Request, choices: Choices, answer: Answer, prompt_tokens: int) -> Response:
    """The answer, or none if the client leaves before. Raises Failed."""

    async def run() -> Response:
        came: list[list[Piece]] = [[] for _ in range(len(choices))]
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


def _joined(pieces: Sequence[Piece]) -> Piece:
    """All of one choice."""
    text = "".join(piece.text for piece in pieces)
    logprobs = [token for piece in pieces for token in piece.logprobs]
    return pieces[-1]._replace(text=text, logprobs=logprobs)


async def stream(
    choices: Choices, answer: Answer, prompt_tokens: int, options: StreamOptions
) -> Response:
    """Server-sent events. Raises Failed where nothing could begin."""
    try:
        await choices.begin()
    except BaseException:
        await choices.close()
        raise
    return _Events(_events(choices, answer, prompt_tokens, options), choices)


class _Events(StreamingResponse):
    """Ends the choices with the response, however that ends."""

    def __init__(self, events: AsyncIterator[bytes], choices: Choices) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._choices = choices

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        finally:
            await self._choices.close()


async def _events(
    choices: Choices, answer: Answer, prompt_tokens: int, options: StreamOptions
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
    except Failed as error:
        body = bytes(problem(HTTPStatus(error.status), str(error)).body)
        yield b"data: " + body + b"\n\n"
    else:
        if options.include_usage:
            yield event(answer.last(), counted=True)
    yield b"data: [DONE]\n\n"


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
