"""Section 3: what preemption costs on one instance, and fragmentation across four."""

from __future__ import annotations

from pathlib import Path

from bench.paper.scope import Results, Scope, spread, table, values
from kvmig_tools.sim.run import Run

ONE = Run(trace="M-M", policy="round-robin", rate=0.42, requests=2_000, instances=1, setting="text")
FOUR = Run(
    trace="M-M", policy="least-loaded", rate=1.9, requests=4_000, instances=4, setting="text"
)


def runs(scope: Scope) -> list[Run]:
    """One instance, and four."""
    return [ONE, FOUR]


def report(scope: Scope, results: Results, pictures: Path) -> str:
    """Beside the paper's figures."""

    def of(run: Run, name: str, scale: float = 1.0) -> str:
        return spread(value * scale for value in values(scope, results, run, name))

    skew = [
        results[one].figures["tpot_p99_s"] / results[one].figures["tpot_p50_s"]
        for one in scope.seeded(ONE)
    ]
    rows = [
        ["memory in use, %", of(ONE, "memory_share", 100), "62"],
        ["requests preempted, %", of(ONE, "preempted_share", 100), "8"],
        ["decode latency, P99 / P50", spread(skew), "3.8"],
        ["lost by preemption of that P99's decoding, %", of(ONE, "loss_share_p99", 100), "70"],
        ["four instances: memory that queues' heads want and that is free in pieces, %",
         of(FOUR, "fragmented_share", 100), "-"],
    ]  # fmt: skip
    return (
        "## Preemption and fragmentation (section 3)\n\n"
        "One instance with M-M at 0.42 requests/s; four with 1.9, load balanced, without"
        " migration. Mean of the seeds (least-most).\n\n" + table(["", "ours", "paper"], rows)
    )
