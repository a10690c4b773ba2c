"""Calls that were refused, counted by the status of their answer."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Refusals:
    """`app.state.refusals`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._refused = Counter(
            "kvmig_http_refused_total",
            "Calls that were answered with an error of the client's, by status: 401 and 403 "
            "(not allowed), 408 and 431 (slow or too large heads, slow bodies), 413, 422, ...",
            ("status",),
            registry=registry,
        )

    def count(self, status: int) -> None:
        """An answer begins."""
        if 400 <= status < 500:
            self._refused.labels(str(status)).inc()


class RefusalMiddleware:
    """Pure ASGI, outside of whatever may refuse."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusals: Refusals = scope["app"].state.refusals

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                refusals.count(message["status"])
            await send(message)

        await self.app(scope, receive, counted)
