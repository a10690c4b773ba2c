"""What web pages of another origin may read of a server with vLLM's --allowed-origins."""

from __future__ import annotations

import pytest

from kvmig.core.config import HttpConfig
from tests.support.http_states import behind_middleware
from tests.support.vllm_application import MODEL, application, client_of

PAGE = "https://chat.example.com"
ALLOW = ("--allowed-origins", f'["{PAGE}"]')


@pytest.mark.parametrize("more", [(), ("--api-key=tenant",)])
async def test_a_page_that_may_call_can_read_our_middlewares_errors(more: tuple[str, ...]) -> None:
    async with application(*ALLOW, *more) as (app, _):
        async with client_of(app, origin=PAGE, authorization="Bearer tenant") as client:
            behind_middleware(app, HttpConfig(max_body=1000), added=True)
            large = await client.post("/v1/completions", content=b"x" * 2000)
            behind_middleware(app, vacant=lambda: True, added=True)
            vacant = await client.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
            asks = {"access-control-request-method": "POST"}
            preflight = await client.options("/v1/completions", headers=asks)
        async with client_of(app, origin=PAGE) as stranger:
            models = await stranger.get("/v1/models")
    answers = (large, vacant, preflight, models)
    assert [one.status_code for one in answers] == [413, 503, 200, 401 if more else 200]
    assert [one.headers["access-control-allow-origin"] for one in answers] == [PAGE] * 4


async def test_without_the_flag_no_page_can_read_anything() -> None:
    async with application() as (app, _), client_of(app, origin=PAGE) as client:
        answer = await client.get("/v1/models")
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers
