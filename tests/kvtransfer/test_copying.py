"""Chunks of several migrations in one transfer."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine
from itertools import count, pairwise
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.core.config import MigrationConfig
from kvmig.core.errors import MigrationRefused, RequestGone, TransportError
from kvmig.kvtransfer.context import LlumletPort, SourceContext
from kvmig.kvtransfer.copying import BlockSender, ChunkBatcher, QueuedChunk, SharedSlot
from kvmig.kvtransfer.mailbox import ActionInterrupted, EventMailbox
from kvmig.kvtransfer.messages import Bundle, Chunk
from kvmig.kvtransfer.timeline import MigrationSpec, MigrationTimeline
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


class SlowLine(Line):
    """Copies and pushes of chunks of one block wait until a test lets them go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(slots=8)
        self.staging.fuses = False
        self.gates: dict[tuple[str, str], asyncio.Event] = {}
        self.begun: list[tuple[str, str]] = []
        self.most = 0
        """Transfers under way at once."""
        names = iter("abcdefgh")

        async def before(method: str) -> None:
            self.most = max(self.most, self.staging.held - len(self.shares))
            await self.reach(method, next(names))

        channel = type(self.staging.channel(""))
        push = channel.push

        async def slow_push(to: Any, chunk: Chunk, announce: AnnounceChunk) -> None:
            await self.reach("push", chunk.mid)
            await push(to, chunk, announce)

        self.engine.before = before
        monkeypatch.setattr(channel, "push", slow_push)

    async def reach(self, what: str, mid: str) -> None:
        self.begun.append((what, mid))
        if (gate := self.gates.get((what, mid))) is not None:
            await gate.wait()

    def hold(self, what: str, mid: str) -> asyncio.Event:
        return self.gates.setdefault((what, mid), asyncio.Event())


