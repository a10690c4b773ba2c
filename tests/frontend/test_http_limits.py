"""A front end takes so much of one call, however it is sent; others lose nothing by it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from contextvars import ContextVar
from functools import partial
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, HTTPException, Request

from kvmig.asgi.body_bounds import ModelReach
from kvmig.asgi.call import current_call
from kvmig.asgi.connection import HttpConnection
from kvmig.asgi.problems import shorten_value
from kvmig.asgi.uvicorn_task import HttpTask, uvicorn_server
from kvmig.core.background import cancel_tasks
from kvmig.core.config import HttpConfig
from kvmig.frontend.middleware import HttpState
from tests.support.http_states import behind_middleware
from tests.support.skipped_time import skipped_time
from tests.support.waiting import until

SMALL = HttpConfig(max_body=2000, body_timeout_s=0.3)
TIMEOUT_S = 30.0


class Front:
    """An application behind all limits, on a real port."""

    def __init__(self, port: int, state: HttpState) -> None:
        self.port = port
        self.state = state

    def refused(self, status: int) -> float:
        """So many were answered so."""
        labels = {"status": str(status)}
        return self.state.registry.get_sample_value("kvmig_http_refused_total", labels) or 0.0

    async def say(self, *parts: bytes, end: bool = False) -> bytes:
        """What the server answers until it closes; end: it is told that no more comes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        with closing(writer):
            try:
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                if end:
                    writer.write_eof()
                async with asyncio.timeout(TIMEOUT_S):
                    return await reader.read()
            except ConnectionError:
                return b""  # closed while we were still talking

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=TIMEOUT_S)

    async def echo(self, body: bytes) -> httpx.Response:
        """An ordinary call."""
        async with self.client() as client:
            return await client.post("/", content=body)


class Engine:
    """Takes a prompt when it is told to, and answers when it is told to."""

    def __init__(self) -> None:
        self.takes = asyncio.Event()
        self.answers = asyncio.Event()
        self.has = 0


ENGINE: ContextVar[Engine] = ContextVar("ENGINE")


def engine_api() -> APIRouter:
    api, engine = APIRouter(), Engine()
    ENGINE.set(engine)

    @api.post("/v1/completions")
    async def complete(request: Request) -> int:
        size = len(await request.body())
        await engine.takes.wait()
        call = current_call.get()
        assert call is not None
        call.submitted(f"r{engine.has}")
        engine.has += 1
        await engine.answers.wait()
        return size

    @api.post("/v1/chat/completions")
    async def fail() -> None:
        raise HTTPException(500)

    return api


@asynccontextmanager
async def front(limits: HttpConfig = SMALL) -> AsyncIterator[Front]:
    app = FastAPI()
    state = behind_middleware(app, limits)
    app.state.connection = HttpConnection.limited(limits.send_timeout_s, state.count)

    @app.post("/")
    async def size(request: Request) -> int:
        return len(await request.body())

    app.include_router(engine_api())
    sock = socket.create_server(("127.0.0.1", 0))
    server = uvicorn_server(app, app.state.connection, access_log=False)
    task = HttpTask(sock, lambda: server)
    await task.run(server.serve([sock]))
    try:
        yield Front(sock.getsockname()[1], state)
        assert state.budget.used == 0
    finally:
        await task.stop(2.0)


def head(*lines: str) -> bytes:
    return "\r\n".join(["POST / HTTP/1.1", "host: here", *lines, "", ""]).encode()


async def test_a_body_within_the_limit_arrives_whole() -> None:
    async with front() as one:
        assert (await one.echo(b"x" * 2000)).json() == 2000


async def test_a_body_that_says_it_is_too_large_is_413_before_it_is_sent() -> None:
    async with front() as one:
        answer = await one.say(head("content-length: 2001", "expect: 100-continue"))
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"100 Continue" not in answer
        assert "allowed are 2000 bytes" in answer.decode()
        assert one.refused(413) == 1


