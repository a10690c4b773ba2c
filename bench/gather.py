"""Gathering KV blocks into one buffer: every implementation beside the device's plain copy.

Gigabytes a second of gathered bytes. In each round all implementations and the plain copy of as
many bytes (memcpy with as many threads; on a GPU device to device) follow one another, and ratios
are of one round: a machine that is slower for a while is so for all. Buffers are many times as
large as the caches. The figures are the least of all shapes and orders of ids.

torch: index_select of each layer, then joined, as one would do it without kernels. In place:
each straight to its part of the buffer (`out=`). That copies run by run as ours does, though
without checksums, so both reach what memory allows: there is no target beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table

from bench import report
from bench.gather_runs import (
    CEILING,
    IN_PLACE,
    INDEX_SELECT,
    SHAPES,
    Cache,
    Ceiling,
    Start,
    gathers,
    seconds,
    threads_of_torch,
)
from kvmig.core.errors import KernelUnavailable, KvmigError
from kvmig.kernels.api import Device

ORDERS = ("random", "contiguous")
TOTAL: dict[Device, int] = {"cpu": 128 << 20, "cuda": 4 << 30}
"""Bytes gathered at a time."""
WORKERS: dict[Device, tuple[int, ...]] = {"cpu": (1, 2), "cuda": (0,)}
"""Threads; CTAs, where 0 is as many as the kernels choose."""
LONG_RUN = ("*_over_index_select_*",)
"""The least of all shapes' ratios, which of 5 rounds is too low."""
SLOW = "reference"
"""One round of it says enough."""


@dataclass(frozen=True)
class Sample:
    """One implementation in one round."""

    shape: str
    run_bytes: int
    ids: str
    checksums: bool
    workers: int
    name: str
    round: int
    gb_per_s: float
    ceiling_gb_per_s: float

    @property
    def ratio(self) -> float:
        """Over the plain copy of the same round."""
        return self.gb_per_s / self.ceiling_gb_per_s


def measure(device: Device, workers: Sequence[int], total: int, rounds: int) -> list[Sample]:
    """All samples; the first round of each cell is thrown away, it finds caches cold."""
    samples: list[Sample] = []
    stream = torch.cuda.Stream().cuda_stream if device == "cuda" else 0
    with report.progress() as bar:
        for shape in bar.track(SHAPES, description="shapes"):
            cache = Cache(device, shape, total)
            for order, checksums, count in product(ORDERS, (False, True), workers):
                cell = (shape.name, shape.run, order, checksums, count)
                ceiling = Ceiling(cache, count)
                ways = gathers(cache, cache.ids(order), checksums, count, stream)
                with threads_of_torch(count):
                    samples += _rounds(device, cache, ceiling, ways, cell, rounds, stream)
                ceiling.close()
            del cache, ceiling, ways
    return samples


def _rounds(
    device: Device,
    cache: Cache,
    ceiling: Ceiling,
    ways: dict[str, Start],
    cell: tuple[str, int, str, bool, int],
    rounds: int,
    stream: int,
) -> Iterable[Sample]:
    for number in range(-1, rounds):
        plain = cache.nbytes / seconds(device, ceiling, stream) / 1e9
        for name, start in list(ways.items()):
            if name == SLOW and number > 0:
                continue
            try:
                rate = cache.nbytes / seconds(device, start, stream) / 1e9
            except KernelUnavailable as error:
                report.say(f"{name}: {error}")
                del ways[name]
                continue
            if number >= 0:
                yield Sample(*cell, name, number, rate, plain)


def summarise(
    device: Device, samples: Sequence[Sample]
) -> tuple[dict[str, float], dict[str, report.Target]]:
    """The figures of the implementation that would be chosen, and what they should be."""
    best = samples[0].name
    ours = [sample for sample in samples if sample.name == best]
    summary: dict[str, float] = {}
    targets: dict[str, report.Target] = {}

    def least(key: str, chosen: list[Sample], target: float | None) -> None:
        summary[key] = min(ratios(chosen).values())
        if target is not None:
            targets[key] = {"min": target}

    if device == "cpu":
        for workers in sorted({sample.workers for sample in samples}):
            here = [sample for sample in ours if sample.workers == workers]
            of = f"{workers}_thread{'s' if workers > 1 else ''}"
            least(f"{best}_over_memcpy_{of}", [s for s in here if not s.checksums], 0.6)
            least(f"{best}_checksum_over_memcpy_{of}", [s for s in here if s.checksums], 0.6)
            key = f"{best}_over_index_select_{of}"
            summary[key] = min(over_torch(samples, best, INDEX_SELECT, workers).values())
            targets[key] = {"min": 2.0}
            key = f"{best}_over_index_select_in_place_{of}"
            summary[key] = min(over_torch(samples, best, IN_PLACE, workers).values())
    else:
        for run, target in ((64 << 10, 0.90), (18432, 0.85)):
            here = [sample for sample in ours if sample.run_bytes == run]
            plain, summed = ([s for s in here if s.checksums is on] for on in (False, True))
            least(f"{best}_over_copy_{run}", plain, target)
            least(f"{best}_checksum_over_copy_{run}", summed, None)
    summary["plain_copy_gb_per_s"] = median(sample.ceiling_gb_per_s for sample in samples)
    return summary, targets


