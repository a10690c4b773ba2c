"""A response that vLLM makes in the background has an end, whatever becomes of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI
from starlette.types import Message

from kvmig.core.config import HttpConfig
from tests.support.http_states import behind_middleware
from tests.support.vllm_application import MODEL, End, EndingRouter, application, client_of
from tests.support.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

PATH = "/v1/responses"
BODY = {
    "model": MODEL, "input": "Count", "max_output_tokens": 50, "background": True, "store": True,
}  # fmt: skip
DOOR = {"x-kvmig-account": "key", "x-kvmig-tenant": "ann"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[tuple[FastAPI, EndingRouter]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
        async with application() as made:
            yield made


async def no_end(request_id: str) -> None:
    """No token of the request comes."""


async def ended(client: httpx.AsyncClient, response: Any) -> str:
    """Its status, once it is over."""
    async with asyncio.timeout(10):
        while True:
            said = (await client.get(f"{PATH}/{response['id']}")).json()["status"]
            if said not in ("queued", "in_progress"):
                return str(said)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("end", ["final", "quota", "own"])
async def test_one_that_fails_says_so_and_so_do_its_events(
    served: tuple[FastAPI, EndingRouter], end: End
) -> None:
    app, router = served
    router.end, router.sentence = end, "it can't go on"
    async with client_of(app) as client:
        response = (await client.post(PATH, json=BODY)).json()
        assert await ended(client, response) == "failed"
        async with asyncio.timeout(10):
            stream = await client.post(PATH, json={**BODY, "stream": True})
    events = stream.text.strip().split("\n\n")
    failed = next(one for one in events if one.startswith("event: response.failed\n"))
    assert json.loads(failed.partition("data: ")[2])["response"]["status"] == "failed"
    assert "it can't go on" in events[-1] or end == "own"


async def test_one_that_its_client_cancels_ends_the_stream_of_its_events(
    served: tuple[FastAPI, EndingRouter], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, router = served
    monkeypatch.setattr(router, "answer", no_end)
    async with client_of(app) as client:
        response = (await client.post(PATH, json={**BODY})).json()
        said = (await client.post(f"{PATH}/{response['id']}/cancel")).json()
        assert said["status"] == await ended(client, response) == "cancelled"


async def test_one_whose_door_leaves_is_cancelled(
    served: tuple[FastAPI, EndingRouter], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, router = served
    monkeypatch.setattr(router, "answer", no_end)
    behind_middleware(app, HttpConfig(uds="/socket"), added=True)
    content = json.dumps(BODY).encode()
    parts: list[Message] = [{"type": "http.request", "body": content}]
    leaves, got = asyncio.Event(), list[Message]()

    async def receive() -> Message:
        if parts:
            return parts.pop()
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        got.append(message)

    names = {"content-type": "application/json", "content-length": str(len(content)), **DOOR}
    headers = [(name.encode(), value.encode()) for name, value in names.items()]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "path": PATH, "raw_path": PATH.encode(), "query_string": b"", "root_path": "",
        "scheme": "http", "headers": headers, "client": ("x", 1), "server": ("x", 2),
    }  # fmt: skip
    call = asyncio.create_task(cast("Any", app)(scope, receive, send))
    await until(lambda: got and got[-1]["type"] == "http.response.body" and got[-1]["body"])
    response = json.loads(got[-1]["body"])
    async with client_of(app, **DOOR) as client:
        await asyncio.sleep(0.1)
        assert not call.done()
        assert got[-1]["more_body"]
        assert (await client.get(f"{PATH}/{response['id']}")).json()["status"] == "queued"
        leaves.set()
        await asyncio.wait_for(call, 10)
        assert await ended(client, response) == "cancelled"
