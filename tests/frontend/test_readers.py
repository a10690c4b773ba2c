"""Clients that don't read: what of theirs waits is bounded, and others aren't slowed."""

from __future__ import annotations

import asyncio

from kvmig.asgi.call import HttpCall
from kvmig.core.config import HttpConfig
from kvmig.frontend.requests import LiveRequest
from kvmig.frontend.splice import StreamSplicer
from tests.support.inside import open_queues
from tests.support.stubbed_front import Stubbed, stubbed_front
from tests.support.waiting import until

TIMEOUT_S = 60.0
RATE = 2000.0
"""Tokens a second of each stream."""
LIMIT = 500
SMALL_BUFFER = 4096


def made(tokens: int = 0) -> tuple[HttpCall, LiveRequest]:
    call = HttpCall()
    request = LiveRequest("r", "r", "r", StreamSplicer("i0"), 1, 0, (), 0.0, call=call)
    request.splicer.next = tokens
    return call, request


def test_tokens_count_from_the_moment_at_which_the_client_stopped_reading() -> None:
    call, request = made(tokens=100)
    assert call.unread(request) == 0
    call.stopped_reading()
    assert call.unread(request) == 0
    request.splicer.next = 110
    assert call.unread(request) == 10


def test_who_reads_again_begins_anew() -> None:
    call, request = made()
    call.stopped_reading()
    assert call.unread(request) == 0
    call.reads_again()
    request.splicer.next = 50
    assert call.unread(request) == 0
    call.stopped_reading()
    assert call.unread(request) == 0


async def tokens_of(front: Stubbed, count: int) -> None:
    """A client that reads gets all of its tokens."""
    reader, writer = await front.call(count)
    got = 0
    async with asyncio.timeout(TIMEOUT_S):
        while got < count:
            got += (await reader.read(1 << 16)).count(b"~")
    writer.close()


async def test_a_client_that_never_reads_loses_its_request_and_holds_nothing_more() -> None:
    http = HttpConfig(max_unread=LIMIT, send_timeout_s=600.0)
    async with stubbed_front(http) as front:
        reader, writer = await front.call(1_000_000, receive_bytes=SMALL_BUFFER)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        front.metronome.set(RATE)
        await until(lambda: bool(open_queues(front.queues)))
        (queue,) = open_queues(front.queues)
        await until(lambda: front.counted("kvmig_requests_unread_total") == 1)
        waiting = queue.qsize()
        # One look a tick finds it: as many tokens more as come in two.
        assert LIMIT <= waiting < LIMIT + 20 * RATE
        assert len(front.engine.group) <= 1
        await tokens_of(front, 100)
        assert len(front.engine.group) == 0
        assert front.router.live() == []
        assert queue.qsize() <= waiting + 1
        writer.transport.abort()


async def test_a_late_reader_gets_what_it_had_and_why_there_is_no_more() -> None:
    async with stubbed_front(HttpConfig(max_unread=LIMIT, send_timeout_s=600.0)) as front:
        reader, writer = await front.call(1_000_000, receive_bytes=SMALL_BUFFER)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        front.metronome.set(RATE)
        await until(lambda: front.counted("kvmig_requests_unread_total") == 1)
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        said = b""
        async with asyncio.timeout(TIMEOUT_S):
            while b"[DONE]" not in said[-100:]:
                said += await reader.read(1 << 16)
        assert b"its client has not read for more than 500 tokens (--max-unread)" in said
        writer.close()


async def test_a_connection_whose_client_never_reads_is_closed_in_time() -> None:
    async with stubbed_front(HttpConfig(max_unread=0, send_timeout_s=0.5)) as front:
        reader, writer = await front.call(1_000_000, receive_bytes=SMALL_BUFFER)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        front.metronome.set(RATE)
        await until(lambda: front.engine.group.began != {})
        await until(lambda: len(front.engine.group) == 0)
        assert front.router.live() == []
        await until(lambda: not open_queues(front.queues))
        writer.transport.abort()


async def test_a_client_that_reads_slowly_keeps_its_stream() -> None:
    async with stubbed_front(HttpConfig(max_unread=LIMIT, send_timeout_s=600.0)) as front:
        reader, writer = await front.call(3000, receive_bytes=SMALL_BUFFER)
        front.metronome.set(RATE)
        got = b""
        async with asyncio.timeout(TIMEOUT_S):
            while b"[DONE]" not in got[-100:]:
                got += await reader.read(1 << 15)
                await asyncio.sleep(0.01)
        assert got.count(b"~") == 3000
        writer.close()
