"""NCCL by name, with a stand-in for its calls: between two GPUs of the tests' own, in one process
and in two, one of which dies or stands still."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from kvmig.core.errors import PeerError, TransportError
from kvmig.kernels import nccl
from kvmig.kernels.arrays import memory_of
from kvmig.kernels.driver import CudaDriver
from kvmig.kvtransfer.messages import Chunk, TransportOffer
from kvmig.kvtransfer.transports import nccl as transport
from kvmig.kvtransfer.transports.base import StagingPool, TransportInbox
from kvmig.kvtransfer.transports.select import TransportSite, open_offer, open_staging
from kvmig.rpc.codec import Frame
from tests.support import fake_nccl
from tests.support.gpu_end import IDS, INTO, GpuEnd
from tests.support.inbox_process import Destination, digest, write

SLOTS, SIZE = 2, 100_000
WAIT_S = 20.0

pytestmark = pytest.mark.usefixtures("gpus", "library")


@pytest.fixture
def library(gpus: None) -> Iterator[None]:
    with fake_nccl.installed():
        yield


def staging_on(gpu: int, slot_bytes: int = SIZE) -> StagingPool:
    return open_staging("nccl", "test", "a", SLOTS, slot_bytes, TransportSite(gpu=gpu))["nccl"]


def inbox_on(gpu: int, offer: TransportOffer) -> TransportInbox:
    return open_offer([offer], "nccl", TransportSite(gpu=gpu))


@pytest.fixture
def staging(library: None) -> Iterator[StagingPool]:
    made = staging_on(0)
    yield made
    made.close()


async def brought(
    staging: StagingPool, inbox: TransportInbox, slot: int, nbytes: int
) -> memoryview:
    """What a pushed chunk is at the destination."""
    chunk, numbers = Chunk("m", 0, 0, slot, nbytes, []), asyncio.Queue[int]()

    def announce(payload: Sequence[Frame] = (), number: int = 0) -> None:
        numbers.put_nowait(number)

    async with asyncio.timeout(WAIT_S):
        pushing = asyncio.create_task(staging.channel(inbox.token).push(chunk, announce))
        came = await inbox.receive(replace(chunk, number=await numbers.get()), None)
        await pushing
    return came


async def test_blocks_go_from_one_gpu_to_another_in_the_order_of_their_chunks(
    staging: StagingPool,
) -> None:
    source, target = GpuEnd(0, 1), GpuEnd(1, 2)
    pool = staging_on(0, len(IDS) * source.size)
    inbox = inbox_on(1, pool.offer())
    for _ in range(2):
        slot = await pool.acquire(1)
        out = (await pool.channel(inbox.token).buffer(slot))[: len(IDS) * source.size]
        sums = await asyncio.to_thread(source.copies.gather, IDS, out)
        came = await brought(pool, inbox, slot, len(IDS) * source.size)
        assert await asyncio.to_thread(target.copies.scatter, INTO, came) == sums
        pool.release(slot)
        del out, came
    expected = dict(zip(INTO, map(source.host.block, IDS), strict=True))
    assert np.array_equal(target.cache.memory(), target.cache.expected(expected))
    inbox.close()
    pool.close()
    source.close()
    target.close()


async def test_chunks_that_are_asked_for_in_another_order_come_in_their_own(
    staging: StagingPool,
) -> None:
    """Each migration asks for its chunks by itself."""
    inbox, driver = inbox_on(1, staging.offer()), CudaDriver(0)
    slots = [await staging.acquire(1) for _ in range(SLOTS)]
    channel = staging.channel(inbox.token)
    for slot in slots:
        driver.write(memory_of(await channel.buffer(slot)).address, bytes([slot + 1]) * 8)
    pushes = [
        asyncio.create_task(channel.push(Chunk("m", 0, 0, slot, 8, []), lambda *_, **__: None))
        for slot in slots
    ]
    asks = [
        asyncio.create_task(inbox.receive(Chunk("m", 0, 0, slot, 8, [], number=slot + 1), None))
        for slot in reversed(slots)
    ]
    async with asyncio.timeout(WAIT_S):
        found = await asyncio.gather(*asks)
        await asyncio.gather(*pushes)
    read = [CudaDriver(1).read(memory_of(one).address, 8)[0] for one in found]
    assert read == [slot + 1 for slot in reversed(slots)]
    del found, asks
    inbox.close()


async def test_a_chunk_that_is_never_asked_for_ends_the_communicator_and_the_next_works(
    staging: StagingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "TRANSFER_S", 0.3)
    inbox, slot = inbox_on(1, staging.offer()), await staging.acquire(1)
    channel = staging.channel(inbox.token)
    with pytest.raises(TransportError, match="NCCL: copies on a side stream are not done"):
        await channel.push(Chunk("m", 0, 0, slot, 8, []), lambda *_, **__: None)
    assert channel.broken
    with pytest.raises(TransportError, match="NCCL: copies on a side stream are not done"):
        await inbox.receive(Chunk("m", 0, 0, slot, 8, [], number=1), None)
    assert inbox.stale
    monkeypatch.setattr(transport, "TRANSFER_S", WAIT_S)
    again = inbox_on(1, staging.offer())
    await brought(staging, again, slot, 8)
    again.close()


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_destination_that_dies_or_stands_still_costs_one_push(
    staging: StagingPool, monkeypatch: pytest.MonkeyPatch, blow: signal.Signals
) -> None:
    slot, data = await staging.acquire(1), b"blocks" * 1000
    chunk = Chunk("m", 0, 0, slot, len(data), [])
    with Destination(staging.offer(), gpu=1) as there:
        channel = staging.channel(there.token)
        write(await channel.buffer(slot), data)
        await channel.push(chunk, there.announce(chunk))
        assert await asyncio.to_thread(there.hear) == digest(data)
        os.kill(there.process.pid or 0, blow)
        monkeypatch.setattr(transport, "TRANSFER_S", 0.5)
        with pytest.raises(TransportError, match="not done after"):
            await channel.push(chunk, lambda *_, **__: None)
    monkeypatch.setattr(transport, "TRANSFER_S", WAIT_S)
    with Destination(staging.offer(), gpu=1) as there:
        channel = staging.channel(there.token)
        await channel.push(chunk, there.announce(chunk))
        assert await asyncio.to_thread(there.hear) == digest(data)


async def test_a_destination_that_nobody_joins_gives_up(
    staging: StagingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "OPEN_S", 0.2)
    inbox = inbox_on(1, staging.offer())
    with pytest.raises(TransportError, match="ncclCommInitRankConfig has not ended within"):
        await inbox.receive(Chunk("m", 0, 0, 0, 8, [], number=1), None)
    assert inbox.stale


def test_one_gpu_is_not_taken_twice(staging: StagingPool) -> None:
    with pytest.raises(TransportError, match="nccl: the source is on the same GPU"):
        inbox_on(0, staging.offer())


def test_auto_neither_offers_nor_takes_it(staging: StagingPool) -> None:
    site = TransportSite(gpu=1)
    pools = open_staging("auto", "test", "b", 1, SIZE, site)
    assert "nccl" not in pools
    for pool in pools.values():
        pool.close()
    with pytest.raises(TransportError, match="nccl: this side takes it by name only"):
        open_offer([staging.offer()], "auto", site)


def test_without_the_library_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "LIBRARY", "libnccl-of-nobody.so")
    monkeypatch.setattr(nccl, "find_in_wheel", list)
    nccl.library.cache_clear()
    with pytest.raises(TransportError, match=r"NCCL isn't installed \(pip install nvidia-nccl"):
        staging_on(0)


def test_a_library_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKENCCL_VERSION", "21700")
    nccl.library.cache_clear()
    with pytest.raises(TransportError, match=r"NCCL 21700 is too old: 2\.18 is needed"):
        staging_on(0)


def test_a_kv_cache_on_the_host_is_refused() -> None:
    with pytest.raises(TransportError, match="NCCL needs a KV cache in an NVIDIA GPU's memory"):
        open_staging("nccl", "test", "a", 1, SIZE, TransportSite())


@pytest.mark.parametrize("token", ["no json", '{"unique_id":"~ ~","slot_bytes":8}'])
def test_what_is_no_token_is_the_peers_error(staging: StagingPool, token: str) -> None:
    with pytest.raises(PeerError, match="not a token of nccl"):
        staging.channel(token)
