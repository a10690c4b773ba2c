"""Lanes: what the two ends agree on, whom an inbox lets in, and what a source does without one."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from threading import Thread

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvmig.core.errors import PeerError, TransportError
from kvmig.kvtransfer.messages import PAYLOAD_SLOT, Chunk, TransportOffer
from kvmig.kvtransfer.transports import lane, tcp
from kvmig.kvtransfer.transports.base import StagingPool, TransportInbox
from kvmig.kvtransfer.transports.lane import LaneReceiver, LaneSender, LaneTicket
from kvmig.kvtransfer.transports.lane_cipher import (
    HEADER_BYTES,
    KEY_BYTES,
    RECORD_BYTES,
    TAG_BYTES,
    RecordCipher,
    RecordHeader,
    make_hello,
    make_salt,
    read_hello,
)
from kvmig.kvtransfer.transports.select import TransportSite, open_offer, open_staging
from kvmig.rpc.codec import Frame, RefusalCounter
from tests.support.waiting import until

KEY = bytes(range(KEY_BYTES))
SALTS = b"r" * 32, b"s" * 32
SLOTS, SIZE = 2, 3 * RECORD_BYTES + 5
HERE = TransportSite(host="127.0.0.1")
WAIT_S = 5.0


@pytest.fixture(autouse=True)
def _no_chunk_goes_ahead_of_its_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is."""
    monkeypatch.setattr(tcp, "PATIENCE_S", WAIT_S)


@pytest.fixture
def refusals() -> RefusalCounter:
    return RefusalCounter()


@pytest.fixture
def memory() -> mmap.mmap:
    return mmap.mmap(-1, SLOTS * SIZE)


@pytest.fixture
def receiver(memory: mmap.mmap, refusals: RefusalCounter) -> Iterator[LaneReceiver]:
    made = LaneReceiver("127.0.0.1", memory, SLOTS, SIZE, refusals)
    yield made
    made.close()
    deadline = time.monotonic() + WAIT_S
    while not made.arrivals.ended and time.monotonic() < deadline:
        time.sleep(0.005)
    assert made.arrivals.ended


@pytest.fixture
def sender(receiver: LaneReceiver) -> Iterator[LaneSender]:
    made = LaneSender(receiver.ticket)
    yield made
    made.close()


# -- the bytes on the wire


