"""A call's generation, answered as a whole or as a stream; its client may leave at any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Send

from kvmig.gateway.admin_errors import problem
from kvmig.openai_server.answers import Answer, usage
from kvmig.openai_server.bodies import StreamOptions
from kvmig.openai_server.errors import Failed
from kvmig.openai_server.generation import Generation

CLIENT_LEFT = 499
"""As nginx has it; nobody reads it."""


async def whole(
    request: Request, generation: Generation, answer: Answer, prompt_tokens: int
) -> Response:
    """The answer, or none if the client leaves before. Raises Failed."""

    async def run() -> Response:
        text = ""
        await generation.begin()
        while True:
            piece = await generation.next()
            text += piece.text
            if piece.finish_reason is not None:
                body = answer.whole(text, piece.finish_reason)
                return JSONResponse({**body, "usage": usage(prompt_tokens, piece.tokens)})

    running, left = asyncio.create_task(run()), asyncio.create_task(_left(request))
    try:
        await asyncio.wait((running, left), return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() else Response(status_code=CLIENT_LEFT)
    finally:
        running.cancel()
        left.cancel()
        await asyncio.gather(running, left, return_exceptions=True)
        await generation.close()


async def stream(
    generation: Generation, answer: Answer, prompt_tokens: int, options: StreamOptions
) -> Response:
    """Server-sent events. Raises Failed where nothing could begin."""
    try:
        await generation.begin()
    except BaseException:
        await generation.close()
        raise
    return _Events(_events(generation, answer, prompt_tokens, options), generation)


class _Events(StreamingResponse):
    """Ends the generation with the response, however that ends."""

    def __init__(self, events: AsyncIterator[bytes], generation: Generation) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._generation = generation

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        finally:
            await self._generation.close()


async def _events(
    generation: Generation, answer: Answer, prompt_tokens: int, options: StreamOptions
) -> AsyncIterator[bytes]:
    tokens = 0

    def event(chunk: dict[str, Any], counted: bool = options.continuous_usage_stats) -> bytes:
        if counted:
            chunk["usage"] = usage(prompt_tokens, tokens)
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    if (head := answer.head()) is not None:
        yield event(head)
    finish_reason = None
    while finish_reason is None:
        try:
            piece = await generation.next()
        except Failed as error:
            body = bytes(problem(HTTPStatus(error.status), str(error)).body)
            yield b"data: " + body + b"\n\n"
            break
        tokens, finish_reason = piece.tokens, piece.finish_reason
        yield event(answer.chunk(piece))
    else:
        if options.include_usage:
            yield event(answer.last(), counted=True)
    yield b"data: [DONE]\n\n"


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
