"""The door while the server stops: no new work, what runs goes on."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send


@dataclass
class GateState:
    """`app.state.gate`: shared with whoever closes the door."""

    closed: bool = False


class Gate:
    """Pure ASGI: once closed, every POST is answered 503 with OpenAI's error shape."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        posted = scope["type"] == "http" and scope["method"] == "POST"
        if posted and scope["app"].state.gate.closed:
            error = {
                "message": "the server is stopping and takes no new requests",
                "type": "ServiceUnavailableError",
                "param": None,
                "code": 503,
            }
            headers = {"Retry-After": "5"}
            await JSONResponse({"error": error}, 503, headers)(scope, receive, send)
            return
        await self.app(scope, receive, send)
