"""People whose browsers read a byte a second cost the others nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Iterator

import httpx
import psutil
import pytest

from kvmig.core.background import cancel_tasks
from tests.support.fleets import PATH, ToyFleet, ask, counted

pytestmark = [pytest.mark.server, pytest.mark.long]

SLOW = 12
"""Readers of each address."""
WATCHED_S = 8.0
TOKENS = 400
MOST_GROWTH = 40 << 20
"""Bytes that a process may grow by: far less than what the slow ones have not read."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyFleet]:
    with ToyFleet(tmp_path_factory.mktemp("fleet")) as made:
        made.add_toy("count", flags=["--step-ms=10"], instances={"min": 2, "max": 2})
        made.until("models/count", serving=2)
        yield made


async def log_in(fleet: ToyFleet) -> tuple[str, str]:
    """A session's cookie, and its token."""
    async with httpx.AsyncClient(base_url=fleet.url, timeout=30) as http:
        answer = await http.post("/ui/login", data={"key": fleet.key, "next": "/ui/"})
        assert answer.status_code == 303
        cookie = "; ".join(f"{name}={value}" for name, value in http.cookies.items())
        page = (await http.get("/ui/", headers={"accept": "text/html"})).text
    found = re.search(r'name="csrf" value="([^"]+)"', page)
    assert found is not None
    return cookie, found[1]


@contextlib.asynccontextmanager
async def slow_readers(fleet: ToyFleet, head: str, body: bytes = b"") -> AsyncIterator[list[int]]:
    """Connections that ask for one address and read a byte a second; how much each has read."""
    read = [0] * SLOW
    tasks: list[asyncio.Task[None]] = []
    writers: list[asyncio.StreamWriter] = []

    async def follow(at: int, reader: asyncio.StreamReader) -> None:
        while piece := await reader.read(1):
            read[at] += len(piece)
            await asyncio.sleep(1)

    for at in range(SLOW):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", fleet.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=2)
        writers.append(writer)
        length = f"content-length: {len(body)}\r\n" if body else ""
        writer.write(f"{head}host: 127.0.0.1:{fleet.port}\r\n{length}\r\n".encode() + body)
        tasks.append(asyncio.create_task(follow(at, reader)))
    try:
        yield read
    finally:
        await cancel_tasks(*tasks)
        for writer in writers:
            writer.transport.abort()


def sizes(fleet: ToyFleet) -> dict[int, int]:
    """Bytes of memory of the server and the proxies."""
    words = ("kvmig.fleet.server", "kvmig.proxy")
    return {
        pid: psutil.Process(pid).memory_info().rss for one in words for pid in fleet.processes(one)
    }


async def text_of(fleet: ToyFleet, start: int) -> str:
    async with fleet.client() as client:
        answer = await client.post(PATH, json=ask("count", TOKENS, start=start))
    return str(answer.raise_for_status().json()["choices"][0]["text"])


async def followed(fleet: ToyFleet, cookie: str, for_s: float) -> list[str]:
    """Names of the events of a page whose browser reads as fast as it can."""
    text = ""
    headers = {"cookie": cookie, "accept": "text/event-stream"}
    async with (
        httpx.AsyncClient(base_url=fleet.url, timeout=30) as http,
        http.stream("GET", "/ui/live", headers=headers) as answer,
    ):
        assert answer.status_code == 200
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(for_s):
                async for part in answer.aiter_text():
                    text += part
    return re.findall(r"^event: (\w+)$", text, re.MULTILINE)


async def test_who_reads_a_byte_a_second_takes_no_answer_and_no_memory_from_the_others(
    fleet: ToyFleet,
) -> None:
    cookie, token = await log_in(fleet)
    own = f"cookie: {cookie}\r\naccept: text/html\r\n"
    chat = {
        "model": "count", "messages": [{"role": "user", "content": "Count from 17"}],
        "max_tokens": 4000, "stream": True,
    }  # fmt: skip
    written = f"content-type: application/json\r\nx-csrf-token: {token}\r\n"
    before = sizes(fleet)
    async with contextlib.AsyncExitStack() as stack:
        feeds = await stack.enter_async_context(
            slow_readers(fleet, f"GET /ui/live HTTP/1.1\r\n{own}")
        )
        for head in (
            f"GET /ui/models HTTP/1.1\r\n{own}", "GET /ui/static/playground.js HTTP/1.1\r\n"
        ):  # fmt: skip
            await stack.enter_async_context(slow_readers(fleet, head))
        await stack.enter_async_context(
            slow_readers(
                fleet, f"POST /ui/v1/chat/completions HTTP/1.1\r\n{own}{written}",
                json.dumps(chat).encode(),
            )
        )  # fmt: skip
        names, *texts = await asyncio.gather(
            followed(fleet, cookie, WATCHED_S), *(text_of(fleet, start) for start in range(8))
        )
        read = max(feeds)
        after = sizes(fleet)
    assert texts == [counted(TOKENS, start) for start in range(8)]
    assert names[0] == "picture"
    assert names.count("change") >= 4  # the picture goes on: it has a change each half second
    assert 0 < read < 200, "they have not been slow"
    grown = {pid: size - before[pid] for pid, size in after.items() if pid in before}
    assert max(grown.values()) < MOST_GROWTH, grown
