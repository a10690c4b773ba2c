"""x-request-id in, through and out."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from kvmig.gateway.http import accepted
from kvmig.gateway.requests import current_call, current_call_id
from tests.http_states import behind_middleware


async def echo(request: Request) -> PlainTextResponse:
    """What the application sees."""
    headers = request.headers.getlist("x-request-id")
    return PlainTextResponse(f"{headers} {current_call_id()}", headers={"x-request-id": "mine"})


async def get(headers: dict[str, str]) -> httpx.Response:
    app = Starlette(routes=[Route("/", echo)])
    behind_middleware(app)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.get("/", headers=headers)


async def test_a_clients_id_goes_through() -> None:
    answer = await get({"X-Request-Id": "the client's own"})
    assert answer.headers.get_list("x-request-id") == ["the client's own"]
    assert answer.text == "[\"the client's own\"] the client's own"


@pytest.mark.parametrize("headers", [{}, {"X-Request-Id": "x" * 129}, {"X-Request-Id": ""}])
async def test_a_missing_or_bad_id_is_made_anew(headers: dict[str, str]) -> None:
    answer = await get(headers)
    (made,) = answer.headers.get_list("x-request-id")
    assert len(made) == 32
    assert answer.text == f"['{made}'] {made}"
    assert current_call.get() is None


@given(st.text())
def test_what_is_accepted_is_printable_ascii_of_at_most_128(given: str) -> None:
    good = accepted(given)
    assert 1 <= len(good) <= 128
    assert good.isascii()
    assert good.isprintable()
    if (
        1 <= len(given) <= 128
        and given.isascii()
        and given.isprintable()
        and given == given.strip()
    ):
        assert good == given
