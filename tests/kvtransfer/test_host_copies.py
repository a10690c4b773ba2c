"""Blocks between two GPUs through shared memory of the host: both pin it, and their kernels write
and read it themselves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from kvmig.kvtransfer.messages import Chunk, TransportOffer
from kvmig.kvtransfer.transports.base import TransportInbox
from kvmig.kvtransfer.transports.select import TransportSite, open_offer, open_staging
from kvmig.kvtransfer.transports.shm import sweep
from tests.support import fake_gpu
from tests.support.gpu_end import IDS, INTO, GpuEnd

pytestmark = pytest.mark.usefixtures("gpus")
"""Which see that all comes back."""


def opened(offer: TransportOffer, gpu: int) -> TransportInbox:
    return open_offer([offer], "shm", TransportSite(gpu=gpu))


def pinned() -> int:
    return fake_gpu.held()["pinned"]


@pytest.mark.parametrize("there", [0, 1])
@pytest.mark.parametrize("maps", ["reading", "writing"])
async def test_blocks_cross_through_pages_that_both_ends_have_pinned(
    there: int, maps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that can't pin pages mapped for reading gets them mapped for writing."""
    if maps == "writing":
        monkeypatch.setenv("KVMIG_FAKE_PINS_WRITABLE", "1")
    source, target = GpuEnd(0, 1), GpuEnd(there, 2)
    (staging,) = open_staging(
        "shm", "test", "a", 2, len(IDS) * source.size, TransportSite(gpu=0)
    ).values()
    inbox = opened(staging.offer(), there)
    assert inbox.memory is not None
    assert inbox.memory.readonly is (maps == "reading")
    slot = await staging.acquire(1)
    channel = staging.channel(inbox.token)
    sums = source.copies.gather(IDS, (await channel.buffer(slot))[: len(IDS) * source.size])
    came = await inbox.receive(Chunk("m", 0, 0, slot, len(IDS) * source.size, sums), None)
    assert came.readonly
    assert target.copies.scatter(INTO, came) == sums
    expected = dict(zip(INTO, map(source.host.block, IDS), strict=True))
    assert np.array_equal(target.cache.memory(), target.cache.expected(expected))
    assert pinned() >= 2, "a mapping at each end"
    del came
    for end in (source, target):
        assert (len(end.launches.workers), end.launches.by_tma) == (1, 1)
        assert not [move for move in end.gpu.moved if move[2] >= end.size]
        end.close()
    inbox.close()
    staging.close()


SOURCE = """
import asyncio, sys
from kvmig.kvtransfer.transports.select import TransportSite, open_staging
from tests.support import fake_gpu
from tests.support.gpu_end import IDS, GpuEnd
with fake_gpu.installed():
    end, nbytes = GpuEnd(0, 1), len(IDS) * GpuEnd(0, 1).size
    staging = open_staging("shm", sys.argv[1], "a", 1, nbytes, TransportSite(gpu=0))["shm"]
    slot = asyncio.run(staging.acquire(1))
    print(end.copies.gather(IDS, staging.buffer(slot)[:nbytes]), flush=True)
    print(staging.offer().token, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def cluster() -> Iterator[str]:
    name = "hostcopies"
    yield name
    sweep(name)


def killed_source(cluster: str) -> list[str]:
    """What a source said before it was killed: its blocks' sums, and its offer's token."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", SOURCE, cluster], stdin=pipe, stdout=pipe, text=True
    )
    try:
        assert process.stdout is not None
        return [process.stdout.readline() for _ in range(2)]
    finally:
        process.kill()
        process.communicate(timeout=20)


async def test_a_source_that_is_killed_leaves_pages_that_can_be_read_and_are_given_back(
    cluster: str,
) -> None:
    sums, token = killed_source(cluster)
    inbox, target = opened(TransportOffer("shm", token), 0), GpuEnd(0, 2)
    before = pinned()
    assert inbox.memory is not None
    target.copies.scatter([], inbox.memory)
    assert pinned() == before + 1, "once it is opened"
    came = await inbox.receive(Chunk("m", 0, 0, 0, len(IDS) * target.size, []), None)
    assert str(target.copies.scatter(INTO, came)) == sums.strip()
    sweep(cluster)
    assert inbox.stale
    del came
    inbox.close()
    target.close()
