"""Orders of vLLM's API to end calls are about the calls of all front ends of a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from kvmig.asgi.errors import LauncherGone
from kvmig.controlplane.front_messages import AbortCalls, CallsAborted, FrontAsked, FrontReply
from kvmig.frontend.call_aborts import CallAborts
from tests.support.vllm_application import MODEL, application, client_of

pytestmark = pytest.mark.engine

DEV, SCALE_OUT = "/abort_requests", "/inference/v1/abort_requests"


class OtherFront:
    """Another front end, which ends three calls."""

    def __init__(self) -> None:
        self.asked: list[FrontAsked] = []
        self.gone = False

    async def ask_fronts(
        self, asked: FrontAsked, front: str = "", timeout_s: float = 2.0
    ) -> dict[str, FrontReply]:
        if self.gone:
            raise LauncherGone("it has ended")
        self.asked.append(asked)
        return {"b": CallsAborted(3)}


@pytest.fixture(autouse=True)
def dev_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has /abort_requests only with this."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")


@asynccontextmanager
async def one_of_two(aborts: CallAborts) -> AsyncIterator[httpx.AsyncClient]:
    """Calls a front end whose requests never end by themselves."""
    endless = application("--enable-scale-out", put=lambda name, request: [], aborts=aborts)
    async with endless as (app, _), client_of(app) as client:
        yield client


@asynccontextmanager
async def running(client: httpx.AsyncClient, *names: str) -> AsyncIterator[list[asyncio.Task[str]]]:
    """Calls by these ids; each task's result is how the call has ended."""

    async def call(name: str) -> str:
        body = {"model": MODEL, "prompt": [7] * 5, "max_tokens": 9}
        answer = await client.post("/v1/completions", json=body, headers={"x-request-id": name})
        return str(answer.json()["choices"][0]["finish_reason"])

    tasks = [asyncio.create_task(call(name)) for name in names]
    try:
        await asyncio.sleep(0.1)
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_order_about_all_calls_ends_those_of_every_front_end_and_counts_them() -> None:
    aborts, other = CallAborts(), OtherFront()
    aborts.others = other
    async with one_of_two(aborts) as client, running(client, "x", "y") as calls:
        answer = await client.post(DEV, json={})

        assert answer.json() == {"status": "aborted", "aborted": 5}
        assert await asyncio.wait_for(asyncio.gather(*calls), 10) == ["abort", "abort"]
    assert other.asked == [AbortCalls(None)]


@pytest.mark.parametrize("path", [DEV, SCALE_OUT])
async def test_an_order_about_named_calls_is_passed_on_by_name(path: str) -> None:
    aborts, other = CallAborts(), OtherFront()
    aborts.others = other
    async with one_of_two(aborts) as client, running(client, "x", "y") as calls:
        answer = await client.post(path, json={"request_ids": ["cmpl-x-0", "cmpl-z-0"]})

        assert answer.status_code == 200
        assert await asyncio.wait_for(calls[0], 10) == "abort"
        assert not calls[1].done()
    assert other.asked == [AbortCalls(("cmpl-x-0", "cmpl-z-0"))]


async def test_a_front_end_ends_what_another_one_was_ordered_to_end() -> None:
    aborts = CallAborts()
    async with one_of_two(aborts) as client, running(client, "x", "y") as calls:
        await aborts.reply(AbortCalls(("cmpl-x-0",)))
        assert await asyncio.wait_for(calls[0], 10) == "abort"
        assert not calls[1].done()

        assert await aborts.reply(AbortCalls(None)) == CallsAborted(1)
        assert await asyncio.wait_for(calls[1], 10) == "abort"


@pytest.mark.parametrize("content", ["[]", "{"])
async def test_an_order_that_vllm_refuses_is_not_passed_on(content: str) -> None:
    aborts, other = CallAborts(), OtherFront()
    aborts.others = other
    async with one_of_two(aborts) as client:
        answer = await client.post(DEV, content=content)

    assert answer.status_code == 400
    assert other.asked == []


async def test_an_order_that_cannot_be_passed_on_is_not_answered_as_if_it_had_been() -> None:
    aborts, other = CallAborts(), OtherFront()
    aborts.others, other.gone = other, True
    async with one_of_two(aborts) as client:
        answer = await client.post(DEV, json={})

    assert answer.status_code == 503
    assert "others could not be asked: it has ended" in answer.json()["error"]["message"]
