"""One simulation from plain values, and many of them in parallel processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

import msgspec

from kvmig.controlplane.policy import Policy, policy_of
from kvmig.core.config import ScalingConfig, SchedulerConfig, check_scaling
from kvmig.core.priorities import NORMAL, PriorityClass
from kvmig_tools.sim import cost, traces
from kvmig_tools.sim.cluster import SimCluster
from kvmig_tools.sim.outcomes import Outcomes
from kvmig_tools.sim.policies import policy, setting
from kvmig_tools.sim.request import SimRequest
from kvmig_tools.sim.series import Series
from kvmig_tools.sim.workloads import PAPER_SEED, generate


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated. The same values give the same bytes."""

    trace: str
    """A workload's name, or a CSV file."""
    policy: str
    rate: float = 0.0
    """Requests a second; 0: as the file says."""
    cv: float = 1.0
    requests: int = 10_000
    """At most, of a file."""
    instances: int = 16
    gpu: str = "a10-llama7b"
    setting: str = "live"
    seed: int = PAPER_SEED
    high_share: float = 0.0
    headroom_tokens: int = 0
    """Of high-priority requests."""
    migration: bool = True
    scale: tuple[float, float] | None = None
    """Keep the mean freeness, blocks a request, between these; `instances` are the most."""
    min_instances: int = 1
    source_below: float | None = None
    """Thresholds in place of the policy's."""
    destination_above: float | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it. Figures by name, see `Outcomes.summary`; times in seconds."""

    run: Run
    figures: dict[str, float]
    high: dict[str, float] = {}
    normal: dict[str, float] = {}
    aborted: dict[str, int] = {}
    """Migrations by reason."""


@dataclass(frozen=True)
class Finished:
    """A result, the rows behind it, and the seconds that it took to simulate."""

    result: Result
    outcomes: Outcomes
    series: Series
    took_s: float


HIGH = -1
"""Priority of the requests that `high_share` picks."""


def requests_of(run: Run) -> Iterable[SimRequest]:
    """The requests of a run. Raises ConfigError, perhaps only when a bad row comes."""
    if run.trace.endswith((".csv", ".csv.gz")):
        return traces.read(Path(run.trace), run.requests, run.rate)
    return generate(
        run.trace,
        run.rate,
        count=run.requests,
        cv=run.cv,
        seed=run.seed,
        high_share=run.high_share,
        high_priority=HIGH,
    )


def simulate(run: Run, sample_s: float = 0.0) -> Finished:
    """Do it. Raises ConfigError for values that can't be.

    sample_s: virtual seconds between samples of the series; 0: none.
    """
    began = perf_counter()
    high = [PriorityClass("high", HIGH, run.headroom_tokens)] if run.high_share else []
    cluster = SimCluster(
        requests_of(run),
        run.min_instances if run.scale else run.instances,
        cost.load(run.gpu),
        _policy(run),
        setting(run.setting),
        Outcomes(),
        [*high, NORMAL],
        _scaling(run),
        sample_s,
    )
    outcomes = cluster.run()
    mixed = run.high_share > 0
    result = Result(
        run=run,
        figures=outcomes.summary() | cluster.series.summary(),
        high=outcomes.summary(HIGH) if mixed else {},
        normal=outcomes.summary(NORMAL.priority) if mixed else {},
        aborted={key: n for key, n in sorted(outcomes.migrations.items()) if key != "committed"},
    )
    return Finished(result, outcomes, cluster.series, perf_counter() - began)


def _policy(run: Run) -> Policy:
    """As the live cluster takes it from its flags."""
    return policy_of(
        msgspec.convert(
            {
                "policy": policy(run.policy).name,
                "migration": run.migration,
                "source_below": run.source_below,
                "destination_above": run.destination_above,
            },
            SchedulerConfig,
        )
    )


def _scaling(run: Run) -> ScalingConfig | None:
    """Raises ConfigError for bounds that can't be."""
    if run.scale is None:
        return None
    config = ScalingConfig(
        low=run.scale[0],
        high=run.scale[1],
        min_instances=run.min_instances,
        max_instances=run.instances,
    )
    check_scaling(config, run.min_instances)
    return config


def simulate_all(
    runs: Sequence[Run],
    done: Callable[[Finished], None],
    workers: int | None = None,
    sample_s: float = 0.0,
) -> list[Finished]:
    """Each in a process of its own, in the order given; `done` hears of each as it ends.

    workers: at once; None: as many as this process may use cores.
    """
    workers = min(workers or len(os.sched_getaffinity(0)), max(len(runs), 1))
    if workers <= 1:
        finished = []
        for run in runs:
            finished.append(simulate(run, sample_s))
            done(finished[-1])
        return finished
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(simulate, run, sample_s) for run in runs]
        try:
            for future in as_completed(futures):
                done(future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]
