"""A slash at a path's end changes nothing, and leads nowhere."""

from __future__ import annotations

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from kvmig.asgi.plain_paths import PlainPaths, plain_path


@pytest.mark.parametrize(
    ("path", "root", "plain"),
    [
        ("/v1/models/", "", "/v1/models"),
        ("/v1/models//", "", "/v1/models"),
        ("/v1/models", "", "/v1/models"),
        ("/", "", "/"),
        ("//", "", "/"),
        ("/ui/", "", "/ui/"),
        ("/ui", "", "/ui"),
        ("/ui/keys/", "", "/ui/keys"),
        ("/api/", "/api", "/api/"),
        ("/api/ui/", "/api", "/api/ui/"),
        ("/api/v1/models/", "/api", "/api/v1/models"),
    ],
)
def test_only_the_slash_at_the_end_of_a_path_goes(path: str, root: str, plain: str) -> None:
    assert plain_path(path, root) == plain


@pytest.mark.parametrize(
    ("path", "found"),
    [("/ui/", "/ui/"), ("/ui/keys/", "/ui/keys"), ("/a/b//", "/a/b"), ("/", "/")],
)
async def test_an_application_sees_paths_without_it(path: str, found: str) -> None:
    async def echo(request: Request) -> PlainTextResponse:
        return PlainTextResponse(request.scope["path"])

    pages = Starlette(routes=[Route("/", echo), Route("/keys", echo)])
    app = Starlette(routes=[Mount("/ui", pages), Route("/a/b", echo), Route("/", echo)])
    app.router.redirect_slashes = False
    transport = httpx.ASGITransport(PlainPaths(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        answer = await client.get(path)
    assert (answer.status_code, answer.text) == (200, found)
