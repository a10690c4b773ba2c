"""x-request-id: every HTTP call has one, taken from the client or made here.

vLLM bases its request ids on the request's header; the response's header is what
people use to name the call in the admin API. Two live calls with one id don't
confuse anything: sequences have ids of their own, and the call's id is ambiguous.
"""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvmig.gateway.caller import SCOPE, Caller, current_caller

HEADER = "x-request-id"
_GOOD = re.compile(r"[\x21-\x7e]([\x20-\x7e]{0,126}[\x21-\x7e])?")

current_call: ContextVar[str | None] = ContextVar("current_call", default=None)
"""The x-request-id of the HTTP call that this task works for."""


def accepted(given: str | None) -> str:
    """The client's id if it is printable ASCII of at most 128 characters, else a new one."""
    return given if given is not None and _GOOD.fullmatch(given) else uuid.uuid4().hex


class RequestIdMiddleware:
    """Pure ASGI: puts the id into the request's headers, the response's and `current_call`.

    The call gets a `Caller`, too, which its connection finds in the scope.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        call_id = accepted(Headers(scope=scope).get(HEADER))
        # A copy: the server's own list stays as it came.
        headers = MutableHeaders(raw=list(scope["headers"]))
        headers[HEADER] = call_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = call_id
            await send(message)

        caller = scope[SCOPE] = Caller()
        tokens = current_call.set(call_id), current_caller.set(caller)
        try:
            await self.app({**scope, "headers": headers.raw}, receive, send_with_id)
        finally:
            current_call.reset(tokens[0])
            current_caller.reset(tokens[1])
