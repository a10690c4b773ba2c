"""Orders of vLLM's API to end calls are about the calls of all front ends of a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from kvmig.asgi.errors import LauncherGone
from kvmig.controlplane.front_messages import AbortCalls, CallsAborted, FrontAsked, FrontReply
from kvmig.core.background import cancel_tasks
from kvmig.frontend.call_aborts import CallAborts
from tests.support.vllm_application import MODEL, application, client_of
from tests.support.waiting import until

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


@dataclass
class TwoFronts:
    """A front end whose requests never end by themselves, and another one."""

    client: httpx.AsyncClient
    aborts: CallAborts
    other: OtherFront
    calls: list[asyncio.Task[str]]
    """Of the first one, which run; each result is how the call has ended."""


@asynccontextmanager
async def two_fronts(*names: str) -> AsyncIterator[TwoFronts]:
    """names: ids of calls."""
    aborts, other, began = CallAborts(), OtherFront(), list[str]()
    aborts.others = other

    def put(name: str, request: EngineCoreRequest) -> Sequence[EngineCoreOutput]:
        began.append(name)
        return []

    async def call(name: str) -> str:
        body = {"model": MODEL, "prompt": [7] * 5, "max_tokens": 9}
        answer = await client.post("/v1/completions", json=body, headers={"x-request-id": name})
        return str(answer.json()["choices"][0]["finish_reason"])

    endless = application("--enable-scale-out", put=put, aborts=aborts)
    async with endless as (app, _), client_of(app) as client:
        calls = [asyncio.create_task(call(name)) for name in names]
        try:
            await until(lambda: len(began) == len(names))
            yield TwoFronts(client, aborts, other, calls)
        finally:
            await cancel_tasks(*calls)


async def test_an_order_about_all_calls_ends_those_of_every_front_end_and_counts_them() -> None:
    async with two_fronts("x", "y") as it:
        answer = await it.client.post(DEV, json={})

        assert answer.json() == {"status": "aborted", "aborted": 5}
        assert await asyncio.wait_for(asyncio.gather(*it.calls), 10) == ["abort", "abort"]
    assert it.other.asked == [AbortCalls(None)]


@pytest.mark.parametrize("path", [DEV, SCALE_OUT])
async def test_an_order_about_named_calls_is_passed_on_by_name(path: str) -> None:
    async with two_fronts("x", "y") as it:
        answer = await it.client.post(path, json={"request_ids": ["cmpl-x-0", "cmpl-z-0"]})

        assert answer.status_code == 200
        assert await asyncio.wait_for(it.calls[0], 10) == "abort"
        assert not it.calls[1].done()
    assert it.other.asked == [AbortCalls(("cmpl-x-0", "cmpl-z-0"))]


async def test_a_front_end_ends_what_another_one_was_ordered_to_end() -> None:
    async with two_fronts("x", "y") as it:
        await it.aborts.reply(AbortCalls(("cmpl-x-0",)))
        assert await asyncio.wait_for(it.calls[0], 10) == "abort"
        assert not it.calls[1].done()

        assert await it.aborts.reply(AbortCalls(None)) == CallsAborted(1)
        assert await asyncio.wait_for(it.calls[1], 10) == "abort"


@pytest.mark.parametrize("content", ["[]", "{"])
async def test_an_order_that_vllm_refuses_is_not_passed_on(content: str) -> None:
    async with two_fronts() as it:
        answer = await it.client.post(DEV, content=content)

    assert answer.status_code == 400
    assert it.other.asked == []


async def test_an_order_that_cannot_be_passed_on_is_not_answered_as_if_it_had_been() -> None:
    async with two_fronts() as it:
        it.other.gone = True
        answer = await it.client.post(DEV, json={})

    assert answer.status_code == 503
    assert "others could not be asked: it has ended" in answer.json()["error"]["message"]