async def rest() -> None:
    """Until nothing goes on by itself."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_the_next_transfer_is_gathered_while_the_one_before_it_is_pushed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = SlowLine(monkeypatch)
    gate = line.hold("push", "a")
    parts = [line.add(name, [0]) for name in "abc"]
    await rest()
    assert sorted(line.begun) == [("gather", "a"), ("gather", "b"), ("push", "a")]
    gate.set()
    times = [await part.sent for part in parts]
    assert line.names() == [["a"], ["b"], ["c"]]
    assert times[1].gather < times[0].sent
    assert line.most == 2


async def test_a_copy_waits_behind_the_one_before_it_and_that_is_not_its_own_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = SlowLine(monkeypatch)
    gates = [line.hold("gather", name) for name in "ab"]
    parts = [line.add(name, [0]) for name in "ab"]
    await rest()
    assert line.begun == [("gather", "a"), ("gather", "b")]
    for gate in gates:
        gate.set()
        await rest()
    first, second = [await part.sent for part in parts]
    assert second.gather == first.push


async def test_transfers_are_pushed_in_their_order_whichever_is_gathered_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = SlowLine(monkeypatch)
    gate = line.hold("gather", "a")
    parts = [line.add(name, [0]) for name in "ab"]
    await rest()
    assert line.names() == []
    gate.set()
    await asyncio.gather(*(part.sent for part in parts))
    assert line.names() == [["a"], ["b"]]


@pytest.mark.parametrize("what", ["gather", "push"])
async def test_a_transfer_behind_one_that_fails_goes_on(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    line = SlowLine(monkeypatch)
    gate, reach = line.hold(what, "a"), line.reach

    async def fail(which: str, mid: str) -> None:
        await reach(which, mid)
        if (which, mid) == (what, "a"):
            raise OSError("no such block")

    monkeypatch.setattr(line, "reach", fail)
    failing, fine = line.add("a", [0]), line.add("b", [1])
    await rest()
    assert ("gather", "b") in line.begun
    gate.set()
    with pytest.raises(OSError, match="no such block"):
        await failing.sent
    await fine.sent
    assert line.names() == [["b"]]
    assert line.staging.held == 1
    line.shares[0].drop()
    assert line.staging.held == 0


@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 50])
async def test_closing_ends_transfers_wherever_they_are(
    monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    line = SlowLine(monkeypatch)
    line.hold("push", "a")
    line.hold("gather", "b")
    parts = [line.add(name, [0]) for name in "abc"]
    for _ in range(rounds):
        await asyncio.sleep(0)
    await line.batcher.close()
    assert [part.sent.cancelled() for part in parts] == [True] * 3
    assert (line.staging.held, line.names()) == (0, [])


async def test_chunks_of_one_migration_in_one_transfer_are_not_fused_with_others() -> None:
    line = Line()
    parts = [line.add("a", [0]), line.add("a", [1], 1)]
    await asyncio.gather(*(part.sent for part in parts))
    assert line.names() == [["a", "a"]]
    assert not any(part.fused for part in parts)


MOVE = MigrationSpec(mid="m", request_id="r", epoch=1, source="a", destination="b")


class Stage:
    """One migration's live stages on a line, in chunks of one block."""

    def __init__(self, line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
        self.line = line
        context = line.batcher.context
        monkeypatch.setattr(context.sizer, "blocks", lambda: 1)
        self.mailbox: EventMailbox[str, str] = EventMailbox(lambda event: [event] if event else [])
        self.timeline = MigrationTimeline(MOVE, context.clock)
        self.charged: list[int] = []
        bandwidth = context.throttle.line(MOVE.mid, MOVE.destination)
        monkeypatch.setattr(bandwidth, "commit", self.charged.append)
        monkeypatch.setattr(bandwidth, "give_back", lambda nbytes: self.charged.append(-nbytes))
        monkeypatch.setattr(context.throttle, "line", lambda flow, pair: bandwidth)
        self.sender = BlockSender(MOVE, line.batcher, line.staging, "", self.mailbox, self.timeline)


async def test_a_stages_next_chunk_is_gathered_while_the_one_before_it_is_pushed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line, last = Line(slots=8), 5
    channel = type(line.staging.channel(""))
    push = channel.push

    async def slow_push(to: Any, chunk: Chunk, announce: AnnounceChunk) -> None:
        """As long as the next chunk's copy hasn't begun."""
        if chunk.first < last:
            await until(lambda: line.engine.calls.count("gather") >= chunk.first + 2)
        await push(to, chunk, announce)

    monkeypatch.setattr(channel, "push", slow_push)
    stage = Stage(line, monkeypatch)
    await stage.sender.send_live(0, 0, [9, 8, 7, 6, 5, 4])
    assert [chunk.first for (chunk,) in line.said] == [0, 1, 2, 3, 4, 5]
    (report,) = stage.timeline.aborted("", "").stages
    pairs = list(pairwise(report.chunks))
    assert len(pairs) == last
    assert all(one.push <= following.gather < one.sent for one, following in pairs)
    assert report.parts.gather + report.parts.wait <= report.ms
    assert sum(stage.charged) == stage.timeline.bytes == 6 * BLOCK_BYTES
    for _ in pairs:
        stage.sender.done()
    assert line.staging.held == 1
    stage.sender.close()
    assert line.staging.held == 0


async def test_news_that_asks_for_something_ends_a_stage_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first chunk has gone; those that wait for a slot don't, nor are they charged."""
    line = Line(slots=1)
    stage = Stage(line, monkeypatch)
    sending = asyncio.create_task(stage.sender.send_live(0, 0, [0, 1, 2]))
    await until(lambda: len(line.said) == 1)
    await rest()
    stage.mailbox.put("")
    await rest()
    assert not sending.done()
    stage.mailbox.put("stop")
    with pytest.raises(ActionInterrupted):
        await sending
    assert [chunk.first for (chunk,) in line.said] == [0]
    assert sum(stage.charged) == stage.timeline.bytes == BLOCK_BYTES
    stage.sender.close()
    await rest()
    assert line.staging.held == 0
    assert [chunk.first for (chunk,) in line.said] == [0]


async def test_a_chunk_that_fails_ends_its_stage_once_those_behind_it_are_out_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line, copying, numbers = Line(slots=4), list[int](), count(1)

    async def before(method: str) -> None:
        number = next(numbers)
        copying.append(number)
        await asyncio.sleep(0.005 * number)
        copying.remove(number)
        if number == 1:
            raise RequestGone("finished", "r")

    line.engine.before = before
    stage = Stage(line, monkeypatch)
    with pytest.raises(RequestGone):
        await stage.sender.send_live(0, 0, [0, 1, 2, 3])
    assert (line.engine.calls.count("gather"), copying) == (2, [])
    assert sum(stage.charged) == stage.timeline.bytes == BLOCK_BYTES
    stage.sender.close()
    assert line.staging.held == 0


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


@given(SIZES, st.integers(1, 3), st.randoms(use_true_random=False))
def test_each_chunk_goes_once_in_order_and_no_slot_is_too_full(
    sizes: list[tuple[str, int]], slots: int, random: Random
) -> None:
    """However long its copy and its push take."""

    async def dawdle(*what: object) -> None:
        for _ in range(random.randrange(4)):
            await asyncio.sleep(0)

    async def go() -> None:
        line, firsts = Line(slots), dict.fromkeys("abcd", 0)
        line.engine.before = dawdle
        channel = line.staging.channel("")
        push = channel.push

        async def slow_push(chunk: Chunk, announce: AnnounceChunk) -> None:
            await dawdle()
            await push(chunk, announce)

        channel.push = slow_push  # type: ignore[method-assign]
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

    copies = count(1)

    async def before(method: str) -> None:
        if method == "gather" and next(copies) == 1:
            await until(lambda: len({chunk.mid for chunk in added}) == len(NAMES))

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
        copies = count(1)

        async def corrupt(method: str) -> None:
            number = next(copies) if method == "gather" else 0
            await wait(method)
            source.corrupt = number == 2

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
        copies = count(1)

        async def leave(method: str) -> None:
            number = next(copies) if method == "gather" else 0
            await wait(method)
            if number == 1:
                them.a.migrations.cancel_request("t", "aborted_by_client")

        source.before = leave
        reports = await asyncio.gather(*(them.move(name) for name in NAMES))
        assert [report.state for report in reports] == [
            "committed", "committed", "aborted", "committed",
        ]  # fmt: skip
