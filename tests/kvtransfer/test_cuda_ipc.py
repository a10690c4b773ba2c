"""CUDA IPC on GPUs of the tests' own: devices, engines of one process, and what doesn't fit.
Between two processes: tests/kvtransfer/test_transports_processes.py."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Iterator, Sequence

import msgspec
import pytest
from msgspec.structs import replace

from kvmig.core.errors import PeerError, TransportError
from kvmig.kernels.arrays import memory_of
from kvmig.kernels.driver import CudaDriver
from kvmig.kvtransfer.messages import Chunk, TransportOffer
from kvmig.kvtransfer.transports import cuda_ipc
from kvmig.kvtransfer.transports.base import StagingPool, TransportInbox
from kvmig.kvtransfer.transports.cuda_ipc import IpcOrigin, IpcPlace
from kvmig.kvtransfer.transports.select import TransportSite, open_offer, open_staging
from kvmig.rpc.codec import Frame
from tests.support import fake_gpu
from tests.support.fake_gpu import FakeGpu
from tests.support.inbox_process import Destination, digest, write

pytestmark = pytest.mark.usefixtures("gpus")

SLOTS, SIZE = 3, 1_000_000


def staging_on(gpu: int) -> StagingPool:
    return open_staging("cuda-ipc", "test", "a", SLOTS, SIZE, TransportSite(gpu=gpu))["cuda-ipc"]


def inbox_on(gpu: int, staging: StagingPool) -> TransportInbox:
    return open_offer([staging.offer()], "cuda-ipc", TransportSite(gpu=gpu))


def announced(payload: Sequence[Frame] = (), number: int = 0) -> None:
    assert not payload


@pytest.fixture
def staging(gpus: None) -> Iterator[StagingPool]:
    made = staging_on(0)
    yield made
    made.close()


@pytest.fixture
def inbox(staging: StagingPool) -> Iterator[TransportInbox]:
    """Of the same GPU and process."""
    made = inbox_on(0, staging)
    yield made
    made.close()


def chunk(slot: int, nbytes: int = SIZE) -> Chunk:
    return Chunk("m", 0, 0, slot, nbytes, [])


async def pushed(staging: StagingPool, token: str, data: bytes, slot: int = 0) -> Chunk:
    channel, one = staging.channel(token), chunk(slot, len(data))
    write(await channel.buffer(slot), data)
    await channel.push(one, announced)
    return one


async def crosses(staging: StagingPool, there: Destination, data: bytes, slot: int) -> None:
    """To another process, which ends then."""
    there.announce(await pushed(staging, there.token, data, slot))()
    assert await asyncio.to_thread(there.hear) == digest(data)
    there.end()


@pytest.mark.parametrize("there", [0, 1])
async def test_engines_of_one_process_push_into_each_others_memory(
    staging: StagingPool, there: int
) -> None:
    """A6: what a process exports it can't map itself."""
    inbox = inbox_on(there, staging)
    for _ in range(SLOTS):
        slot = await staging.acquire(1)
        data = bytes([slot + 1]) * SIZE
        received = await inbox.receive(await pushed(staging, inbox.token, data, slot), None)
        assert (memory_of(received).device, received.readonly) == ("cuda", True)
        assert digest(received, there) == digest(data)
    inbox.close()


async def test_buffers_are_on_the_engines_gpu_whatever_thread_opens_them() -> None:
    """A7: transports are opened on threads that have no context, or another device's."""
    CudaDriver(0).enter()
    staging = await asyncio.to_thread(staging_on, 1)
    inbox = await asyncio.to_thread(inbox_on, 1, staging)
    slot = await staging.acquire(1)
    received = await inbox.receive(chunk(slot), None)
    for buffer in (await staging.channel(inbox.token).buffer(slot), received):
        assert fake_gpu.device_of(memory_of(buffer).address) == 1
    assert len(FakeGpu(1).read(memory_of(received).address, SIZE)) == SIZE
    del received, buffer
    inbox.close()
    staging.close()


async def test_two_processes_use_a_gpu_each(staging: StagingPool) -> None:
    with Destination(staging.offer(), gpu=1) as there:
        await crosses(staging, there, b"seven" * 1000, await staging.acquire(1))


