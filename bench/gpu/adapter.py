"""GB/s of the vLLM adapter's copies between a KV cache and each kind of buffer; into a GPU's, also
as an idle engine makes them."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

from bench.gpu.device import POISON, Site
from bench.gpu.shapes import Shape, ids
from bench.report import Result
from kvmig.core.errors import KvmigError
from kvmig.core.layout import KVLayout
from kvmig.engines.block_copies import BlockPlan, CopyBackend, HostCopies
from kvmig.engines.device_copies import DeviceCopies, load
from kvmig.kernels.api import Device
from kvmig.kernels.driver import current_device
from kvmig.kernels.ipc import view
from kvmig.kvtransfer.transports.select import TransportSite, open_offer, open_staging

REPEATS = 3
IDLE = "device, idle engine"
BUFFERS: dict[Device, tuple[str, ...]] = {
    "cpu": ("mapping", "shm", "bytes"),
    "cuda": ("device", IDLE, "mapping", "shm", "bytes"),
}


@contextmanager
def buffers_of(site: Site, kind: str, nbytes: int) -> Iterator[tuple[memoryview, memoryview]]:
    """Where blocks are gathered to, and the same bytes where they are scattered from: of the
    device, a mapping (pinned at its first copy), a file in /dev/shm as `shm` maps it at the two
    ends, or other memory of the host."""
    if kind == "shm":
        gpu = current_device() if site.device == "cuda" else None
        ends = TransportSite(gpu=gpu)
        (staging,) = open_staging("shm", "bench", "adapter", 1, nbytes, ends).values()
        inbox = open_offer([staging.offer()], "shm", ends)
        try:
            here, there = staging.memory, inbox.memory
            if here is None or there is None:
                raise KvmigError("shared memory without a mapping")
            slot = slice(mmap.PAGESIZE, mmap.PAGESIZE + nbytes)
            yield here[slot], there[slot]
        finally:
            inbox.close()
            staging.close()
        return
    if kind in ("device", IDLE):
        memory = site.memory(nbytes, 0)
        buffer = view(memory.data_ptr(), nbytes, memory)
    else:
        buffer = memoryview(mmap.mmap(-1, nbytes) if kind == "mapping" else bytearray(nbytes))
    yield buffer, buffer


def adapter(site: Site, shape: Shape, nbytes: int, result: Result) -> None:
    """`nbytes` of blocks at random to each kind of buffer and back, into a second cache.

    Raises KvmigError if other blocks come back, or other checksums.
    """
    blocks = 2 * shape.blocks(nbytes)
    chosen = ids("random", blocks // 2, blocks).tolist()
    size = blocks * shape.block_bytes
    source, target = site.memory(size), site.memory(size, POISON)
    site.settle()
    here, there = (_copies(site, shape.layout(one.data_ptr(), blocks)) for one in (source, target))
    try:
        for kind in BUFFERS[site.device]:
            for end, _ in (here, there):
                if isinstance(end, DeviceCopies):
                    end.width.engine_idle = partial(bool, kind == IDLE)
            moved = len(chosen) * shape.block_bytes
            with buffers_of(site, kind, moved) as (out, data):
                sums, gather_s = _timed(partial(here[0].gather, chosen, out))
                found, scatter_s = _timed(partial(there[0].scatter, chosen, data))
            left, right = (
                one.view(shape.regions, blocks, shape.run)[:, chosen] for one in (source, target)
            )
            if sums != found or not bool((left == right).all()):
                raise KvmigError(f"the adapter's copies through {kind} are wrong")
            sample = {"way": "adapter", "shape": shape.name, "buffer": kind}
            rates = {
                "gather_gb_s": moved / gather_s / 1e9,
                "scatter_gb_s": moved / scatter_s / 1e9,
            }
            result.samples.append(sample | rates)
            target.fill_(POISON)
            site.settle()
    finally:
        here[1]()
        there[1]()


def _copies(site: Site, layout: KVLayout) -> tuple[CopyBackend, Callable[[], None]]:
    """And what frees them."""
    if site.device == "cpu":
        return HostCopies(BlockPlan(layout)), lambda: None
    copies = load(BlockPlan(layout), current_device(), steps_overlap=False)
    return copies, copies.close


def _timed(copy: Callable[[], list[int]]) -> tuple[list[int], float]:
    """Its checksums, and the median time after a first one."""
    sums = copy()
    times: list[float] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        copy()
        times.append(time.perf_counter() - start)
    return sums, median(times)
