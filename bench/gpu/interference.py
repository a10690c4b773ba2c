"""How much slower decode steps are while blocks are gathered on another stream, by the way and by
CTAs. A step is a CUDA graph: products of a few rows by large matrices, and a read of KV memory.

The figure is that of the product's own settings: the kernels that it takes here, with as many CTAs
as it gives them. The least slowdown of all stands beside it, and that of the CTAs of an idle
engine's copies, into which a step may begin."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from bench.gpu.device import Deadline, Site, Way, note_gpu, options_of
from bench.gpu.gather import taken
from bench.gpu.shapes import SHAPES, ids
from bench.report import begin, finish, say, table
from kvmig.core.errors import KvmigError
from kvmig.engines.copy_width import copy_workers
from kvmig.kernels.api import BlockCopy

WORKERS = (1, 2, 4, 8, 16, 32, 64, 132)
BATCH = 32
MIB = 1 << 20
WAIT_S = 20.0
MOST_S = 36.0
TARGET = 1.02
"""Most that a step may grow by, at the product's settings."""


class Decode:
    """Steps like a model's: `layers` times two products and a sum over the KV memory."""

    def __init__(self, site: Site, layers: int, width: int, kv_bytes: int) -> None:
        self._site = site
        self._weights = [
            torch.randn(width, width, device=site.device).bfloat16() for _ in range(2 * layers)
        ]
        self._kv = site.memory(kv_bytes).view(torch.int64)
        self._rows = torch.randn(BATCH, width, device=site.device).bfloat16()
        self._stream: Any = torch.cuda.Stream() if site.device == "cuda" else None
        self._graph: Any = self._captured() if self._stream else None

    def _work(self) -> None:
        rows = self._rows
        for first, second in zip(self._weights[::2], self._weights[1::2], strict=True):
            rows = torch.nn.functional.rms_norm((rows @ first) @ second, (rows.shape[1],))
        self._kv.sum()

    def _captured(self) -> Any:
        with torch.cuda.stream(self._stream):
            self._work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._work()
        return graph

    def step_ms(self, steps: int) -> float:
        """Median over as many steps, one after the other."""
        if self._stream is None:
            times = []
            for _ in range(steps):
                start = time.perf_counter()
                self._work()
                times.append((time.perf_counter() - start) * 1e3)
            return median(times)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        with torch.cuda.stream(self._stream):
            events[0].record()
            for event in events[1:]:
                self._graph.replay()
                event.record()
        self._stream.synchronize()
        return median(float(a.elapsed_time(b)) for a, b in pairwise(events))


class Background:
    """Copies over and over, on a thread and a stream of their own, each waited for."""

    def __init__(self, copy: Callable[[], None], nbytes: int) -> None:
        self._copy, self._nbytes = copy, nbytes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.copies = 0
        self.error: Exception | None = None
        self.seconds = 0.0

    def _run(self) -> None:
        start = time.perf_counter()
        try:
            while not self._stop.is_set():
                self._copy()
                self.copies += 1
        except (KvmigError, RuntimeError, ValueError, TimeoutError) as error:
            self.error = error
        self.seconds = time.perf_counter() - start

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        if self.error is not None:
            raise self.error
        if self._thread.is_alive():
            raise TimeoutError(f"the copies go on {WAIT_S:g} s after they were stopped")

    @property
    def gb_s(self) -> float:
        return self.copies * self._nbytes / self.seconds / 1e9


def measure(
    site: Site, decode: Decode, way: Way, workers: int, memory: torch.Tensor, steps: int
) -> dict[str, Any]:
    """One sample: a step's time alone and beside the copies, and how fast these are."""
    shape = SHAPES[1]
    half = memory.numel() // 2
    n = shape.blocks(half)
    paged = shape.layout(memory.data_ptr(), n).regions
    staged = shape.staged(memory.data_ptr() + half)
    blocks = BlockCopy(paged, staged, ids("random", n, n), ids("contiguous", n, n))

    def copy() -> None:
        way.copy(blocks, checksums=way.summing, stream=site.stream, workers=workers).wait()
        if not way.summing and site.device == "cuda":
            torch.cuda.ExternalStream(site.stream).synchronize()

    copy()
    alone = decode.step_ms(steps)
    with Background(copy, n * shape.block_bytes) as background:
        beside = decode.step_ms(steps)
    return {
        "way": way.name, "workers": workers, "alone_ms": alone, "beside_ms": beside,
        "slowdown": beside / alone, "gb_s": background.gb_s,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    options = options_of(__doc__, arguments)
    quick = options.quick
    steps = 5 if quick else 60
    result = begin("gpu interference", {"batch": BATCH, "steps": steps})
    note_gpu(result)
    site = Site(options.device, options.only)
    memory = site.memory((8 if quick else 512) * MIB)
    decode = Decode(site, *((1, 64, MIB) if quick else (32, 4096, 2048 * MIB)))
    deadline = Deadline(MOST_S)
    ways = site.ways()
    product = taken(ways, site.multiprocessors)
    idle = product[0], copy_workers(product[1], True, site.multiprocessors)
    counts = (product[1], idle[1], *(WORKERS[:2] if quick else WORKERS))
    for way in ways:
        for workers in dict.fromkeys(counts if way.capped else (0,)):
            if deadline.over(result):
                break
            try:
                result.samples.append(measure(site, decode, way, workers, memory, steps))
            except (KvmigError, RuntimeError, ValueError, TimeoutError) as error:
                result.samples.append({"way": way.name, "workers": workers, "wrong": str(error)})
                say(f"{way.name}, {workers} CTAs: {error}")
    measured = [sample for sample in result.samples if "slowdown" in sample]
    if measured:
        least = min(measured, key=lambda sample: float(sample["slowdown"]))
        result.summary = {
            "step_ms_alone": median(sample["alone_ms"] for sample in measured),
            "least_slowdown": least["slowdown"],
            "gb_s_at_least_slowdown": least["gb_s"],
        }
    for sample in measured:
        if (sample["way"], sample["workers"]) == product:
            result.summary |= {"slowdown": sample["slowdown"], "gb_s": sample["gb_s"]}
        if (sample["way"], sample["workers"]) == idle:
            result.summary["slowdown_in_idle_copy"] = sample["slowdown"]
    result.targets = {"slowdown": {"max": TARGET}}
    rows = [tuple(sample.values()) for sample in measured]
    columns = ("way", "CTAs", "alone, ms", "beside, ms", "slowdown", "GB/s")
    return finish(result, options, [table("decode steps beside copies", columns, rows)])


if __name__ == "__main__":
    sys.exit(main())
