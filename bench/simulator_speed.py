"""What a simulation costs: processor time and memory, one run after the other on one core.

The paper's size (10,000 requests, 16 instances, all seven workloads, migration on), and a
large one (1,000 instances, up to a million requests, which come one at a time from a
generator or a file). Each run is in a process of its own, whose peak memory is told, too: what
is kept of a request that has ended are the 88 bytes of its row of outcomes.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context

from bench import report
from kvmig_tools.sim.run import Run, simulate
from kvmig_tools.sim.workloads import WORKLOADS

POLICIES = ("llumnix", "kvmig")
LARGE = (100_000, 1_000_000)
"""Requests, on 1,000 instances."""
SLOWEST_S = 5.0
LONG_RUN = ("slowest_s",)
"""Its bound is for the paper's number of requests."""
"""Aim for the paper's size."""


@dataclass(frozen=True)
class Cost:
    """Of one run."""

    trace: str
    policy: str
    instances: int
    requests: int
    migrations: int
    virtual_s: float
    cpu_s: float
    wall_s: float
    peak_mib: float
    """Of the whole process, Python and libraries included."""


def measure(run: Run) -> Cost:
    """Simulate it in this process. Raises RuntimeError if a request got lost."""
    wall, cpu = time.perf_counter(), time.process_time()
    figures = simulate(run).result.figures
    if figures["requests"] + figures["refused"] != run.requests:
        raise RuntimeError(f"{run.requests} requests came, {figures['requests']:g} ended")
    return Cost(
        run.trace,
        run.policy,
        run.instances,
        run.requests,
        int(figures["migrations"]),
        figures["end_s"],
        time.process_time() - cpu,
        time.perf_counter() - wall,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def runs(requests: int, large: Sequence[int]) -> list[Run]:
    """The paper's size with each workload's middle rate, then the large ones."""
    paper = [
        Run(trace=name, policy=policy, rate=workload.rates[2], requests=requests)
        for name, workload in WORKLOADS.items()
        for policy in POLICIES
    ]
    return paper + [
        Run(trace="S-S", policy="kvmig", rate=2_100.0, requests=count, instances=1_000)
        for count in large
    ]


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, or 1 when --check finds a target missed."""
    options = report.parser(__doc__, LONG_RUN).parse_args(argv)
    requests, large = (2_000, (5_000,)) if options.quick else (10_000, LARGE)
    result = report.begin("simulator_speed", {"requests": requests, "large": list(large)})
    wanted = runs(requests, large)
    costs: list[Cost] = []
    with report.progress() as bar:
        for run in bar.track(wanted, description="runs"):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                costs.append(pool.submit(measure, run).result())
    result.samples = [asdict(cost) for cost in costs]
    result.summary = {"slowest_s": max(cost.cpu_s for cost in costs[: -len(large)])}
    result.targets = {"slowest_s": {"max": SLOWEST_S}}
    for cost in costs[-len(large) :]:
        stem = f"large_{cost.requests}"
        result.summary |= {f"{stem}_cpu_s": cost.cpu_s, f"{stem}_peak_mib": cost.peak_mib}
    columns = ("trace", "policy", "instances", "requests", "migrations", "virtual s", "CPU s",
               "wall s", "peak MiB")  # fmt: skip
    rows = [tuple(asdict(cost).values()) for cost in costs]
    return report.finish(result, options, [report.table("a simulation", columns, rows)])


if __name__ == "__main__":
    sys.exit(main())