async def test_a_gpu_without_access_to_the_others_fails_the_push_and_nothing_else(
    staging: StagingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = inbox_on(1, staging)
    slot = await staging.acquire(1)
    monkeypatch.setenv("KVMIG_FAKE_NO_PEERS", "1")
    with pytest.raises(TransportError, match="can't map the destination's memory: cuMemSet"):
        await pushed(staging, inbox.token, b"data", slot)
    monkeypatch.delenv("KVMIG_FAKE_NO_PEERS")
    await pushed(staging, inbox.token, b"data", slot)
    inbox.close()


# -- what `auto` takes


def stagings_on(gpu: int | None) -> dict[str, StagingPool]:
    return open_staging("auto", "test", "a", SLOTS, SIZE, TransportSite(gpu=gpu))


def taken(stagings: dict[str, StagingPool], gpu: int | None) -> str:
    """The transport of the inbox that a destination with such a KV cache opens."""
    inbox = open_offer([one.offer() for one in stagings.values()], "auto", TransportSite(gpu=gpu))
    inbox.close()
    return inbox.transport


@pytest.mark.parametrize("there", [0, 1])
def test_auto_takes_cuda_ipc_between_gpus_that_reach_each_other(there: int) -> None:
    """A13: through the host's memory a chunk would cross PCIe twice."""
    stagings = stagings_on(0)
    assert list(stagings) == ["cuda-ipc", "shm", "tcp"]
    assert taken(stagings, there) == "cuda-ipc"
    for one in stagings.values():
        one.close()


def test_auto_falls_back_where_they_do_not_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stagings = stagings_on(0)
    monkeypatch.setenv("KVMIG_FAKE_NO_PEERS", "1")
    assert taken(stagings, 1) == "shm"
    assert "GPU 1 doesn't reach a source on this host by cuda-ipc: cuMemSetAccess" in caplog.text
    with pytest.raises(TransportError, match="cuda-ipc: a test transfer failed: cuMemSetAccess"):
        inbox_on(1, stagings["cuda-ipc"])
    assert taken(stagings, None) == "shm"
    for one in stagings.values():
        one.close()


def test_auto_falls_back_where_other_bytes_come(staging: StagingPool) -> None:
    offer = staging.offer()
    origin = msgspec.json.decode(offer.token, type=IpcOrigin)
    forged = msgspec.json.encode(replace(origin, nonce="00" * 16)).decode()
    with pytest.raises(TransportError, match="a test transfer failed: other bytes came"):
        open_offer([replace(offer, token=forged)], "auto", TransportSite(gpu=0))


def test_auto_without_room_on_the_gpu_goes_through_the_hosts_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake_gpu.fail("cuMemCreate")
    stagings = stagings_on(0)
    assert list(stagings) == ["shm", "tcp"]
    assert "KV blocks don't go over cuda-ipc" in caplog.text
    for one in stagings.values():
        one.close()


def test_an_inbox_whose_source_has_ended_is_stale(
    staging: StagingPool, inbox: TransportInbox
) -> None:
    assert not inbox.stale
    staging.close()
    assert inbox.stale


SOURCE = """
import sys
from kvmig.kvtransfer.transports.select import TransportSite, open_staging
from tests.support import fake_gpu
with fake_gpu.installed():
    staging = open_staging("cuda-ipc", "test", "a", 2, 4096, TransportSite(gpu=0))["cuda-ipc"]
    print(staging.offer().token, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def source() -> Iterator[subprocess.Popen[str]]:
    """A process with staging, which says its offer's token."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", SOURCE], stdin=pipe, stdout=pipe, text=True)
    yield process
    process.kill()
    process.communicate(timeout=20)


async def test_a_source_that_is_killed_leaves_its_inbox_whole_and_stale(
    source: subprocess.Popen[str],
) -> None:
    assert source.stdout is not None
    inbox = open_offer(
        [TransportOffer("cuda-ipc", source.stdout.readline())], "auto", TransportSite(gpu=0)
    )
    assert not inbox.stale
    source.kill()
    source.wait(20)
    assert inbox.stale
    received = await inbox.receive(chunk(1, 4096), None)
    assert len(FakeGpu().read(memory_of(received).address, 4096)) == 4096
    del received
    inbox.close()


# -- what doesn't fit


@pytest.mark.parametrize("wrong", [{"size": SLOTS * SIZE - 1}, {"slot_bytes": SIZE - 1}])
async def test_memory_that_is_too_small_for_the_slots_is_refused(
    staging: StagingPool, inbox: TransportInbox, wrong: dict[str, int]
) -> None:
    """A3: a copy beyond a mapping ends the source's engine, not the migration."""
    place = msgspec.json.decode(inbox.token, type=IpcPlace)
    if "size" in wrong:
        place = replace(place, exported=replace(place.exported, **wrong))
    else:
        place = replace(place, **wrong)
    with pytest.raises(PeerError, match="are too small for 3 slots of 1000000"):
        staging.channel(msgspec.json.encode(place).decode())


async def test_a_mapping_is_no_longer_than_its_memory(staging: StagingPool) -> None:
    """A3: what the token says of its size is the peer's word only."""
    with Destination(staging.offer()) as there:
        place = msgspec.json.decode(there.token, type=IpcPlace)
        longer = replace(place.exported, size=2 * place.exported.size)
        token = msgspec.json.encode(replace(place, exported=longer)).decode()
        slot = await staging.acquire(1)
        with pytest.raises(TransportError, match="cuMemMap: invalid argument"):
            await pushed(staging, token, b"data", slot)
        there.end()


async def test_the_last_byte_of_the_last_slot_arrives(staging: StagingPool) -> None:
    with Destination(staging.offer()) as there:
        slots = [await staging.acquire(1) for _ in range(SLOTS)]
        await crosses(staging, there, bytes(SIZE - 1) + b"!", slots[-1])


async def test_a_test_transfer_that_never_ends_is_given_up_and_its_memory_left_alone(
    staging: StagingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unmapped under a copy, either end of it would end the engine."""
    monkeypatch.setattr(cuda_ipc, "TEST_TIMEOUT_S", 0.05)
    kept: list[tuple[cuda_ipc.IpcMemory, cuda_ipc.PeerMemory]] = []
    monkeypatch.setattr(cuda_ipc, "_stuck", kept)
    FakeGpu().stick()
    with pytest.raises(TransportError, match=r"a test transfer failed: .* not done after 0\.05 s"):
        inbox_on(0, staging)
    gc.collect()
    FakeGpu().stick(False)
    CudaDriver(0).settle()
    kept.clear()


async def test_a_chunk_that_is_larger_than_a_slot_is_refused(
    staging: StagingPool, inbox: TransportInbox
) -> None:
    with pytest.raises(PeerError, match="1000001 bytes for buffers of 1000000"):
        await staging.channel(inbox.token).push(chunk(0, SIZE + 1), announced)


async def test_an_inbox_that_was_given_up_takes_nothing_more(
    staging: StagingPool, inbox: TransportInbox
) -> None:
    slot = await staging.acquire(1)
    inbox.close()
    with pytest.raises(TransportError, match="given up"):
        await inbox.receive(chunk(slot), None)
    with pytest.raises(TransportError, match="no descriptor from"):
        await pushed(staging, inbox.token, b"data", slot)


async def test_a_channel_that_was_closed_says_so_and_keeps_a_buffer_in_use(
    staging: StagingPool,
) -> None:
    inbox = inbox_on(1, staging)
    slot, channel = await staging.acquire(1), staging.channel(inbox.token)
    buffer = await channel.buffer(slot)
    channel.close()
    with pytest.raises(TransportError, match="the way to the destination's memory was given up"):
        await channel.buffer(slot)
    write(buffer, b"late")
    inbox.close()


@pytest.mark.parametrize("how", ["the next channel", "told"])
async def test_memory_of_a_destination_that_has_ended_is_let_go(
    staging: StagingPool, how: str
) -> None:
    """It stays on the destination's GPU as long as anybody maps it, and the next one wants it."""
    with Destination(staging.offer(), gpu=1) as there:
        slot = await staging.acquire(1)
        await pushed(staging, there.token, b"data", slot)
        mapped = len(fake_gpu.sizes())
        there.end()
        if how == "told":
            staging.let_go()
            assert len(fake_gpu.sizes()) == mapped - 1
        else:
            inbox = inbox_on(0, staging)
            staging.channel(inbox.token)
            assert len(fake_gpu.sizes()) == mapped  # one less, and the inbox's
            inbox.close()


async def test_a_slot_that_nobody_has_acquired_has_no_buffer(
    staging: StagingPool, inbox: TransportInbox
) -> None:
    with pytest.raises(ValueError, match="staging slot 1 is not acquired"):
        await staging.channel(inbox.token).buffer(1)


async def test_a_gpu_without_room_is_named() -> None:
    fake_gpu.fail("cuMemCreate")
    with pytest.raises(TransportError, match="no 16 bytes of GPU memory to share: cuMemCreate"):
        staging_on(0)
