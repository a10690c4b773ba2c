"""What the scheduler costs: a round, a dispatch and a report, by instances and requests.

Reports are made up, the code is the one that runs: `ViewBuilder`, the dispatcher and
`RoundScheduler` of a policy. One in five instances is short of room, one in twenty has a queue.
For each number of instances the numbers of requests take turns, so a machine that is slower
for a while is so for all. A dispatch is the choice and the note of it; a report is taken from
its bytes. Times are the processor's: nothing here waits for anything. Figures are medians; the
spread is over numbers of requests an instance.

Times differ by three between machines, so the targets are ratios: to NumPy's plain (stable) sort
and sum of 10,000 figures, taken between the looks of the same run.

The reports themselves, and lists of what may move: what they cost an instance whose queue grows,
see `bench.queues`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

import msgspec
from rich.table import Table

from bench import queues, report
from bench.queues import Look
from kvmig.controlplane.dispatch import NewRequest
from kvmig.controlplane.messages import ClusterMember, ClusterMessage, LoadReport
from kvmig.controlplane.policy import POLICIES, policy_of
from kvmig.controlplane.scheduler import RoundScheduler
from kvmig.controlplane.view import ViewBuilder
from kvmig.core.config import SchedulerConfig
from kvmig.engines.base import EngineLoad

INSTANCES = (10, 100, 1_000, 10_000)
REQUESTS = (1, 10, 100, 1_000)
BLOCKS = 20
"""An instance has so many for each request: then all numbers of requests are one situation."""
DISPATCHES = 20
"""In a row, of which the mean counts."""
TARGETS: dict[str, report.Target] = {
    "round_over_sort_10000": {"max": 20.0},
    "dispatch_over_sort_10000": {"max": 0.12},
    "round_spread_10000": {"max": 1.5},
    "snapshot_over_sort_10000": {"max": 0.2},
    "snapshot_growth": {"max": 2.0},
    "list_over_sort_10000": {"max": 0.5},
}


@dataclass(frozen=True)
class Sample:
    """One look at one cluster."""

    instances: int
    requests: int
    round_ms: float
    pairs: int
    dispatch_us: float
    report_us: float
    report_bytes: int
    sort_us: float


class Cluster:
    """`instances` with `requests` each, as a scheduler and a front end know them."""

    def __init__(self, policy: str, instances: int, requests: int, seed: int) -> None:
        chosen = policy_of(msgspec.convert({"policy": policy}, SchedulerConfig))
        self._random = random.Random(seed)
        self._requests = requests
        self._names = [f"i{number}" for number in range(instances)]
        self._scheduler = RoundScheduler(chosen.rounds)
        self._dispatch = chosen.dispatcher()
        self._decoder = msgspec.msgpack.Decoder(ClusterMessage)
        self._builder = ViewBuilder(headroom=chosen.headroom)
        self._builder.members(ClusterMember(name, f"tcp://{name}") for name in self._names)
        self._seq = 0
        self._take(self._reports(self._names))

    def sample(self) -> Sample:
        """Some report, a round is held, requests are dispatched."""
        some = self._random.sample(self._names, max(len(self._names) // 20, 1))
        reports = list(self._reports(some))
        report_s = _seconds(lambda: self._take(iter(reports))) / len(reports)
        pairs: list[Any] = []
        round_s = _seconds(lambda: pairs.extend(self._scheduler.round(self._builder.view(0.0))))
        demands = [self._random.randint(1, BLOCKS) for _ in range(DISPATCHES)]
        dispatch_s = _seconds(lambda: self._place(demands)) / DISPATCHES
        return Sample(
            len(self._names),
            self._requests,
            round_s * 1e3,
            len(pairs),
            dispatch_s * 1e6,
            report_s * 1e6,
            len(reports[0]),
            queues.sort_us(),
        )

    def _reports(self, names: list[str]) -> Iterator[bytes]:
        for name in names:
            self._seq += 1
            total = BLOCKS * self._requests
            short = self._random.random() < 0.2
            share = self._random.uniform(0.86, 1.0) if short else self._random.uniform(0.2, 0.85)
            used = int(total * share)
            queue = self._random.randint(1, total) if self._random.random() < 0.05 else 0
            load = EngineLoad(total, used, self._requests, int(queue > 0), queue, queue)
            yield msgspec.msgpack.encode(LoadReport(name, self._seq, load, 0, 0, bandwidth=1e4))

    def _take(self, reports: Iterator[bytes]) -> None:
        for frame in reports:
            message = self._decoder.decode(frame)
            assert isinstance(message, LoadReport)
            self._builder.report(message, 0.0)

    def _place(self, demands: list[int]) -> None:
        for demand in demands:
            chosen = self._dispatch.pick(self._builder.view(0.0), NewRequest(demand))
            self._builder.dispatched(chosen.instance, demand, 0.0)


def _seconds(work: Callable[[], object]) -> float:
    began = thread_time()
    work()
    return thread_time() - began


def measure(
    policy: str, instances: tuple[int, ...], requests: tuple[int, ...], repeats: int
) -> list[Sample]:
    """All samples; the first of each cluster is thrown away."""
    samples: list[Sample] = []
    with report.progress() as bar:
        for count in bar.track(instances, description="clusters"):
            clusters = [Cluster(policy, count, number, seed=7) for number in requests]
            for repeat in range(repeats + 1):
                samples += [cluster.sample() for cluster in clusters][: repeat and len(clusters)]
    return samples


def medians(samples: list[Sample], field: str) -> dict[tuple[int, int], float]:
    """By (instances, requests)."""
    cells: dict[tuple[int, int], list[float]] = {}
    for sample in samples:
        cells.setdefault((sample.instances, sample.requests), []).append(getattr(sample, field))
    return {cell: median(values) for cell, values in cells.items()}


def summarise(samples: list[Sample]) -> dict[str, float]:
    """By number of instances: the slowest of all numbers of requests, and the spread."""
    summary: dict[str, float] = {}
    for field in ("round_ms", "dispatch_us", "report_us"):
        cells = medians(samples, field)
        for count in sorted({instances for instances, _ in cells}):
            values = [value for (instances, _), value in cells.items() if instances == count]
            summary[f"{field}_{count}"] = max(values)
            if field == "round_ms":
                summary[f"round_spread_{count}"] = max(values) / min(values)
    sort_us = median(sample.sort_us for sample in samples)
    most = max(sample.instances for sample in samples)
    summary["sort_us"] = sort_us
    summary[f"round_over_sort_{most}"] = summary[f"round_ms_{most}"] * 1e3 / sort_us
    summary[f"dispatch_over_sort_{most}"] = summary[f"dispatch_us_{most}"] / sort_us
    return summary


def summarise_looks(looks: list[Look]) -> dict[str, float]:
    """By the length of the queue, of the slower kind of queue; growth: from the shortest on."""
    summary: dict[str, float] = {}
    lengths = sorted({look.waiting for look in looks})
    for field in ("snapshot_us", "list_us"):
        for waiting in lengths:
            summary[f"{field}_{waiting}"] = max(
                median(
                    getattr(look, field)
                    for look in looks
                    if (look.queue, look.waiting) == (kind, waiting)
                )
                for kind in queues.POLICIES
            )
    first, last = lengths[0], lengths[-1]
    sort_us = median(look.sort_us for look in looks)
    summary[f"snapshot_over_sort_{last}"] = summary[f"snapshot_us_{last}"] / sort_us
    summary[f"list_over_sort_{last}"] = summary[f"list_us_{last}"] / sort_us
    summary["snapshot_growth"] = summary[f"snapshot_us_{last}"] / summary[f"snapshot_us_{first}"]
    return summary


def table_of_looks(looks: list[Look]) -> Table:
    """Lengths of the queue down."""
    found = summarise_looks(looks)
    rows = [
        (count, found[f"snapshot_us_{count}"], found[f"list_us_{count}"])
        for count in sorted({look.waiting for look in looks})
    ]
    return report.table("an instance's queue", ("waiting", "snapshot µs", "list µs"), rows)


def tables(samples: list[Sample]) -> list[Table]:
    """One a figure: instances down, requests across."""
    made = []
    for field in ("round_ms", "dispatch_us", "report_us"):
        cells = medians(samples, field)
        across = sorted({requests for _, requests in cells})
        rows = [
            (count, *(cells[count, requests] for requests in across))
            for count in sorted({instances for instances, _ in cells})
        ]
        made.append(report.table(field, ("instances", *(f"{n} requests" for n in across)), rows))
    return made


def draw(result: report.Result, file: Path) -> None:
    """Cost over the number of instances, a line a number of requests."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    samples = [Sample(**sample) for sample in result.samples if "instances" in sample]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    sort_us = median(sample.sort_us for sample in samples)
    panels = (
        ("round_ms", "a round, ms", TARGETS["round_over_sort_10000"]["max"] * sort_us / 1e3),
        ("dispatch_us", "a dispatch, µs", TARGETS["dispatch_over_sort_10000"]["max"] * sort_us),
    )
    for axis, (field, label, target) in zip(axes, panels, strict=True):
        cells = medians(samples, field)
        counts = sorted({instances for instances, _ in cells})
        for requests in sorted({requests for _, requests in cells}):
            axis.plot(
                counts,
                [cells[count, requests] for count in counts],
                marker="o",
                linewidth=1.2,
                label=f"{requests} requests an instance",
            )
        axis.axhline(target, color="#777777", linestyle="--", label="target with 10,000")
        axis.set(xscale="log", yscale="log", xlabel="instances", ylabel=label)
        axis.grid(visible=True, which="major", alpha=0.3)
    axes[0].legend(frameon=False, fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__)
    root.add_argument("--policy", choices=tuple(POLICIES), default=SchedulerConfig().policy)
    options = root.parse_args(argv)
    repeats = 10 if options.quick else 30
    settings = {"policy": options.policy, "repeats": repeats, "blocks_a_request": BLOCKS}
    result = report.begin("scheduler", settings)
    samples = measure(options.policy, INSTANCES, REQUESTS, repeats)
    looks = queues.measure(queues.WAITING, repeats)
    result.samples = [*map(asdict, samples), *map(asdict, looks)]
    result.summary, result.targets = summarise(samples) | summarise_looks(looks), TARGETS
    return report.finish(result, options, [*tables(samples), table_of_looks(looks)], draw)


if __name__ == "__main__":
    sys.exit(main())
