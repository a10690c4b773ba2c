"""Policies beside each other, and kvmig's with one part changed at a time: simulated.

Every policy gets the same requests: drawn lengths and arrivals, several seeds, at the paper's
loads, in bursts, and where the best of the others begins to queue (`bench.edges`); and with
--traces real ones. Changed parts are compared with the first three seeds.
16 modelled LLaMA-7B on A10 (`kvmig_tools.sim`), reports as live. The figures are geometric means
over the workloads of a policy's mean over seeds, beside llumnix's; the last is the time lost to
preemptions, summed over the workloads. Below 1 is better.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean, mean

import msgspec
from rich.table import Table

from bench import report
from bench.pooled import work_through
from kvmig.controlplane.dispatch import FewestWithRoom, RoomiestAfter
from kvmig.controlplane.policy import POLICIES, Policy
from kvmig.controlplane.rules import balance, drain, make_room, move_queues, pair_extremes, protect
from kvmig.controlplane.victims import VictimRule
from kvmig_tools.sim import cost
from kvmig_tools.sim.cluster import SimCluster
from kvmig_tools.sim.outcomes import Outcomes
from kvmig_tools.sim.policies import setting
from kvmig_tools.sim.run import Run, requests_of
from kvmig_tools.sim.workloads import PAPER_SEED

INSTANCES = 16
SEEDS = (PAPER_SEED, 1, 2, 3, 4)
PAPERS = (
    ("ShareGPT", 8.5, 1.0),
    ("BurstGPT", 8.5, 1.0),
    ("M-M", 7.8, 1.0),
    ("L-L", 3.0, 1.0),
    ("L-L", 2.4, 4.0),
    ("S-L", 4.3, 1.0),
    ("L-S", 14.0, 1.0),
)
"""(lengths, requests a second, CV of the gaps)."""
BURSTS = (("ShareGPT", 5.75, 8.0), ("L-L", 2.2, 8.0), ("S-S", 32.0, 8.0))
DRAWN = (*PAPERS, *BURSTS)
UNSEEN = (
    ("ShareGPT", 9.0, 1.0),
    ("ShareGPT", 7.0, 4.0),
    ("BurstGPT", 6.0, 8.0),
    ("M-M", 5.5, 8.0),
    ("L-S", 10.0, 8.0),
    ("S-L", 3.0, 8.0),
    ("L-L", 1.8, 8.0),
)
"""Loads that no parameter of ours was chosen by; their seeds, too, are others (`--unseen`)."""
UNSEEN_SEEDS = (11, 12, 13, 14, 15)
EDGES = Path(__file__).parent / "results" / "edges.json"
"""Further loads, Poisson, if `bench.edges` has written it."""
REAL = ("azure2023_code.csv.gz", "azure2023_conv.csv.gz")
FIGURES = ("ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s", "e2e_mean_s", "e2e_p99_s")
LOSS = "loss_mean_s"
BASE = "llumnix"
OTHERS = ("round-robin", BASE, "llumnix-artifact", "least-loaded", "freeness")
COMPARED = (*OTHERS, "kvmig")


@dataclass(frozen=True)
class Sample:
    """One policy on one workload."""

    policy: str
    workload: str
    seed: int
    figures: dict[str, float]


LONG_RUN = (
    f"kvmig_tpot_p99_s_over_{BASE}",
    f"kvmig_e2e_p99_s_over_{BASE}",
    f"kvmig_{LOSS}_over_{BASE}",
)
"""What 500 requests of one seed are too few for."""


def variants() -> dict[str, Policy]:
    """By name: the policies that there are, then kvmig's with one part changed."""
    replace = msgspec.structs.replace
    named = {str(key): value for key, value in POLICIES.items()}
    ours = named["kvmig"]
    rounds = ours.rounds
    assert rounds is not None
    paper = replace(rounds, rules=(pair_extremes,), min_gain=0.0)
    return {
        **{name: named[name] for name in COMPARED},
        "kvmig, dispatch by slack": replace(ours, dispatcher=RoomiestAfter),
        "kvmig, each prompt one request": replace(
            ours, dispatcher=lambda: FewestWithRoom(enough=15.0, prompt_weight=0.0)
        ),
        "kvmig, no migration": replace(ours, rounds=None),
        "kvmig, no gathering": replace(
            ours, rounds=replace(rounds, rules=(drain, protect, move_queues, make_room, balance))
        ),
        "kvmig, no gathering, no room made": replace(
            ours, rounds=replace(rounds, rules=(drain, protect, move_queues, balance))
        ),
        "kvmig, queues stay, no room made": replace(
            ours, rounds=replace(rounds, rules=(drain, protect, balance))
        ),
        "kvmig, thresholds of 5": replace(
            ours, rounds=replace(rounds, source_below=5.0, destination_above=5.0)
        ),
        "kvmig, the paper's pairs": replace(ours, rounds=paper),
        "kvmig, victims from 16 tokens": replace(ours, victims=VictimRule(min_output_tokens=16)),
    }


def named(trace: str, rate: float, cv: float) -> str:
    """A drawn workload."""
    return f"{trace} {rate:g}/s" + (f" CV {cv:g}" if cv != 1 else "")


def edges() -> list[tuple[str, float, float]]:
    """As DRAWN; empty without the file."""
    if not EDGES.exists():
        return []
    return [(name, rate, 1.0) for name, rate in json.loads(EDGES.read_text())["summary"].items()]


