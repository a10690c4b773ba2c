"""NIXL with buffers in GPUs' memory, on GPUs of the tests' own. UCX finds no GPU here, and takes a
GPU's memory for the host's: NIXL refuses it, or takes it for the host's (`mistaken_nixl`)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvmig.core.errors import PeerError, TransportError
from kvmig.kernels import ipc
from kvmig.kernels.arrays import memory_of
from kvmig.kernels.driver import CudaDriver
from kvmig.kvtransfer.messages import Chunk, TransportOffer
from kvmig.kvtransfer.transports import nixl, ucx
from kvmig.kvtransfer.transports.base import BufferShape, StagingPool, TransportInbox
from kvmig.kvtransfer.transports.nixl import NixlInbox, NixlStaging, RdmaPlace
from kvmig.rpc.codec import Frame
from tests.kvtransfer.test_transports_processes import needs_nixl
from tests.support import mistaken_nixl
from tests.support.gpu_end import IDS, INTO, GpuEnd
from tests.support.inbox_process import Destination, digest, write
from tests.support.mistaken_nixl import Mistaken

pytestmark = [needs_nixl, pytest.mark.usefixtures("gpus")]

SLOTS, SIZE = 2, 100_000
WAIT_S = 20.0


@pytest.fixture
def mistaken(gpus: None) -> Iterator[Mistaken]:
    with mistaken_nixl.installed() as made:
        yield made


async def brought(
    staging: StagingPool, inbox: TransportInbox, slot: int, nbytes: int
) -> memoryview:
    """What is in the slot."""
    chunk, numbers = Chunk("m", 0, 0, slot, nbytes, []), list[int]()

    def announce(payload: Sequence[Frame] = (), number: int = 0) -> None:
        numbers.append(number)

    async with asyncio.timeout(20):
        pushing = asyncio.create_task(staging.channel(inbox.token).push(chunk, announce))
        while not numbers:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        came = await inbox.receive(msgspec.structs.replace(chunk, number=numbers[0]), None)
        await pushing
    return came


@pytest.fixture
def source() -> Iterator[GpuEnd]:
    made = GpuEnd(0, 1)
    yield made
    made.close()


async def test_blocks_go_from_one_gpus_memory_to_anothers_and_through_none_of_the_hosts(
    mistaken: Mistaken, source: GpuEnd
) -> None:
    target, nbytes = GpuEnd(1, 2), len(IDS) * source.size
    staging = NixlStaging(SLOTS, nbytes, gpu=0)
    inbox = NixlInbox(staging.offer(), gpu=1)
    assert (staging.memory, inbox.memory, mistaken.gpus) == (None, None, [0, 1])
    _, slot = await staging.acquire(1), await staging.acquire(1)
    out = await staging.channel(inbox.token).buffer(slot)
    sums = await asyncio.to_thread(source.copies.gather, IDS, out[:nbytes])
    came = await brought(staging, inbox, slot, nbytes)
    assert [memory_of(one).device for one in (out, came)] == ["cuda", "cuda"]
    assert await asyncio.to_thread(target.copies.scatter, INTO, came) == sums
    expected = dict(zip(INTO, map(source.host.block, IDS), strict=True))
    assert np.array_equal(target.cache.memory(), target.cache.expected(expected))
    del out, came
    inbox.close()
    staging.close()
    target.close()


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_destination_that_dies_or_stands_still_leaves_the_source_able_to_go_on(
    mistaken: Mistaken, blow: signal.Signals
) -> None:
    staging, data = NixlStaging(SLOTS, SIZE, gpu=0), b"blocks" * 1000
    slot = await staging.acquire(1)
    chunk = Chunk("m", 0, 0, slot, len(data), [])
    with Destination(staging.offer(), gpu=1, gpu_memory=True) as there:
        assert msgspec.json.decode(there.token, type=RdmaPlace).kind == "VRAM"
        channel = staging.channel(there.token)
        write(await channel.buffer(slot), data)
        async with asyncio.timeout(WAIT_S):
            await channel.push(chunk, there.announce(chunk))
        assert await asyncio.to_thread(there.hear) == digest(data)
        os.kill(there.process.pid or 0, blow)
        if blow is signal.SIGKILL:
            there.process.join(WAIT_S)
        for _ in range(2):
            try:
                async with asyncio.timeout(2.0):
                    await channel.push(chunk, lambda *_, **__: None)
            except (TransportError, TimeoutError):
                break
    with Destination(staging.offer(), gpu=1, gpu_memory=True) as there:
        channel = staging.channel(there.token)
        async with asyncio.timeout(WAIT_S):
            await channel.push(chunk, there.announce(chunk))
        assert await asyncio.to_thread(there.hear) == digest(data)
    assert mistaken.gpus == [0]
    staging.close()


SOURCE = """
import asyncio, os, signal, sys
from kvmig.kvtransfer.messages import Chunk
from kvmig.kvtransfer.transports.nixl import NixlStaging
from tests.support import fake_gpu, mistaken_nixl
from tests.support.inbox_process import write

def say(payload=(), number=0):
    print(number, flush=True)

def say_and_die(payload=(), number=0):
    say(number=number)
    os.kill(os.getpid(), signal.SIGKILL)

