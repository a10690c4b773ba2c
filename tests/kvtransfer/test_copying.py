"""Chunks of several migrations in one transfer."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.core.config import MigrationConfig
from kvmig.core.errors import MigrationRefused, TransportError
from kvmig.kvtransfer.context import LlumletPort, SourceContext
from kvmig.kvtransfer.copying import ChunkBatcher, QueuedChunk, SharedSlot
from kvmig.kvtransfer.messages import Bundle, Chunk
from kvmig.kvtransfer.transports.base import AnnounceChunk, StagingPool, TransportChannel
from kvmig.kvtransfer.transports.tcp import TcpStaging
from kvmig.rpc.messages import RpcMessage
from tests.support.fake_cluster import cluster
from tests.support.fake_engine import BLOCK_BYTES, FakeEngine
from tests.support.waiting import until

MOST = 8
"""Blocks of a slot."""


class Line:
    """A batcher, and what it has sent."""

    def __init__(self, slots: int = 2, timeout_s: float = 5.0) -> None:
        self.engine = FakeEngine()
        self.engine.memory[:] = bytes(number % 251 for number in range(len(self.engine.memory)))
        self.staging: StagingPool = TcpStaging(slots, MOST * BLOCK_BYTES)
        config = MigrationConfig(
            chunk_bytes=MOST * BLOCK_BYTES, chunk_ms=2.0, reply_timeout_ms=timeout_s * 1e3
        )
        context = SourceContext(
            cast("LlumletPort", self), self.engine, config, {"tcp": self.staging}
        )
        context.sizer.observe(MOST * BLOCK_BYTES, 1e-6)
        self.batcher = ChunkBatcher(context, "b")
        self.said: list[list[Chunk]] = []
        self.bytes: dict[tuple[str, int], bytes] = {}
        self.shares: list[SharedSlot] = []

    def send_to(self, endpoint: str, message: RpcMessage, payload: Any) -> None:
        assert isinstance(message, Chunk | Bundle)
        chunks = [message] if isinstance(message, Chunk) else message.chunks
        self.said.append(chunks)
        for chunk in chunks:
            end = chunk.offset + chunk.nbytes
            self.bytes[chunk.mid, chunk.first] = bytes(payload[0][chunk.offset : end])

    def part(self, mid: str, first: int, blocks: list[int]) -> QueuedChunk:
        channel = self.staging.channel("")
        return QueuedChunk(mid, 1, first, blocks, self.staging, channel, self.shares.append)

    def add(self, mid: str, blocks: list[int], first: int = 0) -> QueuedChunk:
        part = self.part(mid, first, blocks)
        self.batcher.add(part)
        return part

    def names(self) -> list[list[str]]:
        return [[chunk.mid for chunk in chunks] for chunks in self.said]


async def test_what_waits_meanwhile_goes_with_the_next_transfer() -> None:
    line = Line()
    first = line.add("a", [0])
    line.engine.before = lambda method: asyncio.sleep(0.01)
    await asyncio.sleep(0.002)
    others = [line.add("b", [1, 2]), line.add("c", [3])]
    await asyncio.gather(first.sent, *(part.sent for part in others))
    assert line.names() == [["a"], ["b", "c"]]
    assert [first.fused, *(part.fused for part in others)] == [False, True, True]
    assert line.bytes["c", 0] == bytes(line.engine.memory[3 * BLOCK_BYTES : 4 * BLOCK_BYTES])


async def test_a_slot_is_free_when_the_last_chunk_in_it_is_done() -> None:
    line = Line()
    await asyncio.gather(*(line.add(name, [0]).sent for name in "ab"))
    assert line.names() == [["a", "b"]]
    line.shares[0].drop()
    assert line.staging.held == 1
    line.shares[1].drop()
    assert line.staging.held == 0


async def test_more_than_a_slot_holds_goes_later() -> None:
    line = Line()
    parts = [line.add(name, list(range(5))) for name in "abc"]
    await asyncio.gather(parts[0].sent, parts[1].sent)
    line.shares[0].drop()
    await parts[2].sent
    assert line.names() == [["a"], ["b"], ["c"]]


async def test_where_slots_are_not_shared_each_chunk_goes_alone() -> None:
    line = Line()
    line.staging.fuses = False
    await asyncio.gather(*(line.add(name, [0]).sent for name in "ab"))
    assert line.names() == [["a"], ["b"]]


async def test_a_copy_that_fails_ends_those_in_it_and_no_others() -> None:
    line = Line()

    async def fail(method: str) -> None:
        raise OSError("no such block")

    line.engine.before = fail
    parts = [line.add(name, [0]) for name in "ab"]
    for part in parts:
        with pytest.raises(OSError, match="no such block"):
            await part.sent
    assert line.staging.held == 0
    line.engine.before = line.engine._nothing
    await line.add("c", [0]).sent
    assert line.names() == [["c"]]


class Mapped(bytearray):
    """A buffer of which one can tell whether anybody has it."""


@pytest.mark.parametrize("why", [TransportError("it is gone"), None], ids=["gone", "too late"])
async def test_nobody_has_the_buffer_of_a_transfer_that_failed(
    monkeypatch: pytest.MonkeyPatch, why: Exception | None
) -> None:
    """Else memory of a GPU whose process has ended stays, as long as no garbage is collected."""
    line = Line(timeout_s=0.05)
    buffers = list[weakref.ref[Mapped]]()

    async def buffer(self: TransportChannel, slot: int) -> memoryview:
        mapped = Mapped(MOST * BLOCK_BYTES)
        buffers.append(weakref.ref(mapped))
        return memoryview(mapped)

    async def push(self: TransportChannel, chunk: Chunk, announce: AnnounceChunk) -> None:
        if why is not None:
            raise why
        await asyncio.Event().wait()

    channel = type(line.staging.channel(""))
    monkeypatch.setattr(channel, "buffer", buffer)
    monkeypatch.setattr(channel, "push", push)
    gc.disable()
    try:
        part = line.add("a", [0])
        with pytest.raises((TransportError, TimeoutError)):
            await part.sent
        assert [one() for one in buffers] == [None]
    finally:
        gc.enable()


async def test_what_is_withdrawn_is_not_sent() -> None:
    line = Line()
    kept, unwanted = line.add("a", [0]), line.add("b", [1])
    assert line.batcher.withdraw(unwanted)
    await kept.sent
    assert not line.batcher.withdraw(kept)
    assert line.names() == [["a"]]


async def test_without_a_free_slot_all_that_wait_are_refused() -> None:
    line = Line(slots=1, timeout_s=0.02)
    await line.add("a", [0]).sent
    parts = [line.add(name, [0]) for name in "bc"]
    for part in parts:
        with pytest.raises(MigrationRefused, match="no free staging slot"):
            await part.sent


async def test_closing_cancels_what_waits() -> None:
    line = Line(slots=1)
    await line.add("a", [0]).sent
    part = line.add("b", [0])
    await asyncio.sleep(0)
    await line.batcher.close()
    assert part.sent.cancelled()
    line.shares[0].drop()
    assert line.staging.held == 0


SIZES = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, MOST)), max_size=20)


@given(SIZES, st.integers(1, 3))
def test_each_chunk_goes_once_in_order_and_no_slot_is_too_full(
    sizes: list[tuple[str, int]], slots: int
) -> None:
    async def go() -> None:
        line, firsts = Line(slots), dict.fromkeys("abcd", 0)
        wanted: dict[tuple[str, int], list[int]] = {}
        parts = []
        for name, size in sizes:
            wanted[name, firsts[name]] = list(range(firsts[name], firsts[name] + size))
            parts.append(line.add(name, wanted[name, firsts[name]], firsts[name]))
            firsts[name] += size
        while not all(part.sent.done() for part in parts):
            while line.shares:
                line.shares.pop().drop()
            await asyncio.sleep(0)
        while line.shares:
            line.shares.pop().drop()
        for chunks in line.said:
            assert sum(chunk.nbytes for chunk in chunks) <= MOST * BLOCK_BYTES
        for name in "abcd":
            mine = [chunk.first for chunks in line.said for chunk in chunks if chunk.mid == name]
            assert mine == [first for of, first in wanted if of == name]
        for key, blocks in wanted.items():
            begin, end = blocks[0] * BLOCK_BYTES, (blocks[-1] + 1) * BLOCK_BYTES
            assert line.bytes[key] == bytes(line.engine.memory[begin:end])
        assert line.staging.held == 0

    asyncio.run(go())


NAMES = ("r", "s", "t", "u")


Hook = Callable[[str], Coroutine[Any, Any, None]]


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeEngine, Hook]:
    """A source with all of NAMES, whose first copy waits until a chunk of each is there."""
    source = FakeEngine(num_blocks=400)
    for name in NAMES[1:]:
        source.start(name)
    added: list[QueuedChunk] = []
    add = ChunkBatcher.add

    def noted(self: ChunkBatcher, chunk: QueuedChunk) -> None:
        added.append(chunk)
        add(self, chunk)

    async def before(method: str) -> None:
        if method == "gather" and source.calls.count("gather") == 1:
            await until(lambda: len(added) == len(NAMES))

    monkeypatch.setattr(ChunkBatcher, "add", noted)
    source.before = before
    return source, before


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_requests_that_move_together_share_transfers(
    transport: Any, together: tuple[FakeEngine, Hook]
) -> None:
    source, _ = together
    async with cluster(source=source, transport=transport) as them:
        reports = await asyncio.gather(*(them.move(name) for name in NAMES))
        assert [report.state for report in reports] == ["committed"] * 4
        assert [them.owners(name) for name in NAMES] == ["b"] * 4
        assert any(isinstance(message, Bundle) for message in them.b.heard)
        assert sum(report.fused_chunks for report in reports) >= 2


async def test_a_corrupt_chunk_ends_its_own_migration_only(
    together: tuple[FakeEngine, Hook],
) -> None:
    source, wait = together
    async with cluster(source=source) as them:

        async def corrupt(method: str) -> None:
            await wait(method)
            source.corrupt = method == "gather" and source.calls.count("gather") == 2

        source.before = corrupt
        reports = await asyncio.gather(*(them.move(name) for name in NAMES))
        assert sorted(report.reason for report in reports) == ["", "", "", "corrupt"]
        for name, report in zip(NAMES, reports, strict=True):
            assert them.owners(name) == ("a" if report.reason else "b")


async def test_a_client_that_leaves_takes_no_other_request_with_it(
    together: tuple[FakeEngine, Hook],
) -> None:
    source, wait = together
    async with cluster(source=source) as them:

        async def leave(method: str) -> None:
            await wait(method)
            if method == "gather":
                them.a.migrations.cancel_request("t", "aborted_by_client")

        source.before = leave
        reports = await asyncio.gather(*(them.move(name) for name in NAMES))
        assert [report.state for report in reports] == [
            "committed", "committed", "aborted", "committed",
        ]  # fmt: skip
