"""What comes over a control socket is a message, or refused and counted; nobody else suffers."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.controlplane.messages import (
    ClusterMessage,
    ListedRequests,
    LoadReport,
    Welcome,
)
from kvmig.core.errors import PeerError, TransportError
from kvmig.kvtransfer.destination_machine import MachineTombstones, SourceMessage
from kvmig.kvtransfer.messages import (
    Abort,
    Aborted,
    Bundle,
    Chunk,
    ChunkDone,
    Commit,
    Committed,
    FirstToken,
    PeerMessage,
    Refused,
    Reserve,
    Reserved,
)
from kvmig.rpc.codec import MessageCodec
from kvmig.rpc.messages import Hello, RpcMessage
from kvmig.rpc.zmq_sockets import RpcClient
from scripts.corpus import TYPES, example, recorded
from tests.controlplane.test_llumlet_loops import SECRET, FrontEnd, Toy, llumlet
from tests.support import fake_llumlet
from tests.support.fake_cluster import cluster
from tests.support.inside import departures, socket_of

CODEC = MessageCodec(ClusterMessage | PeerMessage)
VALID = [recorded(example(kind)) for kind in TYPES]
ODD: list[Any] = [
    None,
    -1,
    2**63,
    1.5,
    "x" * 100,
    b"\xff",
    [],
    [[]],
    {},
    {"a": 1},
    True,
    float("nan"),
]

MUTATED = st.builds(
    lambda data, at, new, cut: data[: at % len(data)] + new + data[(at + cut) % len(data) :],
    st.sampled_from(VALID),
    st.integers(0, 10_000),
    st.binary(max_size=8),
    st.integers(0, 8),
)


@st.composite
def retyped(draw: st.DrawFn) -> bytes:
    """A message in which a field, or one deeper down, is something else or missing."""
    whole = msgspec.msgpack.decode(draw(st.sampled_from(VALID)))
    inside: dict[str, Any] = whole
    while True:
        name = draw(st.sampled_from(sorted(inside)))
        if not (isinstance(inside[name], dict) and inside[name] and draw(st.booleans())):
            break
        inside = inside[name]
        if any(not isinstance(key, str) for key in inside):
            return recorded(example(Hello))
    if draw(st.booleans()):
        inside[name] = draw(st.sampled_from(ODD))
    else:
        del inside[name]
    return msgspec.msgpack.encode(whole)


@given(st.one_of(st.binary(max_size=300), MUTATED, retyped()))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    with suppress(PeerError):
        message, _ = CODEC.decode([memoryview(data)])
        assert isinstance(message, RpcMessage)


@pytest.mark.parametrize("data", VALID, ids=[kind.__name__ for kind in TYPES])
def test_a_truncated_message_is_refused(data: bytes) -> None:
    for end in range(len(data)):
        with pytest.raises(PeerError) as refused:
            CODEC.decode([memoryview(data[:end])])
        assert refused.value.reason == "unreadable"


def test_a_length_that_lies_takes_no_memory() -> None:
    for lie in (b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"):
        with pytest.raises(PeerError):
            CODEC.decode([memoryview(lie + b"\x81\xa4type")])


FROM_A_SOURCE = (Reserve, Chunk, Commit, Abort)


@given(st.lists(st.sampled_from(FROM_A_SOURCE), max_size=12), st.integers(0, 2))
def test_a_tombstone_bears_any_message_in_any_order(
    kinds: list[type[RpcMessage]], names: int
) -> None:
    tombstones = MachineTombstones()
    for at, kind in enumerate(kinds):
        mid = str(at % (names + 1))
        message = msgspec.structs.replace(example(kind), mid=mid)
        assert isinstance(message, SourceMessage)
        for action in tombstones.answer(mid, message):
            assert type(action).__name__ in ("SendAnswer", "ReserveBlocks", "FreeBlocks")
    assert not tombstones.fence(("text", 7))


async def test_a_peer_that_sends_garbage_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    rng = random.Random(1)
    async with llumlet(Toy()) as it:
        front, rogue = FrontEnd(it), RpcClient(it.endpoint, SECRET, "peer", "rogue", ClusterMessage)
        await front.hear(Welcome)
        for _ in range(10):
            for data in VALID:
                await socket_of(rogue).send_multipart([_spoiled(rng, data), rng.randbytes(20)])
        rogue.send(example(ListedRequests))  # a message that isn't for llumlets
        refused: Mapping[str, int] = {}
        while "unexpected" not in refused:
            report = await front.hear(LoadReport)
            assert isinstance(report, LoadReport)
            refused = report.refused
        assert refused["unreadable"] > 100
        assert await front.requests() == set()
        rogue.close()
        front.client.close()


def _spoiled(rng: random.Random, data: bytes) -> bytes:
    match rng.randrange(3):
        case 0:
            return rng.randbytes(rng.randrange(64))
        case 1:
            return data[: rng.randrange(len(data))]
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _chunk(mid: str) -> RpcMessage:
    return msgspec.structs.replace(example(Chunk), mid=mid)


@pytest.mark.parametrize("seed", range(3))
async def test_sessions_bear_any_message_in_any_order(seed: int) -> None:
    rng = random.Random(seed)
    async with cluster() as them:
        model = them.b.engine.layout.fingerprint
        for _ in range(300):
            message: RpcMessage = example(rng.choice((*FROM_A_SOURCE, Bundle)))
            names: dict[str, Any] = {"mid": str(rng.randrange(4))}
            if isinstance(message, Bundle):
                names = {"chunks": [_chunk(str(rng.randrange(4))) for _ in range(rng.randrange(4))]}
            if isinstance(message, Reserve | Commit):
                names["request_id"] = f"r{rng.randrange(3)}"
            if isinstance(message, Reserve):
                names["model"] = model
            message = msgspec.structs.replace(message, **names)
            with suppress(PeerError, TransportError):
                them.b.migrations.receive(b"nobody", message, [])
            if rng.random() < 0.1:
                await asyncio.sleep(0)
        while them.b.migrations.incoming:
            them.skip_lease()
            await asyncio.sleep(0.001)
        assert them.b.engine.reserved == {}
        assert (await them.move()).state == "committed"


LAST_WORDS = (Committed, Refused, Aborted)
"""Past the point of no return these decide: nothing tells a destination's lie from its word."""
WAITED_LONG = 2000
"""Turns of the event loop, each with an answer or none."""
FROM_A_DESTINATION = (Reserved, ChunkDone, FirstToken, *LAST_WORDS)