async def test_who_sends_all_of_a_large_body_sees_the_413() -> None:
    async with front(HttpConfig(max_body=1_000_000)) as one:
        assert (await one.echo(b"x" * 1_900_000)).status_code == 413


CHUNK = b"3e8\r\n" + b"x" * 1000 + b"\r\n"


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([head(f"content-length: {'9' * 18}")], 413),
        ([head("transfer-encoding: chunked"), CHUNK, CHUNK, CHUNK], 413),
        ([head("content-length: 100"), b"x"], 408),
        ([b"\x16\x03\x01\r\n\r\n"], 400),
    ],
    ids=["a length of many digits", "no end", "too slow", "no HTTP"],
)
async def test_a_body_that_can_not_be_taken_is_refused_and_counted(
    parts: list[bytes], status: int
) -> None:
    async with front() as one:
        assert (await one.say(*parts)).startswith(b"HTTP/1.1 %d " % status)
        assert one.refused(status) == 1


async def test_a_client_that_leaves_in_the_midst_of_its_body_leaves_nothing() -> None:
    async with front(HttpConfig(body_timeout_s=TIMEOUT_S)) as one:
        await one.say(head("content-length: 100"), b"x", end=True)
        _, writer = await asyncio.open_connection("127.0.0.1", one.port)
        writer.write(head("content-length: 100") + b"x")
        await until(lambda: one.state.budget.used)
        writer.close()
        await until(lambda: not one.state.budget.used)


async def test_many_large_bodies_at_once_are_bounded_together() -> None:
    async with front(HttpConfig(max_body=100_000, body_timeout_s=TIMEOUT_S)) as one:
        part = head("content-length: 100000") + b"x" * 99_999
        writers = []
        for _ in range(8):
            _, writer = await asyncio.open_connection("127.0.0.1", one.port)
            writers.append(writer)
            writer.write(part)
        await until(lambda: one.state.budget.used >= 8 * 99_999)
        answer = await one.echo(b"x" * 1000)
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        for writer in writers:
            writer.close()
        await until(lambda: not one.state.budget.used)
        assert (await one.echo(b"x")).json() == 1


async def test_a_body_counts_until_the_engine_has_its_prompt() -> None:
    async with front(HttpConfig()) as one, one.client() as client:
        engine = ENGINE.get()
        body = json.dumps({"prompt": "a" * 10_000}).encode()
        call = asyncio.create_task(client.post("/v1/completions", content=body))
        await until(lambda: one.state.budget.used == len(body))
        engine.takes.set()
        await until(lambda: engine.has)
        assert one.state.budget.used == 0
        engine.answers.set()
        assert (await call).json() == len(body)


async def test_a_body_counts_no_more_when_its_call_fails_or_its_client_leaves() -> None:
    async with front(HttpConfig()) as one, one.client() as client:
        assert (await client.post("/v1/chat/completions", content=b"{}")).status_code == 500
        assert one.state.budget.used == 0
        call = asyncio.create_task(client.post("/v1/completions", content=b"{}"))
        await until(lambda: one.state.budget.used)
        await cancel_tasks(call)
        ENGINE.get().takes.set()
        ENGINE.get().answers.set()
        await until(lambda: not one.state.budget.used)


async def test_one_key_that_fills_its_room_leaves_as_much_to_others() -> None:
    async with front(HttpConfig(max_body=10_000)) as one, one.client() as client:
        one.state.keyed = True

        def call(key: str) -> asyncio.Task[httpx.Response]:
            headers, body = {"authorization": f"Bearer {key}"}, b" " * 9000
            return asyncio.create_task(
                client.post("/v1/completions", content=body, headers=headers)
            )

        mine = []
        for number in range(1, 5):
            mine.append(call("a"))
            await until(partial(lambda used: one.state.budget.used == used, number * 9000))
        refused = await call("a")
        assert refused.status_code == 429
        assert refused.headers["retry-after"]
        other = call("b")
        await until(lambda: one.state.budget.used == 5 * 9000)
        ENGINE.get().takes.set()
        ENGINE.get().answers.set()
        assert {answer.status_code for answer in await asyncio.gather(*mine, other)} == {200}


