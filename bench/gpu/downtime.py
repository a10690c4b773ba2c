"""The pause of a migration between two processes on one GPU: the source gathers straight into the
destination's staging memory (CUDA IPC), which scatters, compares checksums and says so; both by the
product's kernel for that, on as many CTAs as it gives it.

live: only the last block moves in the pause; blocking: all do. recompute is computed, from the
model's operations at the matmul rate measured here. No engine decodes meanwhile.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from statistics import median

from bench.gpu.ceilings import matmul_tflops
from bench.gpu.device import Site, between_gpus, note_gpu, options_of
from bench.gpu.shapes import SHAPES, Shape, ids
from bench.gpu.staging import Name, create, open_named
from bench.report import begin, finish, table
from kvmig.core.errors import TransportError
from kvmig.kernels.api import BlockCopy, Device, Ids
from kvmig.kernels.select import kernels

TOKENS = (256, 1024, 4096, 8192, 16384, 32768)
BLOCK_TOKENS = 16
PARAMETERS = 8.03e9
"""Of Llama 3 8B; a token takes two operations of each."""
SHAPE = SHAPES[1]
REPLY_TIMEOUT_S = 20.0
END_TIMEOUT_S = 10.0


def source(link: Connection, device: Device, shape: Shape, blocks: int, name: Name) -> None:
    """The other process: gathers the blocks that it is asked for until it is asked for none."""
    site, copy = Site(device), between_gpus(kernels(device))
    pool = site.memory(blocks * shape.block_bytes)
    site.settle()
    paged = shape.layout(pool.data_ptr(), blocks).regions
    staging = open_named(name)
    link.send("ready")
    try:
        while (asked := link.recv()) is not None:
            chosen, offset = asked
            places = ids("contiguous", len(chosen), len(chosen))
            staged = shape.staged(staging.address + offset)
            sums = copy(
                BlockCopy(paged, staged, chosen, places), checksums=True, stream=site.stream
            )
            link.send(sums.wait())
    finally:
        staging.close()


class Destination:
    """This process's half, with two slots: one is filled while the other is scattered."""

    def __init__(
        self, site: Site, link: Connection, shape: Shape, blocks: int, base: int, slot: int
    ) -> None:
        self._site, self._link, self._shape, self._base, self._slot = site, link, shape, base, slot
        self._copy = between_gpus(kernels(site.device))
        self._pool = site.memory(blocks * shape.block_bytes, 0)
        self._regions = shape.layout(self._pool.data_ptr(), blocks).regions
        site.settle()

    def move(self, src_ids: Ids, dst_ids: Ids) -> None:
        """Blocks of the source's pool to these places. Raises TransportError."""
        step = self._shape.blocks(self._slot)
        starts = range(0, len(src_ids), step)
        self._ask(src_ids[:step], 0)
        for number, start in enumerate(starts):
            sums = self._answer()
            following = start + step
            if following < len(src_ids):
                self._ask(src_ids[following : following + step], number + 1)
            self._scatter(dst_ids[start:following], number, sums)

    def _ask(self, chosen: Ids, number: int) -> None:
        self._link.send((chosen, number % 2 * self._slot))

    def _answer(self) -> list[int]:
        if not self._link.poll(REPLY_TIMEOUT_S):
            raise TransportError(f"the source is silent for {REPLY_TIMEOUT_S:g} s")
        sums: list[int] = self._link.recv()
        return sums

    def _scatter(self, places: Ids, number: int, sums: list[int]) -> None:
        staged = self._shape.staged(self._base + number % 2 * self._slot)
        from_ = ids("contiguous", len(places), len(places))
        blocks = BlockCopy(staged, self._regions, from_, places)
        done = self._copy(blocks, checksums=True, stream=self._site.stream)
        if done.wait() != sums:
            raise TransportError("a block's checksum differs")


@contextmanager
def pair(site: Site, shape: Shape, blocks: int, slot: int) -> Iterator[Destination]:
    """Both processes; the other one is ended whatever happens."""
    staging = create(site.device, 2 * slot)
    spawning = multiprocessing.get_context("spawn")
    link, far = spawning.Pipe()
    arguments = far, site.device, shape, blocks, staging.name
    child = spawning.Process(target=source, args=arguments, daemon=True)
    child.start()
    far.close()
    try:
        if not link.poll(3 * REPLY_TIMEOUT_S) or link.recv() != "ready":
            raise TransportError("the source doesn't start")
        yield Destination(site, link, shape, blocks, staging.address, slot)
        link.send(None)
        child.join(END_TIMEOUT_S)
    finally:
        if child.is_alive():
            child.kill()
            child.join(END_TIMEOUT_S)
        link.close()
        staging.close()


def milliseconds(work: Callable[[], None], repeats: int) -> float:
    """Median, after one more."""
    work()
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times) * 1e3


def main(arguments: list[str] | None = None) -> int:
    options = options_of(__doc__, arguments)
    shape = Shape("small", 4096, 2) if options.quick else SHAPE
    tokens = TOKENS[:2] if options.quick else TOKENS
    slot = (1 if options.quick else 128) << 20
    result = begin("gpu downtime", {"shape": shape.name, "slot_bytes": slot})
    note_gpu(result)
    site = Site(options.device)
    rate = matmul_tflops(site, 256 if options.quick else 8192) * 1e12
    most = max(tokens) // BLOCK_TOKENS
    with pair(site, shape, most, slot) as destination:
        for count in tokens:
            n = count // BLOCK_TOKENS
            src, dst = ids("random", n, most), ids("random", n, most)[::-1].copy()
            last = slice(n - 1, n)
            live = milliseconds(lambda s=src[last], d=dst[last]: destination.move(s, d), 20)  # type: ignore[misc]
            blocking = milliseconds(lambda s=src, d=dst: destination.move(s, d), 5)  # type: ignore[misc]
            result.samples.append(
                {"tokens": count, "live_ms": live, "blocking_ms": blocking,
                 "recompute_ms_computed": 2 * PARAMETERS * count / rate * 1e3}
            )  # fmt: skip
    lives = [sample["live_ms"] for sample in result.samples]
    result.summary = {
        "live_ms_median": median(lives),
        "live_growth": max(lives) / min(lives),
        "blocking_ms_longest": result.samples[-1]["blocking_ms"],
    }
    rows = [tuple(sample.values()) for sample in result.samples]
    columns = ("tokens", "live, ms", "blocking, ms", "recompute, ms (computed)")
    return finish(result, options, [table("the pause", columns, rows)])


if __name__ == "__main__":
    sys.exit(main())
