"""Section 6.6: many instances under one scheduler."""

from __future__ import annotations

from pathlib import Path

from bench.paper.scope import Results, Scope, spread, table, values
from kvmig_tools.sim.run import Run

POLICIES = ("round-robin", "least-loaded", "llumnix", "kvmig")
SIZES = ((16, 10_000), (64, 40_000), (1_000, 100_000))
"""Instances, and requests: 2.1 a second and instance."""

LARGEST = ("least-loaded", "llumnix", "kvmig")
"""Policies that are tried with 1,000, too."""


def _tried(policy: str, instances: int) -> bool:
    return instances < 1_000 or policy in LARGEST


def sizes(scope: Scope) -> list[tuple[int, int]]:
    """Those that this scope has time for."""
    return [size for size in SIZES if size[0] <= scope.most_instances]


def run_of(policy: str, instances: int, requests: int) -> Run:
    """S-S."""
    return Run(
        trace="S-S",
        policy=policy,
        rate=2.1 * instances,
        instances=instances,
        requests=requests,
        setting="live",
    )


def runs(scope: Scope) -> list[Run]:
    """The policies in all sizes."""
    return [
        run_of(policy, *size)
        for policy in POLICIES
        for size in sizes(scope)
        if _tried(policy, size[0])
    ]


def report(scope: Scope, results: Results, pictures: Path) -> str:
    """The larger the cluster, the more there is to choose from."""
    rows = []
    for policy in POLICIES:
        row = [policy]
        for size in sizes(scope):
            if not _tried(policy, size[0]):
                row += ["-", "-"]
                continue
            run = run_of(policy, *size)
            row += [spread(values(scope, results, run, n)) for n in ("ttft_p99_s", "e2e_mean_s")]
        rows.append(row)
    header = ["policy"]
    for instances, _ in sizes(scope):
        header += [f"{instances:,} instances: TTFT P99, s", "end to end mean, s"]
    return (
        "## Many instances (section 6.6)\n\n"
        "S-S at 2.1 requests/s an instance, for 300 s; with 1,000 instances for 48 s, which is"
        " too short for long queues. What a round and a dispatch cost is measured by"
        " `python -m bench.scheduler`. Mean of the seeds (least-most).\n\n" + table(header, rows)
    )