Cell = tuple[str, str, bool, int, str]


def cells(samples: Iterable[Sample]) -> dict[Cell, list[Sample]]:
    """All rounds of one implementation in one cell."""
    found: dict[Cell, list[Sample]] = {}
    for one in samples:
        found.setdefault((one.shape, one.ids, one.checksums, one.workers, one.name), []).append(one)
    return found


def ratios(samples: Iterable[Sample]) -> dict[Cell, float]:
    """The median ratio of each cell."""
    return {cell: median(s.ratio for s in found) for cell, found in cells(samples).items()}


def over_torch(
    samples: Sequence[Sample], name: str, way: str, workers: int
) -> dict[tuple[str, str], float]:
    """By shape and order of ids: `name` over a `way` of torch's, both without checksums."""
    found = cells(samples)
    return {
        (shape, ids): median(
            one.gb_per_s / other.gb_per_s
            for one, other in zip(
                found[shape, ids, False, workers, name],
                found[shape, ids, False, workers, way],
                strict=False,
            )
        )
        for shape, ids, _, count, other_name in found
        if (count, other_name) == (workers, way)
    }


def tables(samples: Sequence[Sample]) -> list[Table]:
    """A table a shape: the plain copy's rate, and of each implementation rate and ratio."""
    found = cells(samples)
    names = list(dict.fromkeys(sample.name for sample in samples))
    made: list[Table] = []
    for shape in dict.fromkeys(sample.shape for sample in samples):
        rows: list[list[object]] = []
        for _, ids, checksums, workers in dict.fromkeys(c[:4] for c in found if c[0] == shape):
            here = [found.get((shape, ids, checksums, workers, name), []) for name in names]
            ceiling = median(sample.ceiling_gb_per_s for one in here for sample in one)
            label = f"{ids}, {workers}{', sum' if checksums else ''}"
            rows.append([label, ceiling, *map(_rate, here)])
        columns = ("ids, workers", CEILING, *names)
        made.append(report.table(f"{shape}: GB/s (over {CEILING}), medians", columns, rows))
    return made


def _rate(samples: Sequence[Sample]) -> str:
    """The median rate and ratio, where there are any."""
    if not samples:
        return ""
    rate = median(sample.gb_per_s for sample in samples)
    return f"{rate:.1f} ({median(sample.ratio for sample in samples):.2f})"


def draw(result: report.Result, file: Path) -> None:
    """A panel a shape: a bar for each implementation, over the plain copy as a line."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    samples = [Sample(**sample) for sample in result.samples]
    workers = min(sample.workers for sample in samples)
    shapes = list(dict.fromkeys(sample.shape for sample in samples))
    figure, axes = pyplot.subplots(1, len(shapes), figsize=(4 * len(shapes), 4), squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=True):
        here = [s for s in samples if (s.shape, s.ids, s.workers) == (shape, "random", workers)]
        bars: dict[str, float] = {}
        for (_, _, checksums, _, name), found in cells(here).items():
            label = f"{name}\nchecksum" if checksums else name.replace(" ", "\n")
            bars[label] = median(s.gb_per_s for s in found)
        axis.bar(list(bars), list(bars.values()), color="#1f6fb2")
        axis.axhline(median(s.ceiling_gb_per_s for s in here), color="#777777", linestyle="--")
        axis.set_title(shape)
        axis.tick_params(axis="x", labelsize="x-small")
    axes[0][0].set_ylabel(f"GB/s, random ids, {workers} worker(s); line: {CEILING}")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__, LONG_RUN)
    root.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    root.add_argument("--workers", type=int, nargs="+", help="threads or CTAs (0: chosen)")
    root.add_argument("--mib", type=int, help="gathered at a time")
    options = root.parse_args(argv)
    device: Device = options.device
    if device == "cuda" and not torch.cuda.is_available():
        print("error: --device cuda: torch sees no GPU", file=sys.stderr)
        return 2
    workers = options.workers or WORKERS[device]
    total = options.mib << 20 if options.mib else TOTAL[device]
    rounds = 5 if options.quick else 15
    settings: dict[str, Any] = {"device": device, "workers": list(workers), "bytes": total}
    result = report.begin("gather", settings | {"rounds": rounds})
    if device == "cuda":
        result.machine["gpu"] = torch.cuda.get_device_name()
    try:
        samples = measure(device, workers, total, rounds)
    except KvmigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result.samples = [asdict(sample) for sample in samples]
    result.summary, result.targets = summarise(device, samples)
    return report.finish(result, options, tables(samples), draw)


if __name__ == "__main__":
    sys.exit(main())