def workloads(
    requests: int, seeds: Sequence[int], traces: Path | None, unseen: bool = False
) -> Iterator[tuple[str, Run]]:
    """(name, run); the run's own policy doesn't matter."""
    for trace, rate, cv in UNSEEN if unseen else dict.fromkeys((*DRAWN, *edges())):
        name = named(trace, rate, cv)
        for seed in seeds:
            yield (
                name,
                Run(trace=trace, policy=BASE, rate=rate, cv=cv, seed=seed, requests=requests),
            )
    for file in REAL if traces is not None else ():
        assert traces is not None
        yield file.partition(".")[0], Run(trace=str(traces / file), policy=BASE, requests=requests)


def jobs(
    requests: int, seeds: Sequence[int], traces: Path | None, unseen: bool = False
) -> Iterator[tuple[str, str, Run]]:
    """(policy, workload, run): the policies with all seeds, changed parts with fewer."""
    for name, run in workloads(requests, seeds, traces, unseen):
        for policy in variants():
            if policy in COMPARED or (run.seed in seeds[:3] and not unseen):
                yield policy, name, run


def known(file: Path, settings: dict[str, object]) -> list[Sample]:
    """What an earlier call found. Raises SystemExit where it had other settings."""
    document = json.loads(file.read_text())
    for field in ("requests", "instances"):
        if document["settings"][field] != settings[field]:
            raise SystemExit(
                f"--reuse: {file} has {field} {document['settings'][field]}, not {settings[field]}"
            )
    return [Sample(**one) for one in document["samples"]]


def simulate(job: tuple[str, str, Run]) -> Sample:
    """One of them, in a process of its own."""
    policy, workload, run = job
    cluster = SimCluster(
        requests_of(run),
        run.instances,
        cost.load("a10-llama7b"),
        variants()[policy],
        setting("live"),
        Outcomes(),
    )
    figures = cluster.run().summary()
    kept = (*FIGURES, LOSS, "migrations", "preempted_share")
    return Sample(policy, workload, run.seed, {name: figures[name] for name in kept})


def of(samples: Sequence[Sample], policy: str, workload: str, figure: str) -> float:
    """Mean over seeds."""
    return mean(
        one.figures[figure] for one in samples if (one.policy, one.workload) == (policy, workload)
    )


def shared(samples: Sequence[Sample], policies: Collection[str]) -> list[Sample]:
    """Those of workloads and seeds that all `policies` have."""
    have = [{(one.workload, one.seed) for one in samples if one.policy == p} for p in policies]
    everywhere = set.intersection(*have)
    return [one for one in samples if (one.workload, one.seed) in everywhere]


def ratios(samples: Sequence[Sample], policy: str) -> dict[str, float]:
    """Beside BASE: geometric means over the workloads; of the loss the ratio of the sums."""
    names = list(dict.fromkeys(one.workload for one in samples))
    found = {
        figure: geometric_mean(
            of(samples, policy, name, figure) / of(samples, BASE, name, figure) for name in names
        )
        for figure in FIGURES
    }
    lost = [sum(of(samples, one, name, LOSS) for name in names) for one in (policy, BASE)]
    return {**found, LOSS: lost[0] / lost[1] if lost[1] else math.nan}


def tables(samples: Sequence[Sample]) -> list[Table]:
    """The ratios, then a table a workload."""
    policies = list(dict.fromkeys(one.policy for one in samples))
    columns = ("policy", *FIGURES, LOSS)
    made = []
    for title, some in (("everywhere", COMPARED), ("with parts changed, three seeds", policies)):
        of_all = shared(samples, some)
        rows = [(one, *ratios(of_all, one).values()) for one in some]
        made.append(report.table(f"beside {BASE}, {title}", columns, rows))
    for name in dict.fromkeys(one.workload for one in samples):
        here = list(dict.fromkeys(one.policy for one in samples if one.workload == name))
        of_one = shared([one for one in samples if one.workload == name], here)
        rows = [
            (one, *(of(of_one, one, name, figure) for figure in (*FIGURES, LOSS, "migrations")))
            for one in here
        ]
        made.append(report.table(name, (*columns, "migrations"), rows))
    return made


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__, LONG_RUN)
    root.add_argument("--traces", type=Path, help="folder with Azure's traces as CSV")
    root.add_argument("--workers", type=int, default=1, help="processes")
    root.add_argument("--seeds", type=int, default=len(SEEDS), help="how many (default: all five)")
    root.add_argument("--reuse", type=Path, help="a file: what it has is not simulated again")
    root.add_argument("--unseen", action="store_true", help="other loads, other seeds, no parts")
    options = root.parse_args(argv)
    if options.unseen and options.traces is not None:
        root.error(f"--traces is {options.traces}, must not be given with --unseen")
    all_seeds = UNSEEN_SEEDS if options.unseen else SEEDS
    requests, seeds = (500, all_seeds[:1]) if options.quick else (2000, all_seeds[: options.seeds])
    settings = {"requests": requests, "seeds": list(seeds), "instances": INSTANCES}
    result = report.begin("policies", settings)
    old = known(options.reuse, settings) if options.reuse is not None else []
    have = {(one.policy, one.workload, one.seed): one for one in old}
    wanted = list(jobs(requests, seeds, options.traces, options.unseen))
    missing = [job for job in wanted if (job[0], job[1], job[2].seed) not in have]
    for one in work_through(simulate, missing, options.workers):
        have[one.policy, one.workload, one.seed] = one
    samples = [have[policy, name, run.seed] for policy, name, run in wanted]
    result.samples = [asdict(sample) for sample in samples]
    ours = ratios(shared(samples, COMPARED), "kvmig")
    result.summary = {f"kvmig_{name}_over_{BASE}": value for name, value in ours.items()}
    result.targets = {
        name: {"max": 1.02 if "tpot_mean" in name else 1.0} for name in result.summary
    }
    return report.finish(result, options, tables(samples))


if __name__ == "__main__":
    sys.exit(main())
