"""Workers that are processes of their own, on GPUs: one process copies what lies in all of them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvmig.core.errors import KernelUnavailable
from kvmig.core.layout import KVLayout
from kvmig.engines.block_copies import BlockPlan
from kvmig.engines.device_copies import DeviceCopies
from kvmig.engines.vllm.memory import SharedCache
from kvmig.engines.vllm.subblocks import whole_blocks
from kvmig.kernels.arrays import memory_of
from kvmig.kvtransfer.messages import Chunk
from kvmig.kvtransfer.transports.select import TransportSite, open_offer, open_staging
from tests.support import fake_gpu
from tests.support.fake_gpu import FakeGpu, FakeKernels
from tests.support.poisoned import make_cache
from tests.support.rank_process import BLOCKS, Rank, cache_of

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("gpus")]

RUNS = (48, 4096, 56)
IDS = [6, 0, 3, 7]
ON_GPUS: Any = SimpleNamespace(device_config=SimpleNamespace(device_type="cuda"))


class Executor:
    """In the place of vLLM's: a worker on each of two GPUs."""

    def __init__(self) -> None:
        self.workers = [Rank(rank, RUNS) for rank in (0, 1)]

    def collective_rpc(self, function: object, timeout: float, args: object) -> list[Any]:
        return [one.exported() for one in self.workers]

    def close(self) -> None:
        for one in self.workers:
            one.close()


@pytest.fixture
def executor() -> Iterator[Executor]:
    made = Executor()
    yield made
    made.close()


class World:
    """Both workers' caches as one process sees them."""

    def __init__(self, executor: Executor) -> None:
        self.ranks, self.gpu = executor.workers, FakeGpu(0)
        self.kernels = FakeKernels(self.gpu)
        self.cache = SharedCache(ON_GPUS, executor, [])
        layout = KVLayout(whole_blocks(self.cache.ranks), BLOCKS, 16)
        self.plan, self.size = BlockPlan(layout), layout.block_bytes
        self.copies = DeviceCopies(self.plan, self.gpu, self.kernels, steps_overlap=True)

    def close(self) -> None:
        self.copies.close()
        self.kernels.close()
        self.cache.close()


@pytest.fixture
def world(executor: Executor) -> Iterator[World]:
    made = World(executor)
    yield made
    made.close()


def fused(ids: list[int]) -> bytes:
    """Blocks of both workers: each block's runs of the first one, then of the second one."""
    caches = [cache_of(rank, RUNS) for rank in (0, 1)]
    return b"".join(cache.block(number) for number in ids for cache in caches)


def test_one_kernel_gathers_a_block_from_all_workers_gpus(world: World) -> None:
    assert world.cache.gpu == 0
    out = bytearray(len(IDS) * world.size)
    world.copies.gather(IDS, memoryview(out))
    assert bytes(out) == fused(IDS)
    assert len(world.kernels.launches.on) == 1


def test_one_kernel_scatters_to_all_workers_gpus_and_touches_nothing_else(world: World) -> None:
    other = make_cache(7, [2 * sum(RUNS)], [0], BLOCKS)
    data = b"".join(other.block(number) for number in IDS)
    world.copies.scatter(IDS, memoryview(bytearray(data)))
    for rank, one in enumerate(world.ranks):
        cache, half = cache_of(rank, RUNS), sum(RUNS)
        expected = cache.memory.copy()
        for place, number in enumerate(IDS):
            at = place * world.size + rank * half
            cache.with_block(expected, number, data[at : at + half])
        assert np.array_equal(np.frombuffer(one.memory(), np.uint8), expected)
    assert len(world.kernels.launches.on) == 1


async def test_one_kernel_gathers_from_all_workers_into_another_instances_inbox(
    world: World,
) -> None:
    nbytes = len(IDS) * world.size
    staging = open_staging("cuda-ipc", "test", "a", 1, nbytes, TransportSite(gpu=0))["cuda-ipc"]
    inbox = open_offer([staging.offer()], "cuda-ipc", TransportSite(gpu=1))
    slot, channel = await staging.acquire(1), staging.channel(inbox.token)
    out = await channel.buffer(slot)
    sums = world.copies.gather(IDS, out)
    came = await inbox.receive(Chunk("m", 0, 0, slot, nbytes, sums), None)
    assert FakeGpu(1).read(memory_of(came).address, nbytes) == fused(IDS)
    assert len(world.kernels.launches.on) == 1
    del out, came
    inbox.close()
    staging.close()


def test_workers_that_the_first_gpu_does_not_reach_are_named_and_nothing_is_left(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMIG_FAKE_NO_PEERS", "1")
    before = fake_gpu.held()
    with pytest.raises(KernelUnavailable, match="GPU 0 can't open memory of GPU 1: cuIpcOpenMem"):
        SharedCache(ON_GPUS, executor, [])
    assert fake_gpu.held() == before
