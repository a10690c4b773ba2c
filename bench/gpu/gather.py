"""GB/s of payload at which paged blocks are gathered into a fused buffer, past every cache: each
way to copy, by shape, order of ids, CTAs, with checksums and without; beside one large copy.

The product's own figures are in GB/s: the kernels that it takes here, with as few CTAs as it gives
them beside an engine's steps, and with those of an idle engine. The share of the copy's ceiling is
that of the best of all ways and counts that kvmig has. Kernels that might take the place of its own
(variants.cu) are measured last, and compared with these."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from bench.gpu.device import TMA, Deadline, Site, Way, note_gpu, options_of
from bench.gpu.shapes import SHAPES, Shape, ids
from bench.report import Result, begin, finish, say, table
from kvmig.core.errors import KvmigError
from kvmig.core.layout import BlockRegion
from kvmig.engines.copy_width import copy_workers
from kvmig.engines.device_copies import CTAS_OF_TMA, CTAS_WITHOUT_TMA
from kvmig.kernels.api import BlockCopy

WORKERS = (0, 1, 2, 4, 8, 16, 32, 64, 132)
FEW = (4, 16)
"""CTAs that variants are measured with, besides one and two on each SM."""
ORDERS = ("random", "contiguous")
VARIANTS = ("rolling", "tma-")
"""How the names of variants begin (variants.cu)."""
MOST_S = 75.0
TARGETS = {65536: 0.90, 18432: 0.85}
"""Least share of the copy ceiling, on as many CTAs as it takes, by bytes of a run."""
IDLE_GB_S = 200.0
"""What the product's copies with checksums should bring where the engine idles: NVLink's."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Case:
    """One figure of the sweep."""

    shape: Shape
    order: str
    way: Way
    workers: int
    checksums: bool


def taken(ways: Sequence[Way], most: int) -> tuple[str, int]:
    """The way that the product takes for a copy to a GPU, and its CTAs, on a device with so many
    multiprocessors."""
    if TMA in (way.name for way in ways):
        return TMA, min(CTAS_OF_TMA, most)
    return ways[0].name, min(CTAS_WITHOUT_TMA, most)


def cases(ways: list[Way], most: int) -> Iterator[Case]:
    """Way by way, in their order. No more workers than `most`, the device's, except for the TMA's
    ring, of which an SM holds two. Contiguous ids with as many CTAs as the kernels choose."""
    counts = sorted({*(count for count in WORKERS if count <= most), taken(ways, most)[1]})
    for way, shape, order in product(ways, SHAPES, ORDERS):
        twice = (2 * most,) if way.name == TMA else ()
        several = way.capped and order == ORDERS[0]
        for workers in (*counts, *twice) if several else (0,):
            for checksums in (True, False) if way.summing else (False,):
                yield Case(shape, order, way, workers, checksums)


def variant_cases(variants: list[Way], most: int) -> Iterator[Case]:
    """What decides about a variant: random ids, few CTAs, and one and two on each SM."""
    for way, shape in product(variants, SHAPES):
        for workers in (*(count for count in FEW if count <= most), most, 2 * most):
            for checksums in (True, False):
                yield Case(shape, ORDERS[0], way, workers, checksums)


