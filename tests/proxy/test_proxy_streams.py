"""What goes through the proxy: streams as they come, slow readers, and deployments that die."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvmig.proxy.messages import KeyUpdates, ModelRoute
from kvmig.proxy.relay import ChunkedFraming, UpstreamProtocolError, parse_head
from tests.support.certificates import BOTH, Authority
from tests.support.proxy_site import EVENT, Answer, Got, Site, key, says_ok_after, site
from tests.support.waiting import until

STREAM = {"model": "count", "stream": True}


async def streamed(door: Site, path: str = "/v1/chat/completions") -> bytes:
    """The whole of a stream."""
    return bytes((await door.ask(STREAM, path)).content)


# -- framing


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_chunks_are_followed_however_they_come_apart(size: int) -> None:
    framing = ChunkedFraming()
    wire = b"5\r\n0\r\n\r\n\r\nA;x=y\r\n0123456789\r\n0\r\ntrailer: 1\r\n\r\n"
    ends = []
    for at in range(0, len(wire), size):
        assert not framing.ended
        framing.feed(wire[at : at + size])
        if framing.whole:
            ends.append(min(len(wire), at + size))
    assert framing.ended
    if size == 1:
        assert ends == [10, 29]


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=20), max_size=5),
    ends=st.sampled_from([b"\r\n", b";x=y\r\n", b" \r\n"]),
    cuts=st.lists(st.integers(0, 200), max_size=6),
)
@example(chunks=[b"d"], ends=b" \r\n", cuts=[3])  # "1 \r" has no line's end
def test_chunks_end_where_they_end_in_pieces_of_any_size(
    chunks: list[bytes], ends: bytes, cuts: list[int]
) -> None:
    wire = b"".join(b"%x%s%s\r\n" % (len(one), ends, one) for one in (*chunks, b""))
    bytewise, pieces = ChunkedFraming(), ChunkedFraming()
    for start, end in pairwise(sorted({0, *(min(cut, len(wire)) for cut in cuts), len(wire)})):
        for at in range(start, end):
            bytewise.feed(wire[at : at + 1])
        pieces.feed(wire[start:end])
        assert (pieces.whole, pieces.ended) == (bytewise.whole, bytewise.ended)
    assert pieces.ended


@pytest.mark.parametrize("line", [b"data: 1", b"-5", b""])
def test_what_is_no_chunk_is_said_to_be_none(line: bytes) -> None:
    with pytest.raises(UpstreamProtocolError, match="a chunk begins with"):
        ChunkedFraming().feed(line + b"\r\n0\r\n")


def test_a_head_that_is_none_is_said_to_be_none() -> None:
    with pytest.raises(UpstreamProtocolError, match="its answer begins with"):
        parse_head(b"SSH-2.0-OpenSSH")


# -- streams


@BOTH
async def test_events_reach_the_client_while_the_stream_goes_on(
    tmp_path: Path, authority: Authority | None
) -> None:
    read = asyncio.Event()

    async def waits(got: Got) -> None:
        got.events()
        got.chunk()
        await read.wait()
        got.chunk(b"data: [DONE]\n\n")
        got.last()

    async with (
        site(tmp_path, authority=authority) as door,
        door.deployment(waits),
        door.client() as client,
    ):
        async with client.stream("POST", "/v1/completions", json=STREAM) as answer:
            parts = answer.aiter_bytes()
            assert await anext(parts) == EVENT
            read.set()
            assert await anext(parts) == b"data: [DONE]\n\n"
        again = await client.get("/health")  # on the same connection
    assert again.status_code == 200


async def begins(got: Got) -> None:
    """A stream that never ends."""
    got.events()
    got.chunk()
    await asyncio.Event().wait()


async def never(got: Got) -> None:
    await asyncio.Event().wait()


@BOTH
@pytest.mark.parametrize("answer", [begins, never])
async def test_a_client_that_leaves_takes_its_request_with_it(
    tmp_path: Path, answer: Answer, authority: Authority | None
) -> None:
    async with site(tmp_path, authority=authority) as door, door.deployment(answer) as there:
        _, writer = await door.connect(door.call(STREAM))
        await until(lambda: there.got)
        writer.close()
        await until(lambda: there.left)
        await until(lambda: door.door.counts.states() == {"count": (0, 0)})


@BOTH
async def test_a_client_that_does_not_read_stops_its_deployment(
    tmp_path: Path, authority: Authority | None
) -> None:
    most = 64 << 20
    sent = 0

    async def floods(got: Got) -> None:
        nonlocal sent
        got.events()
        while sent < most:
            got.chunk(EVENT * 1000)
            sent += len(EVENT) * 1000
            await got.writer.drain()
        got.last()

    async with site(tmp_path, authority=authority) as door, door.deployment(floods):
        reader, writer = await door.connect(door.call(STREAM))
        await reader.readuntil(b"\r\n\r\n")
        before = -1
        while before != sent:  # until nothing moves any more
            before = sent
            await asyncio.sleep(0.2)
        stood_at = sent
        while not (await reader.read(1 << 20)).endswith(b"0\r\n\r\n"):
            pass
        writer.close()
    assert stood_at < most / 2
    assert sent >= most


# -- deployments that die


async def test_a_stream_whose_deployment_dies_between_two_events_ends_with_an_error(
    door: Site,
) -> None:
    async def dies(got: Got) -> None:
        got.events()
        got.chunk()

    async with door.deployment(dies):
        content = await streamed(door)
    assert content.startswith(EVENT + b'data: {"error":{"message":"the model\'s deployment ended')
    assert content.endswith(b"\n\ndata: [DONE]\n\n")


async def test_a_stream_of_messages_ends_with_an_error_of_their_kind(door: Site) -> None:
    async def dies(got: Got) -> None:
        got.events()

    async with door.deployment(dies):
        content = await streamed(door, "/v1/messages")
    assert content.startswith(b'event: error\ndata: {"type":"error","error":{"type":"api_error",')


@pytest.mark.parametrize("part", [b"20\r\ndata: {", b"5", b"0\r\n"])
async def test_a_stream_that_breaks_within_an_event_breaks_for_the_client(
    door: Site, part: bytes
) -> None:
    async def dies(got: Got) -> None:
        got.events()
        got.chunk()
        got.writer.write(part)

    async with door.deployment(dies):
        with pytest.raises(httpx.RemoteProtocolError):
            await streamed(door)


async def test_an_answer_that_is_too_short_breaks_for_the_client(door: Site) -> None:
    async def dies(got: Got) -> None:
        got.head("content-type: application/json", "content-length: 100")
        got.writer.write(b"{")

    async with door.deployment(dies):
        with pytest.raises(httpx.RemoteProtocolError):
            await door.ask()


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\n", b"SSH-2.0\r\n\r\n"])
async def test_a_deployment_that_breaks_off_before_its_answer_is_said_to(
    door: Site, said: bytes
) -> None:
    async def breaks_off(got: Got) -> None:
        got.writer.write(said)

    async with door.deployment(breaks_off) as there:
        answer = await door.ask()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "deployment_ended"
    assert "retry-after" in answer.headers
    assert len(there.got) == 1  # it may have begun: nobody asks twice


# -- deployments that hang


async def test_a_call_whose_deployment_hangs_is_answered_when_a_start_would_have_been_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmig.proxy.app.LOOK_S", 0.05)

    async def hangs(got: Got) -> None:
        await asyncio.sleep(30)

    async with site(tmp_path) as door, door.deployment(hangs) as there:
        asking = asyncio.create_task(door.ask())
        await until(lambda: there.got)
        door.tell(ModelRoute(name="count", state="starting", start_timeout_s=0.2))
        async with asyncio.timeout(5):
            answer = await asking
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "deployment_silent"
    assert "count has not served for 0.2 s" in answer.json()["error"]["message"]
    assert there.left == 1


async def test_a_slow_answer_of_a_deployment_that_is_replaced_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmig.proxy.app.LOOK_S", 0.02)

    async with site(tmp_path) as door, door.deployment(says_ok_after(0.5)) as there:
        asking = asyncio.create_task(door.ask())
        await until(lambda: there.got)
        door.tell(ModelRoute(name="count", state="cold", start_timeout_s=0.1))
        answer = await asking
    assert answer.status_code == 200


# -- revoked keys


async def test_a_stream_of_a_key_that_is_revoked_ends_and_others_go_on(door: Site) -> None:
    given, grant = door.add_key()
    go_on = asyncio.Event()

    async def waits(got: Got) -> None:
        got.events()
        got.chunk()
        await go_on.wait()
        got.chunk()
        got.last()

    async with door.deployment(waits) as there:
        other = asyncio.create_task(streamed(door))
        async with (
            door.client(given) as client,
            client.stream("POST", "/v1/completions", json=STREAM) as mine,
        ):
            parts = mine.aiter_bytes()
            assert await anext(parts) == EVENT
            door.door.apply(KeyUpdates(version=9, removed=(grant.prefix,)))
            last = await anext(parts)
        go_on.set()
        assert await other == EVENT * 2
    assert last.startswith(b'data: {"error":{"message":"no such API key"')
    assert there.left == 1


async def test_a_stream_ends_when_its_key_expires(door: Site) -> None:
    given, _ = door.add_key(expires=time.time() + 1.0)
    async with door.deployment(begins):
        said = (await door.ask(STREAM, given=given)).content
    assert said.startswith(EVENT)
    assert b"the API key has expired" in said


async def test_a_stream_ends_when_its_key_expires_though_the_clock_goes_back_an_hour(
    tmp_path: Path,
) -> None:
    began, back_s = time.time(), 0.0
    given, grant = key(expires=began + 1.0)

    async def goes_on(got: Got) -> None:
        nonlocal back_s
        back_s = 3600.0
        got.events()
        got.chunk()
        await asyncio.Event().wait()

    async with (
        site(tmp_path, grant, wall=lambda: time.time() - back_s) as door,
        door.deployment(goes_on),
        door.client(given) as client,
        asyncio.timeout(30),
        client.stream("POST", "/v1/completions", json=STREAM) as mine,
    ):
        said = b"".join([part async for part in mine.aiter_bytes()])
    assert b"the API key has expired" in said


async def test_a_call_that_waits_ends_when_its_key_is_revoked(door: Site) -> None:
    given, grant = door.add_key()
    door.tell(ModelRoute(name="count", state="cold"))
    call = asyncio.create_task(door.ask(given=given))
    await until(lambda: door.door.hold.waiting("count"))
    door.door.apply(KeyUpdates(version=9, removed=(grant.prefix,)))
    assert (await call).status_code == 401
