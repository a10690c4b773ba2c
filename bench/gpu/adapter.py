"""GB/s of the vLLM adapter's copies between a KV cache and each kind of buffer."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from functools import partial
from statistics import median

from bench.gpu.device import POISON, Site
from bench.gpu.shapes import Shape, ids
from bench.report import Result
from kvmig.core.errors import KvmigError
from kvmig.core.layout import KVLayout
from kvmig.engines.block_copies import BlockPlan, CopyBackend, HostCopies
from kvmig.engines.device_copies import load
from kvmig.kernels.api import Device
from kvmig.kernels.driver import current_device
from kvmig.kernels.ipc import view

REPEATS = 3
BUFFERS: dict[Device, tuple[str, ...]] = {
    "cpu": ("mapping", "bytes"),
    "cuda": ("device", "mapping", "bytes"),
}


def buffer_of(site: Site, kind: str, nbytes: int) -> memoryview:
    """Of the device, a mapping (pinned at its first copy), or other memory of the host."""
    if kind == "device":
        memory = site.memory(nbytes, 0)
        return view(memory.data_ptr(), nbytes, memory)
    return memoryview(mmap.mmap(-1, nbytes) if kind == "mapping" else bytearray(nbytes))


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
            buffer = buffer_of(site, kind, len(chosen) * shape.block_bytes)
            sums, gather_s = _timed(partial(here[0].gather, chosen, buffer))
            found, scatter_s = _timed(partial(there[0].scatter, chosen, buffer))
            left, right = (
                one.view(shape.regions, blocks, shape.run)[:, chosen] for one in (source, target)
            )
            if sums != found or not bool((left == right).all()):
                raise KvmigError(f"the adapter's copies through {kind} are wrong")
            sample = {"way": "adapter", "shape": shape.name, "buffer": kind}
            moved = buffer.nbytes / 1e9
            rates = {"gather_gb_s": moved / gather_s, "scatter_gb_s": moved / scatter_s}
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