@given(st.binary(min_size=1, max_size=200), st.data())
def test_a_record_with_one_bit_changed_does_not_open(data: bytes, draw: st.DataObject) -> None:
    header = RecordHeader(1, 0, len(data), 0, len(data)).encode()
    sealed = bytearray(len(data) + TAG_BYTES)
    RecordCipher(KEY, *SALTS).seal(header, memoryview(data), memoryview(sealed))
    wire = bytearray(header + sealed)
    bit = draw.draw(st.integers(0, 8 * len(wire) - 1))
    wire[bit // 8] ^= 1 << bit % 8
    out = bytearray(len(data))
    with pytest.raises(PeerError, match="isn't what was sent"):
        RecordCipher(KEY, *SALTS).open(
            bytes(wire[:HEADER_BYTES]), memoryview(wire)[HEADER_BYTES:], memoryview(out)
        )


@pytest.mark.parametrize("order", [(0, 0), (1, 0), (1, 1)])
def test_records_open_only_in_their_order_and_each_once(order: Sequence[int]) -> None:
    header, seals = RecordHeader(1, 0, 4, 0, 4).encode(), RecordCipher(KEY, *SALTS)
    records = [bytearray(4 + TAG_BYTES) for _ in range(2)]
    for record in records:
        seals.seal(header, memoryview(b"same"), memoryview(record))
    opens = RecordCipher(KEY, *SALTS)

    def opened(index: int) -> None:
        opens.open(header, memoryview(records[index]), memoryview(bytearray(4)))

    with pytest.raises(PeerError):
        deque(map(opened, order))


def test_a_record_of_one_connection_does_not_open_on_another() -> None:
    header, record = RecordHeader(1, 0, 4, 0, 4).encode(), memoryview(bytearray(4 + TAG_BYTES))
    RecordCipher(KEY, *SALTS).seal(header, memoryview(b"data"), record)
    for salts in ((make_salt(), SALTS[1]), (SALTS[0], make_salt())):
        with pytest.raises(PeerError):
            RecordCipher(KEY, *salts).open(header, record, memoryview(bytearray(4)))


def test_only_who_has_the_key_can_say_hello() -> None:
    ours, theirs = make_salt(), make_salt()
    assert read_hello(KEY, ours, make_hello(KEY, ours, theirs)) == theirs
    assert read_hello(KEY, ours, make_hello(bytes(KEY_BYTES), ours, theirs)) is None
    assert read_hello(KEY, make_salt(), make_hello(KEY, ours, theirs)) is None


@pytest.mark.parametrize("place", [(RECORD_BYTES + 1, 0, 2 * RECORD_BYTES), (8, 1, 8)])
def test_a_record_that_no_sender_makes_is_refused(place: tuple[int, int, int]) -> None:
    with pytest.raises(PeerError, match="a record of"):
        RecordHeader.decode(RecordHeader(1, 0, *place).encode())


def test_a_tickets_key_is_in_no_log() -> None:
    assert KEY.hex() not in repr(LaneTicket("127.0.0.1", 1, KEY.hex()))


# -- the two ends


def test_what_is_sent_is_in_its_slot(
    receiver: LaneReceiver, sender: LaneSender, memory: mmap.mmap
) -> None:
    for number, nbytes in enumerate((1, 4096, RECORD_BYTES, SIZE), start=1):
        data = bytes([number]) * nbytes
        sender.send(number, number % SLOTS, memoryview(data))
        receiver.arrivals.wait(number % SLOTS, number).result(WAIT_S)
        start = number % SLOTS * SIZE
        assert memory[start : start + nbytes] == data


def test_nothing_readable_crosses_the_wire() -> None:
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            peer, _ = server.accept()
            with peer:
                peer.sendall(SALTS[0])
                while part := peer.recv(1 << 16):
                    heard.extend(part)

        thread = Thread(target=listen)
        thread.start()
        made = LaneSender(LaneTicket("127.0.0.1", server.getsockname()[1], KEY.hex()))
        made.send(1, 0, memoryview(b"a tenant's prompt" * 1000))
        made.close()
        thread.join(WAIT_S)
    assert len(heard) > 17_000
    assert b"prompt" not in heard


@pytest.mark.parametrize("word", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64)])
def test_a_stranger_is_counted_and_the_source_comes_in_after_it(
    receiver: LaneReceiver,
    refusals: RefusalCounter,
    word: bytes,
) -> None:
    with socket.create_connection((receiver.ticket.host, receiver.ticket.port)) as stranger:
        stranger.sendall(word)
        made = LaneSender(receiver.ticket)
        made.send(1, 0, memoryview(b"x"))
        receiver.arrivals.wait(0, 1).result(WAIT_S)
        assert refusals.counts() == {"unauthenticated": 1}
        made.close()


def test_one_source_connects_and_nobody_after_it(
    receiver: LaneReceiver, sender: LaneSender
) -> None:
    sender.send(1, 0, memoryview(b"x"))
    receiver.arrivals.wait(0, 1).result(WAIT_S)
    with pytest.raises(TransportError, match="no connection to"):
        LaneSender(receiver.ticket)


@pytest.mark.parametrize(("slot", "nbytes"), [(SLOTS, 1), (0, SIZE + 1)])
def test_bytes_for_no_slot_end_the_lane(
    receiver: LaneReceiver, sender: LaneSender, refusals: RefusalCounter, slot: int, nbytes: int
) -> None:
    waits = receiver.arrivals.wait(0, 1)
    with contextlib.suppress(TransportError):  # it may break before all of it has left
        sender.send(1, slot, memoryview(bytearray(nbytes)))
    with pytest.raises(TransportError, match="for slot"):
        waits.result(WAIT_S)
    assert receiver.arrivals.ended
    assert sum(refusals.counts().values()) == 1


def test_who_waits_hears_of_the_end(receiver: LaneReceiver, sender: LaneSender) -> None:
    waits = receiver.arrivals.wait(1, 7)
    sender.close()
    with pytest.raises(TransportError, match="has ended"):
        waits.result(WAIT_S)
    with pytest.raises(TransportError, match="has ended"):
        receiver.arrivals.wait(0, 8).result(WAIT_S)


