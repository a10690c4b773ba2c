"""A call's body is read here, before anybody works on it: in time, and no more than allowed.

A slow or endless one costs its sender's connection only.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvmig.gateway.admin_errors import problem
from kvmig.ground.http import BODIES, HttpConfig

DISCARD_S = 2.0
"""For what comes of a body that is refused."""


@dataclass
class Intake:
    """`app.state.intake`: the limits, and bytes of bodies that are on their way in."""

    config: HttpConfig
    pending: int = 0


class Refused(Exception):
    """The call is answered with this instead; what is left of its body is not read."""

    def __init__(self, answer: Response) -> None:
        answer.headers["connection"] = "close"
        self.answer = answer


class BodyMiddleware:
    """Pure ASGI: the application gets whole bodies; 413, 408 and 503 are answered here."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        intake: Intake = scope["app"].state.intake
        headers = Headers(scope=scope)
        try:
            _check_length(headers.get("content-length"), intake.config)
            body = await _read(receive, intake)
        except Refused as refused:
            if "expect" not in headers:  # whoever asks before sending hasn't sent it yet
                await discard(receive, intake.config.max_body)
            await refused.answer(scope, receive, send)
            return
        if body is not None:  # or the client has left
            await self.app(scope, first(body, receive), send)


def first(message: Message, receive: Receive) -> Receive:
    """`message`, then whatever `receive` gives."""
    pending = [message]

    async def next_message() -> Message:
        return pending.pop() if pending else await receive()

    return next_message


def _check_length(given: str | None, config: HttpConfig) -> None:
    if given is not None and given.isdecimal() and int(given[:20]) > config.max_body:
        raise _too_large(config)


async def _read(receive: Receive, intake: Intake) -> Message | None:
    """The whole body as one message; None if the client leaves. Raises Refused."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(intake.config.body_timeout_s):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return None
                part = message.get("body", b"")
                parts.append(part)
                size += len(part)
                intake.pending += len(part)
                if size > intake.config.max_body:
                    raise _too_large(intake.config)
                if intake.pending > BODIES * intake.config.max_body:
                    raise _too_many()
                if not message.get("more_body", False):
                    return {"type": "http.request", "body": b"".join(parts), "more_body": False}
    except TimeoutError:
        raise _too_slow(intake.config) from None
    finally:
        intake.pending -= size


async def discard(receive: Receive, most: int) -> None:
    """Take some of the rest: a client that still sends when we close would not see the answer."""
    left = most
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def _too_large(config: HttpConfig) -> Refused:
    sentence = f"the body is too large, allowed are {config.max_body} bytes (--max-body)"
    return Refused(problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, sentence))


def _too_slow(config: HttpConfig) -> Refused:
    sentence = f"the body did not arrive within {config.body_timeout_s:g} s (--body-timeout)"
    return Refused(problem(HTTPStatus.REQUEST_TIMEOUT, sentence))


def _too_many() -> Refused:
    sentence = "too many large bodies are on their way in, try again"
    return Refused(problem(HTTPStatus.SERVICE_UNAVAILABLE, sentence, headers={"Retry-After": "5"}))
