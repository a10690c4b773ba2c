"""Paths with a slash at their ends mean what they mean without it.

Web frameworks lead from one to the other by a redirect whose address has the scheme that the server
sees: behind HTTPS it would lead to HTTP. So such a path is taken as the plain one before anything
looks at it.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from kvmig.accounts.page_sessions import PATH as PAGE


def plain_path(path: str, root: str = "") -> str:
    """The path without slashes at its end, unless it is the first one or the page's. root: the path
    that the application is mounted at; it stays."""
    inner = path.removeprefix(root)
    if inner == f"{PAGE}/":
        return path
    return path[: len(path) - len(inner)] + (inner.rstrip("/") or "/")


class PlainPaths:
    """An application that is asked for plain paths, as an ASGI stage."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] in ("http", "websocket"):
            scope = {**scope, "path": plain_path(scope["path"], scope.get("root_path", ""))}
        await self._app(scope, receive, send)
