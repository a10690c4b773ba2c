"""What `bench.gather` compares: every implementation, torch's own, and the device's plain copy."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from kvmig.core.errors import KernelUnavailable
from kvmig.core.layout import BlockRegion, KVLayout, fused
from kvmig.kernels import select
from kvmig.kernels.api import BlockCopy, CopyKernels, Device, Ids
from kvmig.kernels.copy import start_copy
from kvmig.kernels.driver import CudaDriver, current_device
from kvmig.kernels.gpu import GpuKernels

CEILING = "plain copy"
INDEX_SELECT = "torch"
IN_PLACE = "torch in place"
COPY_ENGINE = "copy engine"
TMA = "cuda tma"

Start = Callable[[], object]
"""Does the work, or queues it on the stream of the measurement."""


@dataclass(frozen=True)
class Shape:
    """A model's KV cache: `layers` runs of `run` bytes a block."""

    name: str
    layers: int
    run: int

    @property
    def block_bytes(self) -> int:
        """Of one block, fused."""
        return self.layers * self.run


SHAPES = (
    Shape("LLaMA-7B", 32, 256 << 10),
    Shape("Llama-3-8B", 32, 64 << 10),
    Shape("MLA", 61, 18432),
    Shape("Llama-3-8B, whole blocks", 1, 2 << 20),
)
"""16 tokens of 2 bytes a block; the last in an order that keeps the layers of a block together."""


class Cache:
    """Twice as many blocks as are gathered, and a buffer for those, on one device."""

    def __init__(self, device: Device, shape: Shape, total: int) -> None:
        self.device = device
        self.shape = shape
        self.n = max(1, total // shape.block_bytes)
        self.nbytes = self.n * shape.block_bytes
        self.layers = torch.ones(
            (shape.layers, 2 * self.n, shape.run), dtype=torch.uint8, device=device
        )
        self.buffer = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        stride = 2 * self.n * shape.run
        base = self.layers.data_ptr()
        runs = (
            BlockRegion(base + layer * stride, shape.run, shape.run)
            for layer in range(shape.layers)
        )
        self.layout = KVLayout(tuple(runs), 2 * self.n, 16)

    def ids(self, order: str) -> Ids:
        """`n` of the blocks: "random" ones, or "contiguous"."""
        if order == "contiguous":
            return np.arange(self.n, dtype=np.int64)
        return np.random.default_rng(0).permutation(2 * self.n)[: self.n].astype(np.int64)


def implementations(device: Device) -> dict[str, CopyKernels]:
    """By name, those that work on the device."""
    found: dict[str, CopyKernels] = {}
    for name in select.ORDER[device]:
        with contextlib.suppress(KernelUnavailable):
            found[name] = select.load(name, device)
    return found


@contextlib.contextmanager
def threads_of_torch(workers: int) -> Iterator[None]:
    """As many as the others get."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, workers))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def gathers(cache: Cache, ids: Ids, checksums: bool, workers: int, stream: int) -> dict[str, Start]:
    """Ways to gather the blocks into the buffer; those without a checksum only without."""
    n, places = cache.n, np.arange(cache.n, dtype=np.int64)
    staged = fused(cache.buffer.data_ptr(), cache.layout)

    def by(kernels: CopyKernels) -> Start:
        return lambda: start_copy(
            kernels,
            *(cache.layout.regions, staged, ids, places, cache.layout.num_blocks, n),
            checksums=checksums,
            stream=stream,
            workers=workers,
        )

    ways = {name: by(kernels) for name, kernels in implementations(cache.device).items()}
    tma = next(
        (k for k in implementations(cache.device).values() if isinstance(k, GpuKernels)), None
    )
    blocks = BlockCopy(cache.layout.regions, staged, ids, places)
    if tma is not None:
        ways[TMA] = lambda: tma.copy_tma(
            blocks, checksums=checksums, stream=stream, workers=workers
        )
    if checksums:
        return ways
    if cache.device == "cuda":
        ways[COPY_ENGINE] = lambda: CudaDriver(current_device()).copy_blocks(*blocks, stream)
    return ways | _torch(cache, ids)


def _torch(cache: Cache, ids: Ids) -> dict[str, Start]:
    """Without kernels: a layer after the other, then joined; or each straight to its place."""
    chosen = torch.from_numpy(ids).to(cache.device)
    places = cache.buffer.view(cache.n, cache.shape.layers, cache.shape.run)

    def joined() -> None:
        runs = [layer.index_select(0, chosen) for layer in cache.layers]
        torch.stack(runs, dim=1, out=places)

    def in_place() -> None:
        for number, layer in enumerate(cache.layers):
            torch.index_select(layer, 0, chosen, out=places[:, number])

    return {INDEX_SELECT: joined, IN_PLACE: in_place}


class Ceiling:
    """As many bytes as the gather's: memcpy, each thread its share; or device to device."""

    def __init__(self, cache: Cache, workers: int) -> None:
        self._pool = ThreadPoolExecutor(max(1, workers)) if cache.device == "cpu" else None
        self._workers = max(1, workers)
        self._cache = cache

    def __call__(self) -> None:
        cache = self._cache
        if self._pool is None:
            cache.buffer.copy_(cache.layers.view(-1)[: cache.nbytes], non_blocking=True)
            return
        cuts = [cache.nbytes * k // self._workers for k in range(self._workers + 1)]
        to, source = cache.buffer.data_ptr(), cache.layers.data_ptr()
        shares = [
            self._pool.submit(_memcpy, to + begin, source + begin, end - begin)
            for begin, end in itertools.pairwise(cuts)
        ]
        for share in shares:
            share.result(timeout=60)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = ctypes.c_void_p


HEAD_START = 4_000_000
"""Cycles that a GPU is kept busy for before it is timed, about 2 ms: all is queued by then."""


def seconds(device: Device, start: Start, stream: int) -> float:
    """How long the work takes; on a GPU by its own clock, without the time to launch it."""
    if device == "cpu":
        begin = time.perf_counter()
        start()
        return time.perf_counter() - begin
    queue = torch.cuda.ExternalStream(stream)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    with torch.cuda.stream(queue):
        torch.cuda._sleep(HEAD_START)
        first.record()
        start()
        last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / 1e3