class Memory:
    """A pool of paged blocks, and a buffer for some of them."""

    def __init__(self, site: Site, pool: int, payload: int) -> None:
        self._site = site
        self.pool = site.memory(pool)
        self.buffer = site.memory(payload, 0)

    def gather(self, case: Case) -> Sequence[BlockRegion]:
        """Queue one gather; returns the source's regions."""
        blocks = self.arguments(case)
        options = {"stream": self._site.stream, "workers": case.workers}
        case.way.copy(blocks, checksums=case.checksums, **options)
        return blocks.src

    def arguments(self, case: Case) -> BlockCopy:
        shape = case.shape
        blocks = shape.blocks(self.pool.numel())
        n = min(blocks, shape.blocks(self.buffer.numel()))
        layout = shape.layout(self.pool.data_ptr(), blocks)
        staged = shape.staged(self.buffer.data_ptr())
        chosen, places = ids(case.order, n, blocks), ids("contiguous", n, n)
        return BlockCopy(layout.regions, staged, chosen, places)

    def right(self, case: Case) -> bool:
        """Whether the buffer holds the blocks that the case asks for."""
        _, _, numbers, places = self.arguments(case)
        shape, n = case.shape, len(places)
        blocks = shape.blocks(self.pool.numel())
        paged = self.pool[: blocks * shape.block_bytes].view(shape.regions, blocks, shape.run)
        held = self.buffer[: n * shape.block_bytes].view(n, shape.regions, shape.run)
        some = sorted({0, n // 2, n - 1})
        chosen = torch.from_numpy(numbers[some]).to(self.pool.device)
        return torch.equal(held[some], paged[:, chosen].transpose(0, 1))


def index_select(site: Site, memory: Memory, case: Case) -> float:
    """Seconds of torch's own gather of the same blocks, a call a layer."""
    _, _, numbers, _ = memory.arguments(case)
    shape, blocks = case.shape, case.shape.blocks(memory.pool.numel())
    words = memory.pool[: blocks * shape.block_bytes].view(torch.int64)
    paged = words.view(shape.regions, blocks, shape.run // 8)
    chosen = torch.from_numpy(numbers).to(memory.pool.device)
    out = memory.buffer[: len(numbers) * shape.block_bytes].view(torch.int64)
    held = out.view(shape.regions, len(numbers), shape.run // 8)

    def work() -> None:
        for layer, into in zip(paged, held, strict=True):
            torch.index_select(layer, 0, chosen, out=into)

    with site.queue():
        return site.seconds(work)


def measure(site: Site, memory: Memory, case: Case) -> dict[str, Any]:
    """One sample. `gb_s` is there if the copy ran and was right."""
    sample: dict[str, Any] = {
        "shape": case.shape.name, "run": case.shape.run, "ids": case.order,
        "way": case.way.name, "workers": case.workers, "checksums": case.checksums,
    }  # fmt: skip
    n = len(memory.arguments(case)[2])
    memory.buffer.zero_()
    site.settle()
    try:
        seconds = site.seconds(lambda: memory.gather(case))
        site.settle()
        if memory.right(case):
            sample["gb_s"] = n * case.shape.block_bytes / seconds / 1e9
        else:
            sample["wrong"] = "the buffer holds other bytes"
    except (KvmigError, RuntimeError, ValueError) as error:
        sample["wrong"] = f"{type(error).__name__}: {error}"
    if "wrong" in sample:
        say(str(sample))
    return sample


def summarise(result: Result, ceiling: float, product: tuple[str, int], most: int) -> None:
    """Shares of the ceiling, and the product's GB/s, for each run that has a target; wrong samples.

    product: the way that the product takes, and its CTAs; most: SMs of the device.
    """
    idle = product[0], copy_workers(product[1], True, most)
    result.summary["device_copy_gb_s"] = ceiling
    for run, least in TARGETS.items():
        for summed, name in ((True, "checked"), (False, "plain")):
            found = {
                (sample["way"], sample["workers"]): float(sample["gb_s"])
                for sample in result.samples
                if sample.get("run") == run
                and sample.get("ids") == "random"
                and sample.get("checksums") is summed
                and "gb_s" in sample
                and sample["way"] != "index_select"
                and not sample["way"].startswith(VARIANTS)
            }
            figure = f"gather_{run // 1024}kb_{name}"
            result.summary[f"{figure}_gb_s"] = found.get(product, 0.0)
            result.summary[f"{figure}_idle_gb_s"] = found.get(idle, 0.0)
            result.summary[f"{figure}_share"] = max(found.values(), default=0.0) / ceiling
            result.targets[f"{figure}_share"] = {"min": least}
        result.targets[f"gather_{run // 1024}kb_checked_idle_gb_s"] = {"min": IDLE_GB_S}
    result.summary |= variant_ratios(result)
    result.summary["wrong"] = float(sum("wrong" in sample for sample in result.samples))
    result.targets["wrong"] = {"max": 0}


def variant_ratios(result: Result) -> dict[str, float]:
    """For each variant and run, at FEW CTAs and at its best count, with checksums: GB/s by that of
    the product's kernel that it would take the place of."""
    rates = {
        (sample["run"], sample["way"], sample["workers"]): float(sample["gb_s"])
        for sample in result.samples
        if sample.get("ids") == ORDERS[0] and sample.get("checksums") and "gb_s" in sample
    }
    ratios = {}
    for run, way, workers in rates:
        present = TMA if way.startswith("tma-") else "cuda"
        if not way.startswith(VARIANTS) or (run, present, FEW[0]) not in rates:
            continue
        if workers in FEW and (run, present, workers) in rates:
            ratio = rates[run, way, workers] / rates[run, present, workers]
            ratios[f"{way}_{run // 1024}kb_at_{workers}"] = ratio
        best, best_now = (
            max(rate for (here, by, _), rate in rates.items() if (here, by) == (run, name))
            for name in (way, present)
        )
        ratios[f"{way}_{run // 1024}kb_best"] = best / best_now
    return ratios


def best_by_way(result: Result) -> list[tuple[object, ...]]:
    """Rows: shape, way, best GB/s with checksums and without, of random ids."""
    rows: list[tuple[object, ...]] = []
    samples = [s for s in result.samples if s.get("ids") == "random" and "gb_s" in s]
    for shape, way in dict.fromkeys((s["shape"], s["way"]) for s in samples):
        here = [s for s in samples if (s["shape"], s["way"]) == (shape, way)]
        best = [
            max((s["gb_s"] for s in here if s["checksums"] is summed), default="")
            for summed in (True, False)
        ]
        rows.append((f"{shape}: {way}", *best))
    return rows


def main(arguments: list[str] | None = None) -> int:
    options = options_of(__doc__, arguments)
    pool, payload = (16 << 20, 8 << 20) if options.quick else (4 * GIB, GIB)
    result = begin("gpu gather", {"pool_bytes": pool, "payload_bytes": payload})
    note_gpu(result)
    deadline = Deadline(MOST_S)
    site = Site(options.device, options.only)
    ways = site.ways()
    ceiling = site.copy_ceiling(payload)
    memory = Memory(site, pool, payload)
    torch_way = Way("index_select", ways[0].copy, capped=False, summing=False)
    for shape, order in product(SHAPES, ORDERS):
        case = Case(shape, order, torch_way, 0, False)
        n = len(memory.arguments(case)[2])
        gb_s = n * shape.block_bytes / index_select(site, memory, case) / 1e9
        result.samples.append(
            {"shape": shape.name, "run": shape.run, "ids": order, "way": "index_select",
             "workers": 0, "checksums": False, "gb_s": gb_s}
        )  # fmt: skip
    most = site.multiprocessors
    for case in (*cases(ways, most), *variant_cases(site.variants(), most)):
        if deadline.over(result):
            break
        result.samples.append(measure(site, memory, case))
    result.samples += [{"missing": name, "reason": why} for name, why in site.reasons.items()]
    summarise(result, ceiling, taken(ways, most), most)
    columns = ("random ids", "GB/s with checksums", "GB/s without")
    return finish(result, options, [table("best of all CTA counts", columns, best_by_way(result))])


if __name__ == "__main__":
    sys.exit(main())
