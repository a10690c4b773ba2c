"""Who is let in while nobody could be served."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI

from tests.http_states import behind_middleware


async def post(path: str, closed: bool = False, vacant: bool = False) -> httpx.Response:
    app = FastAPI()
    behind_middleware(app, closed=closed, vacant=lambda: vacant)

    @app.post("/{path:path}")
    async def answer() -> str:
        return "in"

    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.post(path)


async def test_without_an_instance_new_requests_are_told_to_come_again() -> None:
    answer = await post("/v1/completions", vacant=True)
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == "5"
    assert answer.json()["error"]["message"] == "no instance is there to run it"


async def test_without_an_instance_an_operator_is_let_in() -> None:
    answer = await post("/kvmig/v1/instances", vacant=True)
    assert answer.json() == "in"


@pytest.mark.parametrize("path", ["/v1/completions", "/kvmig/v1/instances"])
async def test_a_server_that_stops_lets_nobody_in(path: str) -> None:
    answer = await post(path, closed=True)
    assert answer.status_code == 503
    assert "stopping" in answer.json()["error"]["message"]


async def test_the_gate_is_open_otherwise() -> None:
    assert (await post("/v1/completions")).json() == "in"
