"""Who isn't let in hears it before anything of the call's body is kept, counted or parsed."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvmig.gateway.access import Access
from kvmig.gateway.admin_errors import denial
from kvmig.gateway.body import discard

UNREAD_BYTES = 1 << 20
"""Of a refused call's body that are taken, and dropped, so that its client sees the answer."""


class AuthenticationMiddleware:
    """Pure ASGI, outside of whatever reads bodies: 401 and 403. `app.state.access`: the rules."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        access: Access = scope["app"].state.access
        headers = Headers(scope=scope)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        denied = access.denied(scope["method"], path, headers)
        if denied is None:
            await self.app(scope, receive, send)
            return
        answer = denial(denied)
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            answer.headers["connection"] = "close"
            if "expect" not in headers:  # whoever asks before sending hasn't sent it yet
                await discard(receive, UNREAD_BYTES)
        await answer(scope, receive, send)
