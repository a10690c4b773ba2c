"""What the front end adds to the engine's HTTP application."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from kvmig.frontend.app import describe_beside_streams


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    """One whose description takes half a second."""
    app = FastAPI(title="slow")
    described = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            time.sleep(0.5)
        return described()

    monkeypatch.setattr(app, "openapi", openapi)
    return app


async def test_streams_go_on_while_the_api_is_described(app: FastAPI) -> None:
    describe_beside_streams(app)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://here"
    ) as client:
        asked, ticks = asyncio.create_task(client.get("/openapi.json")), 0
        while not asked.done():
            await asyncio.sleep(0.01)
            ticks += 1
        first, again = await asked, await client.get("/openapi.json")
    assert ticks > 5
    assert first.json()["info"]["title"] == "slow"
    assert again.content == first.content


async def test_an_application_that_does_not_describe_itself_is_left_as_it_is() -> None:
    app = FastAPI(openapi_url=None)
    routes = list(app.routes)
    describe_beside_streams(app)
    assert app.routes == routes