async def push():
    staging = NixlStaging(2, 100_000, gpu=0)
    print(staging.offer().token, flush=True)
    channel = staging.channel(sys.stdin.readline().strip())
    for word, announce in ((b"first", say), (b"other", say_and_die)):
        slot = await staging.acquire(1)
        write(await channel.buffer(slot), word)
        await channel.push(Chunk("m", 0, 0, slot, len(word), []), announce)

with fake_gpu.installed(), mistaken_nixl.installed():
    asyncio.run(push())
"""


@contextmanager
def source_that_dies() -> Iterator[subprocess.Popen[str]]:
    """A process that pushes one chunk, and is killed when it has announced another one."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", SOURCE], stdin=pipe, stdout=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


async def test_a_source_that_is_killed_leaves_what_came_whole_and_the_next_one_finds_room(
    mistaken: Mistaken,
) -> None:
    for _ in range(2):
        with source_that_dies() as process:
            assert process.stdin is not None
            assert process.stdout is not None
            inbox = NixlInbox(TransportOffer("nixl", process.stdout.readline()), gpu=1)
            print(inbox.token, file=process.stdin, flush=True)
            came = []
            for slot in range(2):
                number = int(await asyncio.to_thread(process.stdout.readline))
                chunk = Chunk("m", 0, 0, slot, 5, [], number=number)
                if slot == 0:
                    async with asyncio.timeout(WAIT_S):
                        came.append(await inbox.receive(chunk, None))
                    continue
                assert process.wait(WAIT_S) == -signal.SIGKILL
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await inbox.receive(chunk, None)
            assert memory_of(came[0]).device == "cuda"
            assert digest(came[0], 1) == digest(b"first")
            came.clear()
            inbox.close()
    assert mistaken.gpus == [1, 1]


async def test_memory_that_nixl_refuses_is_the_hosts_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    staging = NixlStaging(SLOTS, SIZE, gpu=0)
    inbox = NixlInbox(staging.offer(), gpu=0)
    assert caplog.text.count("NIXL brings blocks through the host's memory: ") == 2
    slot = await staging.acquire(1)
    (await staging.channel(inbox.token).buffer(slot))[:5] = b"seven"
    assert bytes(await brought(staging, inbox, slot, 5)) == b"seven"
    inbox.close()
    staging.close()


def test_memory_that_no_rdma_device_reaches_is_the_hosts(
    mistaken: Mistaken, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attribute = CudaDriver.attribute
    monkeypatch.setattr(
        CudaDriver, "attribute", lambda gpu, what: what != ipc.CAN_RDMA and attribute(gpu, what)
    )
    staging = NixlStaging(SLOTS, SIZE, gpu=1)
    assert "RDMA devices don't reach memory of GPU 1" in caplog.text
    assert staging.memory is not None
    assert not mistaken.gpus
    staging.close()


@pytest.mark.parametrize(("knows", "kind"), [(True, "VRAM"), (False, "DRAM")])
def test_a_source_that_knows_no_gpus_is_given_memory_of_the_host(
    mistaken: Mistaken, knows: bool, kind: str
) -> None:
    """One of the version before."""
    offered = nixl.RdmaOffer(SLOTS, SIZE, gpus=True) if knows else BufferShape(SLOTS, SIZE)
    inbox = NixlInbox(TransportOffer("nixl", offered.token()), gpu=1)
    place = msgspec.json.decode(inbox.token, type=RdmaPlace)
    assert (place.kind, place.device) == (kind, int(knows))
    inbox.close()


def test_memory_of_another_kind_is_no_place(mistaken: Mistaken) -> None:
    staging = NixlStaging(SLOTS, SIZE)
    token = msgspec.json.encode(
        {"metadata": "", "base": 0, "slot_bytes": SIZE, "kind": "FILE", "device": 0}
    )
    with pytest.raises(PeerError, match="not a token of NIXL"):
        staging.channel(token.decode())
    staging.close()


def test_ucxs_transports_of_gpus_are_asked_for_by_name(
    mistaken: Mistaken, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UCX_TLS", "")
    monkeypatch.delenv("UCX_TLS")
    staging = NixlStaging(SLOTS, SIZE, gpu=1)
    assert {"cuda_ipc", "gdr_copy"} < {*os.environ["UCX_TLS"].split(",")}
    assert "NIXL, GPU 1: gdr_copy isn't there (no /dev/gdrdrv)" in caplog.text
    staging.close()


@pytest.mark.parametrize(
    ("chosen", "dma_buf", "files", "said"),
    [
        (ucx.NAMED, True, ["dev/gdrdrv"], []),
        (ucx.NAMED, False, ["dev/gdrdrv", "sys/module/nvidia_peermem"], []),
        (ucx.NAMED, False, ["dev/gdrdrv"], ["nvidia_peermem isn't loaded"]),
        (ucx.NAMED, True, [], ["gdr_copy isn't there"]),
        ("rc,cuda_copy", True, [], ["UCX_TLS is rc,cuda_copy, without cuda_ipc"]),
        ("rc,cuda", True, [], []),
    ],
)
def test_what_ucx_lacks_for_a_gpus_memory_is_said(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    chosen: str,
    dma_buf: bool,
    files: Sequence[str],
    said: Sequence[str],
) -> None:
    monkeypatch.setenv("UCX_TLS", chosen)
    for file in files:
        (tmp_path / file).mkdir(parents=True)
    found = list(ucx.find_fall_backs(dma_buf, tmp_path))
    assert len(found) == len(said)
    assert all(part in one for part, one in zip(said, found, strict=True))