def test_a_source_that_stalls_within_a_record_is_given_up(
    receiver: LaneReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "STALL_S", 1.0)
    ticket = receiver.ticket
    with socket.create_connection((ticket.host, ticket.port)) as source:
        salt = source.recv(len(make_salt()), socket.MSG_WAITALL)
        source.sendall(make_hello(bytes.fromhex(ticket.key), salt, make_salt()))
        source.sendall(RecordHeader(1, 0, 100, 0, 100).encode() + b"half")
        with pytest.raises(TransportError, match="stalls in the middle"):
            receiver.arrivals.wait(0, 1).result(WAIT_S)


def test_a_source_that_never_comes_is_not_waited_for(
    memory: mmap.mmap, refusals: RefusalCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "TICKET_S", 0.05)
    made = LaneReceiver("127.0.0.1", memory, SLOTS, SIZE, refusals)
    with pytest.raises(TransportError, match="didn't connect"):
        made.arrivals.wait(0, 1).result(WAIT_S)


# -- the transport


async def test_chunks_of_several_migrations_travel_in_one_slot() -> None:
    staging, inbox = _ends()
    slot = await staging.acquire(1.0)
    channel = staging.channel(inbox.token)
    (await channel.buffer(slot))[:6] = b"abcdef"
    number = await _push(staging, inbox, slot, 6)
    parts = [Chunk("m", 0, 0, slot, 2, [], number=number, offset=offset) for offset in (0, 2, 4)]
    assert [bytes(await inbox.receive(one, None)) for one in parts] == [b"ab", b"cd", b"ef"]
    inbox.close()
    staging.close()


async def test_without_a_way_to_the_port_the_bytes_come_with_the_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    staging, inbox = _ends()
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = int(nobody.getsockname()[1])
    token = msgspec.json.encode(LaneTicket("127.0.0.1", port, KEY.hex())).decode()
    channel, slot = staging.channel(token), await staging.acquire(1.0)
    (await channel.buffer(slot))[:2] = b"ab"
    sent: list[Frame] = []

    def announce(payload: Sequence[Frame] = (), number: int = 0) -> None:
        sent.extend(payload)

    await channel.push(_chunk(slot, 2), announce)
    assert "go with their messages, which is slower: no connection" in caplog.text
    got = await inbox.receive(_chunk(PAYLOAD_SLOT, 2), memoryview(sent[0]))
    assert bytes(got) == b"ab"
    inbox.close()
    staging.close()


async def test_peers_of_an_earlier_version_use_the_messages() -> None:
    staging, inbox = _ends()
    old_inbox = open_offer([TransportOffer("tcp")], "tcp", HERE)
    assert old_inbox.token == ""
    slot = await staging.acquire(1.0)
    assert await _push(staging, old_inbox, slot, 2) == 0
    inbox.close()
    staging.close()


async def test_a_broken_lane_ends_its_inbox_and_the_next_one_works() -> None:
    staging, inbox = _ends()
    slot = await staging.acquire(1.0)
    await _push(staging, inbox, slot, 2)
    channel = staging.channel(inbox.token)
    inbox.close()
    await until(lambda: inbox.stale and channel.stale)
    again = open_offer([staging.offer()], "tcp", HERE)
    number = await _push(staging, again, slot, 2)
    await again.receive(replace(_chunk(slot, 2), number=number), None)
    again.close()
    staging.close()


def _ends() -> tuple[StagingPool, TransportInbox]:
    (staging,) = open_staging("tcp", "test", "a", SLOTS, 4096, HERE).values()
    return staging, open_offer([staging.offer()], "tcp", HERE)


def _chunk(slot: int, nbytes: int) -> Chunk:
    return Chunk("m", 0, 0, slot, nbytes, [])


async def _push(staging: StagingPool, inbox: TransportInbox, slot: int, nbytes: int) -> int:
    numbers: list[int] = []

    def announce(payload: Sequence[Frame] = (), number: int = 0) -> None:
        numbers.append(number)

    channel = staging.channel(inbox.token)
    async with asyncio.timeout(WAIT_S):
        await channel.buffer(slot)
        await channel.push(_chunk(slot, nbytes), announce)
    return numbers[0]
