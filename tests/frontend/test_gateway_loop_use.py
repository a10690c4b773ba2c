"""Who holds up the event loop of a front end again and again isn't let in for a while."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from kvmig.asgi.call import HttpCall
from kvmig.core.config import HttpConfig
from kvmig.frontend.loop_use import (
    CLOSED_S,
    LARGE_BYTES,
    MOST,
    STALL_S,
    WITHIN_S,
    LoopUse,
    StallRecord,
    TimedCoroutine,
)
from kvmig.frontend.middleware import HttpState
from tests.support.http_states import behind_middleware

BODY = b"x" * LARGE_BYTES


def burn(seconds: float) -> None:
    """Of the processor, by this thread."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_an_account_is_closed_after_its_third_stall_and_others_are_not() -> None:
    record = StallRecord()
    for at in (0.0, 1.0, 2.0):
        assert record.closed_s("a", at) == 0
        record.record_stall("a", at)
    assert record.closed_s("a", 2.0) == CLOSED_S
    assert record.closed_s("a", 2.0 + CLOSED_S) == 0
    assert record.closed_s("b", 2.0) == 0


def test_stalls_that_are_far_apart_close_nobody() -> None:
    record = StallRecord()
    for number in range(3 * MOST):
        at = number * WITHIN_S
        record.record_stall("a", at)
        assert record.closed_s("a", at) == 0


# -- as calls meet it


async def in_its_task(request: Request) -> PlainTextResponse:
    await request.body()
    burn(STALL_S * 1.2)
    return PlainTextResponse("ok")


async def in_another_task(request: Request) -> PlainTextResponse:
    await request.body()

    async def work() -> None:
        await asyncio.sleep(0)
        burn(STALL_S * 1.2)

    await asyncio.create_task(work())
    return PlainTextResponse("ok")


async def in_its_stream(request: Request) -> StreamingResponse:
    await request.body()

    async def parts() -> AsyncIterator[str]:
        burn(STALL_S * 1.2)
        yield "ok"

    return StreamingResponse(parts())


async def in_a_thread(request: Request) -> PlainTextResponse:
    await request.body()
    await asyncio.to_thread(burn, STALL_S * 1.2)
    return PlainTextResponse("ok")


async def asleep(request: Request) -> PlainTextResponse:
    await request.body()
    time.sleep(STALL_S * 1.2)  # noqa: ASYNC251 - as a machine that is loaded
    return PlainTextResponse("ok")


@asynccontextmanager
async def serving(
    work: Callable[..., object],
) -> AsyncIterator[tuple[httpx.AsyncClient, HttpState]]:
    app = Starlette(routes=[Route("/", work, methods=["POST"])])
    state = behind_middleware(app, HttpConfig(uds="/socket"))
    loop = asyncio.get_running_loop()
    state.loop_use.watch(loop)
    try:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client, state
    finally:
        state.loop_use.close(loop)


@pytest.mark.parametrize("work", [in_its_task, in_another_task, in_its_stream])
async def test_who_holds_up_the_loop_three_times_is_refused_and_nobody_else(
    work: Callable[..., object],
) -> None:
    async with serving(work) as (client, _):
        bad = [
            await client.post("/", content=BODY, headers={"x-kvmig-tenant": "ann"})
            for _ in range(MOST + 1)
        ]
        other = await client.post("/", content=BODY, headers={"x-kvmig-tenant": "bea"})
    assert [one.status_code for one in bad] == [200] * MOST + [429]
    assert 1 <= int(bad[-1].headers["retry-after"]) <= CLOSED_S
    assert "held up all others" in bad[-1].json()["error"]["message"]
    assert other.status_code == 200


@pytest.mark.parametrize("work", [in_a_thread, asleep])
async def test_what_is_not_the_calls_own_work_on_the_loop_closes_nobody(
    work: Callable[..., object],
) -> None:
    async with serving(work) as (client, _):
        answers = [
            await client.post("/", content=BODY, headers={"x-kvmig-tenant": "ann"})
            for _ in range(MOST + 1)
        ]
    assert {one.status_code for one in answers} == {200}


async def test_small_calls_and_calls_of_nobody_known_are_not_timed() -> None:
    async with serving(in_its_task) as (client, state):
        for _ in range(MOST):
            await client.post("/", content=b"x", headers={"x-kvmig-tenant": "ann"})
            await client.post("/", content=BODY)
        now = state.clock()
        assert state.loop_use.stalls.closed_s("ann", now) == 0
        assert state.loop_use.stalls.closed_s("", now) == 0


async def test_garbage_that_is_collected_in_a_step_is_not_the_calls_own() -> None:
    use, spent = LoopUse(time.monotonic), list[float]()
    use.spent = lambda call, seconds: spent.append(seconds)  # type: ignore[method-assign]

    async def work() -> None:
        gc.collect()

    loop = asyncio.get_running_loop()
    use.watch(loop)
    try:
        kept: list[list[int]] = [[] for _ in range(500_000)]
        await TimedCoroutine(work(), HttpCall(), use)
    finally:
        use.close(loop)
    assert kept
    assert use.collecting_s > 0
    assert spent[0] < use.collecting_s