def _answer(rng: random.Random, kind: type[RpcMessage], mid: str) -> RpcMessage:
    fields: dict[str, Any] = {"mid": mid}
    if kind is Reserved:
        fields |= {"stage": rng.randrange(4), "hit_blocks": rng.choice([-1, 0, 1, 10**9])}
        fields |= {"transport": rng.choice(["shm", "tcp", "text"])}
    elif kind is ChunkDone:
        fields |= {"slot": rng.randrange(-1, 3)}
    return msgspec.structs.replace(example(kind), **fields)


@pytest.mark.parametrize("seed", range(3))
async def test_a_source_bears_any_answer_at_any_time(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    rng = random.Random(seed)
    async with cluster() as them:
        migrations, endpoint = them.a.migrations, them.b.server.endpoint
        for number in range(20):
            request_id = f"r{number}"
            them.a.engine.start(request_id)
            moving = asyncio.ensure_future(them.move(request_id))
            for turn in count(1):
                if moving.done():
                    break
                if turn % WAITED_LONG == 0:
                    them.skip_answer()
                kind = rng.choice(FROM_A_DESTINATION)
                for mid, session in departures(migrations).items():
                    decided = session.machine.beyond and kind in LAST_WORDS
                    if not decided and rng.random() < 0.02:
                        migrations.receive_reply(endpoint, _answer(rng, kind, mid))
                await asyncio.sleep(0)
            state = (await moving).state
            assert them.owners(request_id) == ("b" if state == "committed" else "a")
            (them.b if state == "committed" else them.a).engine.end(request_id)
        while them.b.migrations.incoming:
            them.skip_lease()
            await asyncio.sleep(0.001)
        assert them.b.engine.reserved == {}
        report = await them.move()
        while report.reason == "busy":  # with the end of the others, which b has yet to hear of
            report = await them.move()
        assert report.state == "committed", report.reason


@pytest.mark.parametrize("seed", range(3))
async def test_a_front_end_bears_any_message_of_an_instance(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(seed)
    async with fake_llumlet.cluster() as it:
        serving = await it.submit()
        (rogue,) = (one for one in it.llumlets if one is not serving)
        for start in range(10):
            for kind in rng.sample(TYPES, 10):
                frames = [rng.randbytes(rng.randrange(20)) for _ in range(rng.randrange(3))]
                with suppress(TransportError):  # it was disconnected
                    rogue.send(example(kind), frames)
            serving.step(("r", 0, start, [start]))
            await it.front.until(lambda: it.front.tokens.get("r", [])[-1:] == [start])  # noqa: B023
        assert it.front.tokens["r"] == list(range(10))
    assert "handling its messages failed" not in caplog.text
