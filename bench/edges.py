"""The load at which the best of the other policies begins to queue, workload by workload.

It is the lowest rate, within 2 %, at which the P99 of the first token with the best of them is
more than twice its floor (`bench.beat`): the mean over seeds of each policy, the least of these.
Found by bisection, with the requests and instances of `bench.policies`, which reads the file and
compares everybody at these loads, too. `kvmig` itself has no say.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import fmean

import msgspec

from bench import report
from bench.beat import floor_s
from bench.policies import OTHERS, SEEDS, Sample, simulate
from kvmig.sim.run import Run
from kvmig.sim.workloads import WORKLOADS

QUEUES = 2.0
"""Times the floor."""
WITHIN = 0.02
"""Of the rate."""
BRACKET = (0.75, 2.5)
"""Times the paper's highest rate: outside nothing is looked for."""


def edge(low: float, high: float, queues: Callable[[float], bool]) -> float:
    """The lowest rate from `low` to `high` that queues, within `WITHIN`; `high` if none does.

    Who queues at a rate is taken to queue at all higher ones.
    """
    while high - low > WITHIN * low:
        middle = (low + high) / 2
        low, high = (low, middle) if queues(middle) else (middle, high)
    return high


def best_tail_s(pool: ProcessPoolExecutor, runs: list[Run]) -> float:
    """P99 of the first token with the best of the others."""
    jobs = [(policy, "", run) for policy in OTHERS for run in runs]
    samples: list[Sample] = list(pool.map(simulate, jobs))
    return min(
        fmean(one.figures["ttft_p99_s"] for one in samples if one.policy == policy)
        for policy in OTHERS
    )


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__)
    root.add_argument("--workers", type=int, default=1, help="processes")
    options = root.parse_args(argv)
    requests, seeds = (300, SEEDS[:1]) if options.quick else (2000, SEEDS[:3])
    result = report.begin("edges", {"requests": requests, "seeds": list(seeds), "queues": QUEUES})
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        for name, workload in WORKLOADS.items():
            run = Run(trace=name, policy="", rate=1.0, requests=requests)
            runs = [msgspec.structs.replace(run, seed=seed) for seed in seeds]
            floor = floor_s(runs)

            def queues(rate: float, runs: list[Run] = runs, floor: float = floor) -> bool:
                at = [msgspec.structs.replace(one, rate=rate) for one in runs]
                return best_tail_s(pool, at) > QUEUES * floor

            low, high = (share * workload.rates[-1] for share in BRACKET)
            result.summary[name] = round(edge(low, high, queues), 3)
            report.say(f"{name}: {result.summary[name]:g} requests/s, floor {floor:.2f} s")
    return report.finish(result, options)


if __name__ == "__main__":
    sys.exit(main())
