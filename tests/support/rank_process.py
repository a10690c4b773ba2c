"""A worker in a process of its own, with a KV cache on a GPU of the tests' own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection

from kvmig.engines.vllm.subblocks import BlockPage, RankCache
from kvmig.kernels import ipc
from kvmig.kernels.ipc import SharedAllocation
from tests.support import fake_gpu
from tests.support.fake_gpu import DeviceCache, FakeGpu
from tests.support.poisoned import Cache, make_cache

TIMEOUT_S = 20.0
BLOCKS = 8


def cache_of(rank: int, runs: Sequence[int]) -> Cache:
    """What lies in a rank's cache at first: others' bytes than in any other one's."""
    return make_cache(100 + rank, [*runs], [16] * len(runs), BLOCKS)


class Rank:
    """The process, seen from the test."""

    def __init__(self, rank: int, runs: Sequence[int]) -> None:
        """rank: its GPU, too."""
        context = multiprocessing.get_context("forkserver")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, rank, runs), daemon=True)
        self.process.start()
        theirs.close()

    def exported(self) -> tuple[RankCache, SharedAllocation]:
        """What `worker.export_cache` would tell."""
        assert self.pipe.poll(TIMEOUT_S)
        told: tuple[RankCache, SharedAllocation] = self.pipe.recv()
        return told

    def memory(self) -> bytes:
        """All of its cache, as it is now."""
        self.pipe.send("read")
        assert self.pipe.poll(TIMEOUT_S)
        return bytes(self.pipe.recv())

    def close(self) -> None:
        """Whatever state it is in."""
        self.process.kill()
        self.process.join(TIMEOUT_S)
        self.process.close()
        self.pipe.close()


def _serve(pipe: Connection, rank: int, runs: Sequence[int]) -> None:
    with fake_gpu.installed():
        gpu = FakeGpu(rank)
        cache = DeviceCache(gpu, cache_of(rank, runs))
        pages = tuple(
            BlockPage(one.base - cache.address, one.block_stride, one.run)
            for one in cache.layout.regions
        )
        described = RankCache(cache.address, cache.nbytes, pages, ())
        pipe.send((described, ipc.export_allocation(gpu, cache.address)))
        while pipe.recv() == "read":
            pipe.send(cache.memory().tobytes())
        cache.free()
