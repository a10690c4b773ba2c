"""Every transport that runs here, between two processes, one of which may die or stand still."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from hashlib import shake_128
from importlib.util import find_spec

import pytest

from kvmig.core.errors import TransportError
from kvmig.kvtransfer.messages import Chunk
from kvmig.kvtransfer.transports import nixl
from kvmig.kvtransfer.transports.base import AnnounceChunk, StagingPool
from kvmig.rpc.codec import Frame
from tests.support.inbox_process import Destination, digest, staging_of, write

SLOTS, SIZE = 2, 300_000
PATIENCE_S = 10.0


def _nixl_is_there() -> bool:
    return any(find_spec(name.split(".")[0]) for name in nixl.MODULES)


needs_nixl = pytest.mark.skipif(not _nixl_is_there(), reason="needs the extra kvmig[nixl]")
TRANSPORTS = ["shm", "tcp", pytest.param("nixl", marks=needs_nixl), "cuda-ipc"]

pytestmark = pytest.mark.usefixtures("gpus")


@pytest.fixture(params=TRANSPORTS)
def staging(gpus: None, request: pytest.FixtureRequest) -> Iterator[StagingPool]:
    pool = staging_of(request.param, SLOTS, SIZE)
    yield pool
    pool.close()


@pytest.fixture
def destination(staging: StagingPool) -> Iterator[Callable[[], Destination]]:
    made: list[Destination] = []

    def start() -> Destination:
        made.append(Destination(staging.offer()))
        return made[-1]

    yield start
    for one in made:
        one.close()


def content(number: int, nbytes: int) -> bytes:
    return shake_128(str(number).encode()).digest(nbytes)


async def push(
    staging: StagingPool,
    token: str,
    slot: int,
    data: bytes,
    announce: Callable[[Chunk], AnnounceChunk],
) -> None:
    """Put `data` into the slot and bring it there, as a copier does."""
    channel, chunk = staging.channel(token), Chunk("m", 0, 0, slot, len(data), [])
    async with asyncio.timeout(2.0):
        write(await channel.buffer(slot), data)
        await channel.push(chunk, announce(chunk))


def to_nobody(chunk: Chunk) -> AnnounceChunk:
    """The message is lost."""

    def announce(payload: Sequence[Frame] = (), number: int = 0) -> None: ...

    return announce


async def works(staging: StagingPool, there: Destination) -> bool:
    """Whether chunks of all sizes arrive, in slots that are used again and again."""
    for number, nbytes in enumerate((1, 4096, SIZE, 77_777)):
        slot, data = await staging.acquire(1.0), content(number, nbytes)
        await push(staging, there.token, slot, data, there.announce)
        if await asyncio.to_thread(there.hear) != digest(data):
            return False
        staging.release(slot)
    return True


async def test_chunks_arrive_as_they_were(
    staging: StagingPool, destination: Callable[[], Destination]
) -> None:
    there = destination()
    assert await works(staging, there)
    slots = [await staging.acquire(1.0) for _ in range(SLOTS)]
    for slot in slots:
        await push(staging, there.token, slot, content(slot, SIZE), there.announce)
    heard = [await asyncio.to_thread(there.hear) for _ in slots]
    assert heard == [digest(content(slot, SIZE)) for slot in slots]
    there.end()


async def test_a_chunk_that_nobody_took_is_not_taken_for_the_next(
    staging: StagingPool, destination: Callable[[], Destination]
) -> None:
    there, slot = destination(), await staging.acquire(1.0)
    await push(staging, there.token, slot, content(0, SIZE), there.announce)
    assert await asyncio.to_thread(there.hear) == digest(content(0, SIZE))
    await push(staging, there.token, slot, content(1, SIZE), to_nobody)
    await push(staging, there.token, slot, content(2, SIZE), there.announce)
    assert await asyncio.to_thread(there.hear) == digest(content(2, SIZE))


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_destination_that_dies_or_stands_still_leaves_the_source_able_to_go_on(
    staging: StagingPool, destination: Callable[[], Destination], blow: signal.Signals
) -> None:
    there, slot = destination(), await staging.acquire(1.0)
    await push(staging, there.token, slot, content(0, SIZE), there.announce)
    await asyncio.to_thread(there.hear)
    os.kill(there.process.pid or 0, blow)
    if blow is signal.SIGKILL:
        there.process.join(PATIENCE_S)
    for _ in range(2):
        try:
            await push(staging, there.token, slot, content(1, SIZE), there.announce)
        except (TransportError, TimeoutError):
            break  # a transport that sees it; the others leave it to the wait for ChunkDone
    staging.release(slot)
    assert staging.held == 0
    assert await works(staging, destination())


async def test_a_source_that_dies_is_noticed_by_the_one_who_waits(
    staging: StagingPool, destination: Callable[[], Destination]
) -> None:
    if staging.transport in ("shm", "cuda-ipc"):
        pytest.skip("what was announced is there already")
    there = destination()
    said: list[AnnounceChunk] = []

    def only_said(chunk: Chunk) -> AnnounceChunk:
        said.append(there.announce(chunk))
        return to_nobody(chunk)

    slot = await staging.acquire(1.0)
    await push(staging, there.token, slot, content(0, 100), only_said)
    said[0](number=99)  # one that is never pushed
    assert "Error" in str(await asyncio.to_thread(there.hear))
    there.end()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_nothing_is_left_after_close(transport: str) -> None:
    async def use() -> None:
        pool = staging_of(transport, SLOTS, SIZE)
        there = Destination(pool.offer())
        assert await works(pool, there)
        pool.close()
        await asyncio.to_thread(there.end)
        there.close()

    await use()  # libraries keep something of their first use
    before = await settled()
    for _ in range(2):
        await use()
    after = await settled()
    assert after[0] <= before[0]
    assert after[1] <= before[1]


async def settled() -> tuple[int, int]:
    """Threads (but the event loop's) and descriptors, once they stay the same for a while."""
    looks = [(0, 0)]
    async with asyncio.timeout(PATIENCE_S):
        while len(looks) < 4 or len(set(looks[-3:])) > 1:
            await asyncio.sleep(0.1)
            tasks, descriptors = (len(os.listdir(f"/proc/self/{one}")) for one in ("task", "fd"))  # noqa: PTH208
            ours = sum(one.name.startswith("asyncio_") for one in threading.enumerate())
            looks.append((tasks - ours, descriptors))
    return looks[-1]
