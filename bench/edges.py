"""The load at which the best of the other policies begins to queue, workload by workload.

It is the lowest rate, within 5 %, at which the P99 of the first token with the best of them is
more than twice its floor (`bench.beat`): the mean over seeds of each policy, the least of these.
Found by bisection, with the requests and instances of `bench.policies`, which reads the file and
compares everybody at these loads, too. `kvmig` itself has no say.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import msgspec

from bench import report
from bench.beat import floor_s
from bench.policies import OTHERS, SEEDS, simulate
from kvmig_tools.sim.run import Run
from kvmig_tools.sim.workloads import WORKLOADS

QUEUES = 2.0
"""Times the floor."""
WITHIN = 0.05
"""Of the rate."""
BRACKET = (0.75, 2.0)
"""Times the paper's highest rate: outside nothing is looked for."""
LIKELY = tuple(reversed(OTHERS))
"""The others, who is likely to be the best first: one that doesn't queue is enough."""


def edge(low: float, high: float, queues: Callable[[float], bool]) -> float | None:
    """The lowest rate between `low` and `high` that queues, within `WITHIN`; None: none tried.

    Who queues at a rate is taken to queue at all higher ones.
    """
    found = None
    while high - low > WITHIN * low:
        middle = (low + high) / 2
        if queues(middle):
            found = high = middle
        else:
            low = middle
    return found


def queues(policy: str, runs: Sequence[Run], limit_s: float) -> bool:
    """Whether the P99 of the first token is above the limit, mean over the runs.

    The rest of the runs is spared once that is sure.
    """
    left = limit_s * len(runs)
    for run in runs:
        left -= simulate((policy, "", run)).figures["ttft_p99_s"]
        if left < 0:
            return True
    return False


def edge_of(runs: Sequence[Run]) -> float | None:
    """Of one workload; the runs' own rates don't matter. In a process of its own."""
    limit_s = QUEUES * floor_s(runs)
    highest = WORKLOADS[runs[0].trace].rates[-1]

    def all_queue(rate: float) -> bool:
        at = [msgspec.structs.replace(one, rate=rate) for one in runs]
        return all(queues(policy, at, limit_s) for policy in LIKELY)

    return edge(BRACKET[0] * highest, BRACKET[1] * highest, all_queue)


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__)
    root.add_argument("--workers", type=int, default=1, help="processes")
    root.add_argument("--reuse", type=Path, help="a file: what it has is not looked for again")
    options = root.parse_args(argv)
    requests, seeds = (300, SEEDS[:1]) if options.quick else (2000, SEEDS[:3])
    settings = {"requests": requests, "seeds": list(seeds), "queues": QUEUES, "bracket": BRACKET}
    result = report.begin("edges", settings)
    if options.reuse is not None:
        result.summary.update(json.loads(options.reuse.read_text())["summary"])
    wanted = {
        name: [Run(trace=name, policy="", rate=1.0, requests=requests, seed=seed) for seed in seeds]
        for name in WORKLOADS
        if name not in result.summary
    }
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        for name, rate in zip(wanted, pool.map(edge_of, wanted.values()), strict=True):
            if rate is None:
                report.say(f"{name}: none up to {BRACKET[1]:g} times the paper's highest rate")
                continue
            result.summary[name] = round(rate, 3)
            report.say(f"{name}: {rate:g} requests/s")
            report.keep(result, options)
    return report.finish(result, options)


if __name__ == "__main__":
    sys.exit(main())
