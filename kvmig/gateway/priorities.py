"""The priority that a call asks for: checked at the door, a class's name made its number.

vLLM's request models have an integer field `priority`, and a header that goes before it.
Both must name a configured class. What has no priority is of the class of priority 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send

from kvmig.gateway.admin_errors import problem
from kvmig.gateway.body import first
from kvmig.gateway.shown import shown
from kvmig.ground.priorities import PriorityClass, named, names_and_numbers, with_priority

FIELD = "priority"
HEADER = "x-vllm-priority"
PRIORITY = "kvmig.priority"
"""Where an ASGI scope has a call's number."""

_Body = dict[str, msgspec.Raw]


class UnknownPriority(ValueError):
    """`param`: the field or header that is to blame."""

    def __init__(self, param: str, value: Any, classes: Sequence[PriorityClass]) -> None:
        super().__init__(f"{param} is {shown(value)}, must be {names_and_numbers(classes)}")
        self.param = param


def number_of(param: str, value: Any, classes: Sequence[PriorityClass]) -> int:
    """The number of the class that `value`, a name or a number, means. Raises UnknownPriority."""
    found = None
    if isinstance(value, str):
        found = named(classes, value)
    elif isinstance(value, int) and not isinstance(value, bool):
        found = with_priority(classes, value)
    if found is None:
        raise UnknownPriority(param, value, classes)
    return found.priority


def checked_header(given: str, classes: Sequence[PriorityClass]) -> str:
    """The header with the number of the class that it names. Raises UnknownPriority."""
    try:
        value: int | str = int(given)
    except ValueError:
        value = given
    return str(number_of(HEADER, value, classes))


def checked_body(body: bytes, classes: Sequence[PriorityClass]) -> bytes:
    """`body` with the number of the class that it names; itself if there is nothing to change.

    What is no JSON object is the engine's to refuse. Raises UnknownPriority.
    """
    return _checked(body, classes)[0]


def _checked(body: bytes, classes: Sequence[PriorityClass]) -> tuple[bytes, int]:
    """`checked_body`, and the number."""
    try:
        fields = msgspec.json.decode(body, type=_Body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body, 0
    if FIELD not in fields:
        return body, 0
    try:
        value = msgspec.json.decode(fields[FIELD])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        shown = bytes(fields[FIELD])[:100].decode(errors="replace")
        raise UnknownPriority(FIELD, shown, classes) from None
    number = number_of(FIELD, value, classes)
    if number == value:
        return body, number
    return msgspec.json.encode({**fields, FIELD: number}), number


class PriorityMiddleware:
    """Pure ASGI: a POST with an unknown priority is answered 400; others have theirs in the scope.

    `app.state.priorities`: the configured classes.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        classes: Sequence[PriorityClass] = scope["app"].state.priorities
        # A copy: the server's own list stays as it came.
        headers = MutableHeaders(raw=list(scope["headers"]))
        number = 0
        try:
            if "json" in headers.get("content-type", "").lower():
                message = await receive()  # all of it, see BodyMiddleware
                body, number = _checked(message["body"], classes)
                if "content-length" in headers:
                    headers["content-length"] = str(len(body))
                receive = first({**message, "body": body}, receive)
            if (given := headers.get(HEADER)) is not None:
                headers[HEADER] = checked_header(given, classes)
                number = int(headers[HEADER])
        except UnknownPriority as error:
            answer = problem(HTTPStatus.BAD_REQUEST, str(error), error.param)
            await answer(scope, receive, send)
            return
        await self.app({**scope, "headers": headers.raw, PRIORITY: number}, receive, send)