async def test_a_body_of_more_values_than_the_model_can_use_is_413_before_the_engine_sees_it() -> (
    None
):
    async with front(HttpConfig()) as one, one.client() as client:
        one.state.learn(ModelReach(tokens=1000))
        many = await client.post("/v1/completions", json={"prompt": [1] * 100_000})
        large = await client.post("/v1/completions", json={"prompt": "a" * 2_000_000})
        assert (many.status_code, large.status_code, ENGINE.get().has) == (413, 413, 0)
        assert "allowed are" in many.text
        assert one.state.budget.used == 0


async def test_headers_without_an_end_are_431() -> None:
    async with front() as one:
        lines = [b"x%d: %s\r\n" % (number, b"a" * 1000) for number in range(400)]
        answer = await one.say(head()[:-2], *lines)
        assert answer.startswith(b"HTTP/1.1 431 ") or answer == b""
        assert one.refused(431) == 1
        assert (await one.echo(b"x")).json() == 1


async def test_each_front_end_of_a_process_counts_its_own() -> None:
    async with front() as one, front() as other:
        await one.say(head("content-length: no number"))
        assert (one.refused(400), other.refused(400)) == (1, 0)


async def test_headers_that_come_too_slowly_are_408() -> None:
    with skipped_time() as skip:
        async with front(HttpConfig()) as one:
            slow = asyncio.gather(one.say(), one.say(b"POST / HT"))
            await asyncio.sleep(0)
            assert (await one.echo(b"x")).json() == 1  # it came after them
            skip(HttpConnection.head_s)
            for answer in await slow:
                assert answer.startswith(b"HTTP/1.1 408 ")


async def test_a_call_may_take_longer_than_its_headers() -> None:
    with skipped_time() as skip:
        async with front(HttpConfig()) as one:
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            writer.write(head("content-length: 2", "connection: close") + b"x")
            await until(lambda: one.state.budget.used)
            skip(HttpConnection.head_s)
            writer.write(b"y")
            assert (await reader.read()).endswith(b"2")
            writer.close()


async def test_an_idle_connection_is_kept_for_longer_than_clients_keep_theirs() -> None:
    with skipped_time() as skip:
        async with front() as one:
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            for _ in range(2):
                writer.write(head("content-length: 1") + b"x")
                assert (await reader.readuntil(b"\r\n\r\n1")).startswith(b"HTTP/1.1 200 ")
                skip(70)
            skip(10)
            assert await reader.read() == b""
            writer.close()


@pytest.mark.parametrize(
    "given",
    [b"a\rset-cookie: b", b"a\x00b", b"\xff", b"a" * 5000, b"a\tb", "ä".encode()],
)
async def test_a_call_id_puts_no_header_into_the_answer(given: bytes) -> None:
    async with front() as one:
        said = head("connection: close", "content-length: 0")[:-2] + b"x-request-id: "
        answer = (await one.say(said + given + b"\r\n\r\n")).partition(b"\r\n\r\n")[0].lower()
        lines = [line for line in answer.split(b"\r\n") if line.startswith(b"x-request-id: ")]
        assert b"set-cookie" not in answer
        assert answer.startswith(b"http/1.1 400 ") or (
            len(lines) == 1 and len(lines[0]) == len("x-request-id: ") + 32
        )


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (5, "5"),
        ("a\n\ud800", r"'a\n\ud800'"),
        ("x" * 10**6, f"'{'x' * 100}'..."),
        (list(range(10**6)), "[0, 1, 2]... (1000000 items)"),
        ({str(one): 1 for one in range(101)}, "[('0', 1), ('1', 1), ('2', 1)]... (101 items)"),
        (10**4000, "a number of 13288 bits"),
        ([["y" * 500]], f"[['{'y' * 97}..."),
    ],
)
def test_a_value_in_an_error_is_cut_short(value: Any, told: str) -> None:
    assert shorten_value(value) == told
