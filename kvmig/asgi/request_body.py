"""The body of an HTTP call: read within its bounds, and counted while it is there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from http import HTTPStatus
from typing import NamedTuple

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import Message, Receive

from kvmig.asgi.body_bounds import BodyCheck, ModelReach, TooMuch, bound_of
from kvmig.asgi.body_budget import BodyShare
from kvmig.asgi.error_stage import RETRY_AFTER_S
from kvmig.asgi.problems import problem
from kvmig.asgi.route_table import ClientRoute
from kvmig.core.config import HttpConfig

DISCARD_S = 30.0
"""Longest time for what comes of a body that is refused, and..."""
DISCARD_PAUSE_S = 2.0
"""... the longest in which nothing comes. A client on a slow line or a busy machine still sends."""
RETRY_AFTER = {"Retry-After": str(RETRY_AFTER_S)}

UNREAD_BYTES = 1 << 20
"""Bytes of a denied call's body that are taken, and dropped, so that its client sees the answer."""


class HttpRejection(Exception):
    """The call is answered with this instead.

    unread: how much of its body is taken, and dropped; the connection is closed then.
    """

    def __init__(self, answer: Response, unread: int = 0) -> None:
        if unread:
            answer.headers["connection"] = "close"
        self.answer = answer
        self.unread = unread


class BodyRules(NamedTuple):
    """What holds for one call's body."""

    most: int
    """Bytes."""
    timeout_s: float
    """Time for the body to arrive."""
    check: BodyCheck | None = None
    """Looks at what is in it."""
    why: str = "--max-body"
    """What bounds it."""
    unread: int = 64_000_000
    """Bytes of a refused one that are taken, and dropped, so that its client sees the answer."""


def rules_of(
    config: HttpConfig,
    reach: ModelReach | None,
    route: ClientRoute | None,
    headers: Mapping[str, str],
) -> BodyRules:
    """What holds for the body of such a call. reach: of its model; None: it isn't known, and bounds
    nothing. headers: names in lower case."""
    most, timeout_s = config.max_body, config.body_timeout_s
    if reach is None:
        return BodyRules(most, timeout_s, unread=most)
    bound = bound_of(reach, route)
    form = headers.get("content-type", "").lower().startswith("multipart/")
    check = BodyCheck(bound, json=not form)
    if bound.size < most:
        why = "more is of no use to the model"
        return BodyRules(bound.size, timeout_s, check, why, unread=most)
    return BodyRules(most, timeout_s, check, unread=most)


def check_whole(rules: BodyRules, body: bytes) -> None:
    """Raises HttpRejection, 413, for a body that was read by other rules."""
    rules = rules._replace(unread=0)
    if len(body) > rules.most:
        raise _too_large(rules)
    _look(rules, body, body)


async def read_body(
    rules: BodyRules, share: BodyShare, headers: MutableHeaders, receive: Receive
) -> Message | None:
    """The whole body as one message, which counts in `share`; None if the client leaves.

    Raises HttpRejection: 413, 408, or 503 and 429 when too many bodies are in; nothing counts then.
    """
    try:
        async with asyncio.timeout(rules.timeout_s):
            return await _read(rules, share, headers, receive)
    except TimeoutError:
        share.give_back()
        sentence = f"the body did not arrive within {rules.timeout_s:g} s (--body-timeout)"
        raise HttpRejection(problem(HTTPStatus.REQUEST_TIMEOUT, sentence), rules.unread) from None
    except BaseException:
        share.give_back()
        raise


async def _read(
    rules: BodyRules, share: BodyShare, headers: MutableHeaders, receive: Receive
) -> Message | None:
    length = headers.get("content-length")
    if length is not None and length.isdecimal() and int(length[:20]) > rules.most:
        raise _too_large(rules)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            share.give_back()
            return None
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > rules.most:
            raise _too_large(rules)
        _take(rules, share, part)
        ends = not message.get("more_body", False)
        body = b"".join(parts) if ends else b""
        _look(rules, part, body if ends else None)
        if ends:
            return {"type": "http.request", "body": body, "more_body": False}


def _look(rules: BodyRules, part: bytes, whole: bytes | None) -> None:
    """whole: the body, once it is there."""
    if rules.check is None:
        return
    try:
        rules.check.feed(part)
        if whole is not None:
            rules.check.check(whole)
    except TooMuch as error:
        status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        raise HttpRejection(problem(status, str(error)), rules.unread) from error


def _take(rules: BodyRules, share: BodyShare, part: bytes) -> None:
    full = share.count_bytes(len(part))
    if not full:
        return
    if full == "account":
        sentence = "the bodies of this key's other calls take all of its room, try again"
        status = HTTPStatus.TOO_MANY_REQUESTS
    else:
        sentence = "too many large bodies are in, try again"
        status = HTTPStatus.SERVICE_UNAVAILABLE
    raise HttpRejection(problem(status, sentence, headers=RETRY_AFTER), rules.unread)


def _too_large(rules: BodyRules) -> HttpRejection:
    sentence = f"the body is too large, allowed are {rules.most} bytes ({rules.why})"
    return HttpRejection(problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, sentence), rules.unread)


async def discard(receive: Receive, most: int, within_s: float = DISCARD_S) -> None:
    """Take some of the rest: a client that still sends when we close would not see the answer."""
    left = most
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while left > 0:
                async with asyncio.timeout(DISCARD_PAUSE_S):
                    message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
