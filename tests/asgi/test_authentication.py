"""Who has no key costs those who have one nothing, whatever they send."""

from __future__ import annotations

import asyncio
from contextlib import closing

import httpx
import pytest

from kvmig.asgi.access import access
from kvmig.core.config import BODIES, HttpConfig
from tests.support.stubbed_front import Stubbed, stubbed_front

KEY = "the key of a tenant"
TIMEOUT_S = 30.0
MAX_BODY = 100_000


def head(length: int, *lines: str) -> bytes:
    first = "POST /v1/completions HTTP/1.1"
    return "\r\n".join([first, "host: here", f"content-length: {length}", *lines, "", ""]).encode()


async def post(front: Stubbed, path: str, key: str = "", content: bytes = b"{}") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with front.client(headers) as client:
        return await client.post(path, content=content)


async def test_bodies_of_those_without_a_key_take_no_room_from_those_with_one() -> None:
    async with stubbed_front(HttpConfig(max_body=MAX_BODY), api_keys=[KEY]) as front:
        writers = []
        for _ in range(BODIES):
            _, writer = await asyncio.open_connection("127.0.0.1", front.port)
            writer.write(head(MAX_BODY) + b" " * (MAX_BODY - 1))
            await writer.drain()
            writers.append(writer)
        await asyncio.sleep(0.2)  # for them to be read, if they are
        answer = await post(front, "/v1/models/none", KEY, b" " * 100)
        for writer in writers:
            writer.close()
        assert answer.status_code == 404


async def test_a_call_without_a_key_is_answered_before_its_body_is_asked_for() -> None:
    async with stubbed_front(HttpConfig(), api_keys=[KEY]) as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        with closing(writer):
            writer.write(head(1000, "expect: 100-continue"))
            async with asyncio.timeout(TIMEOUT_S):
                answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert b"www-authenticate: Bearer" in answer
        assert front.counted("kvmig_http_refused_total", status="401") == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/kvmig/v1/migrations"])
async def test_who_sends_a_body_with_a_wrong_key_sees_the_401(path: str) -> None:
    async with stubbed_front(HttpConfig(), api_keys=[KEY]) as front:
        answer = await post(front, path, "another key", b"x" * 500_000)
        assert answer.status_code == 401
        assert answer.headers["connection"] == "close"
        assert answer.json()["error"]["message"] == "Unauthorized"


async def test_a_key_opens_what_it_is_for() -> None:
    async with stubbed_front(HttpConfig(), api_keys=[KEY]) as front:
        assert (await post(front, "/v1/completions", KEY)).status_code == 400


@pytest.mark.parametrize(
    ("method", "path", "asks"),
    [
        ("GET", "/health", False),
        ("HEAD", "/metrics", False),
        ("GET", "/v1/models", True),
        ("POST", "/health", True),
        ("POST", "/score", True),
        ("PUT", "/anything", True),
        ("GET", "/kvmig/v1/instances", True),
        ("OPTIONS", "/v1/completions", False),
    ],
)
def test_a_key_is_needed_for_all_but_what_everybody_may_read(
    method: str, path: str, asks: bool
) -> None:
    rules = access([KEY], "", "127.0.0.1")
    assert (rules.denied(method, path, {"host": "localhost"}) is not None) == asks
    assert rules.denied(method, path, {"authorization": f"Bearer {KEY}"}) is None
