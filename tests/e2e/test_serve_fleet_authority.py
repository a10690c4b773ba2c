"""A key that may do less, on a fleet of toys: its calls end wherever they are, within a second."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from tests.e2e.test_serve_fleet_quotas import new_key
from tests.support.fleets import PATH, ToyFleet, answer, ask, counted, hold_streams

pytestmark = pytest.mark.server

SOON_S = 1.0
ENDINGS = ["revoked", "disabled"]


def begin(fleet: ToyFleet, kind: str) -> str:
    """A user's key that will end."""
    name = f"{kind}-{time.monotonic_ns()}"
    fleet.ask("POST", "users", {"name": name})
    return new_key(fleet, user=name) + " " + name


def end(fleet: ToyFleet, kind: str, key: str, user: str) -> None:
    if kind == "revoked":
        done = fleet.ask("DELETE", f"keys/{key.split('-')[1]}")
    else:
        done = fleet.ask("PATCH", f"users/{user}", {"disabled": True})
    assert done.is_success, done.text


@pytest.mark.parametrize("kind", ENDINGS)
async def test_a_body_that_is_on_its_way_and_a_stream_end_with_their_key(
    fleet: ToyFleet, kind: str
) -> None:
    fleet.add_toy("Org/Toy-1B", instances={"min": 1})
    key, user = begin(fleet, kind).split()
    async with fleet.client(key) as client:
        assert await answer(client, ask("Org/Toy-1B")) == counted(10)
    (stream,) = await hold_streams(fleet, ask("Org/Toy-1B", 100), key=key, tokens=5)
    url = httpx.URL(fleet.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    body = json.dumps(ask("Org/Toy-1B")).encode()
    head = (
        f"POST {PATH} HTTP/1.1", "host: here", f"authorization: Bearer {key}",
        "content-type: application/json", f"content-length: {len(body)}", "", "",
    )  # fmt: skip
    writer.write("\r\n".join(head).encode() + body[:10])
    await asyncio.sleep(0.2)

    await asyncio.to_thread(end, fleet, kind, key, user)
    async with asyncio.timeout(SOON_S):
        said = await reader.read()
        await stream.task
    writer.close()
    assert said.startswith(b"HTTP/1.1 401 ")
    assert stream.error is not None
    assert stream.error["message"] == "no such API key"
    assert stream.text == counted(5)


async def test_what_is_not_in_the_table_starts_no_model_and_a_count_of_tokens_neither(
    fleet: ToyFleet,
) -> None:
    fleet.add_toy("cold")

    def state() -> Any:
        return next(one for one in fleet.get("models")["data"] if one["name"] == "cold")["state"]

    async with fleet.client() as client:
        nothing = await client.get("/models/cold/v1/nothing")
        abort = await client.post("/inference/v1/abort_requests", json={"model": "cold"})
        count = await client.post("/tokenize", json={"model": "cold", "prompt": "hi"})
    async with httpx.AsyncClient(base_url=fleet.url) as stranger:
        strangers = await stranger.get("/kvmig/v2/openapi.json")
    assert [one.status_code for one in (nothing, abort, count, strangers)] == [404, 404, 503, 401]
    await asyncio.sleep(1.0)
    assert await asyncio.to_thread(state) == "zero"
