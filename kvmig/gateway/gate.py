"""The door while nobody could take new work: the server stops, or no instance is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kvmig.gateway.access import ADMIN


@dataclass
class GateState:
    """`app.state.gate`: shared with whoever closes the door."""

    closed: bool = False
    vacant: Callable[[], bool] = lambda: False
    """Whether there is no instance."""

    def refusal(self, path: str) -> str:
        """Why a POST there isn't taken, as a sentence; empty when it is.

        An operator may ask for instances when there is none.
        """
        if self.closed:
            return "the server is stopping and takes no new requests"
        if self.vacant() and not path.startswith(ADMIN):
            return "no instance is there to run it"
        return ""


class Gate:
    """Pure ASGI: a POST that can't be served is answered 503 with OpenAI's error shape."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        posted = scope["type"] == "http" and scope["method"] == "POST"
        refusal = scope["app"].state.gate.refusal(scope["path"]) if posted else ""
        if refusal:
            error = {
                "message": refusal,
                "type": "ServiceUnavailableError",
                "param": None,
                "code": 503,
            }
            headers = {"Retry-After": "5"}
            await JSONResponse({"error": error}, 503, headers)(scope, receive, send)
            return
        await self.app(scope, receive, send)
