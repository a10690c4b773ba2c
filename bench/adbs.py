"""MuxServe's Figure 9a on real vLLM engines: who of a unit's models computes next.

A 30B, a 13B and a 7B on 4 GPUs, mean lengths 2:1:1, rates 2:8:8, as `bench.mux` simulates it; here
vLLM's own schedulers hold the requests, and steps take virtual time (`bench.virtual_gpu`).

    python -m bench.adbs            # every policy, requests of 60 s
    python -m bench.adbs --quick    # of 4 s, with short answers
    python -m bench.adbs --check    # exit 1 where a demand is missed
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from bench import report
from bench.mux import small
from bench.mux.small import Policy
from bench.report import Target
from kvmig.engines.gate import PARTS, ComputeShares
from kvmig.engines.vllm import flags
from kvmig.placement.estimator import PlanEstimator
from kvmig.placement.problem import GpuUnit, PlacedInstance, cluster_of
from kvmig.placement.step_costs import DeviceCosts
from kvmig_tools.sim.mux import Load
from kvmig_tools.sim.unit import parts

if TYPE_CHECKING:
    from bench.virtual_gpu import Coming, Seen

MODELS = small.FIGURE_9_MODELS
CLUSTER = "1x4:a100-80g"
GPUS = 4
SEND_S = 60.0
"""How long requests come. Throughput is counted to the last end: a longer run has more of it."""


class Case(NamedTuple):
    """Who computes next, how the KV cache is shared, and the published figure."""

    how: Policy
    published: float | None = None


CASES = {
    "adbs": Case(Policy("adbs", "muxserve"), 6.2),
    "round-robin": Case(Policy("round-robin", "shared"), 4.1),
    "fcfs": Case(Policy("fcfs", "shared"), 3.8),
    "round-robin on shares": Case(Policy("round-robin-shares", "shared")),
    "free": Case(Policy("free", "shared")),
    "adbs, fixed quotas": Case(Policy("adbs", "fixed")),
}
QUICK_OUTPUT = 128
"""Most tokens of an answer with --quick."""
LONG_RUN = ("adbs_fixed_block_shares_off_points",)
"""Shares of blocks follow the rates only in the mean of many requests."""
TARGETS: dict[str, Target] = {
    "adbs_times_round-robin": {"min": 1.35},
    "adbs_times_fcfs": {"min": 1.5},
    "adbs_fixed_block_shares_off_points": {"max": 5.0},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if --check finds a demand missed."""
    flags.set_environment()
    from bench.virtual_gpu import VirtualEngine, VirtualUnit

    args = report.parser(__doc__, LONG_RUN).parse_args(argv)
    seconds = 4.0 if args.quick else SEND_S
    estimator = PlanEstimator(MODELS, cluster_of(CLUSTER))
    expected = estimator.unit(
        GpuUnit(GPUS, tuple(PlacedInstance(i, m.rate) for i, m in enumerate(MODELS)))
    )
    assert expected is not None, "they fit"
    device = estimator.cluster.device
    quotas = {one.name: part.kv_bytes for one, part in zip(MODELS, expected, strict=True)}
    shares = {
        one.name: ComputeShares(PARTS, parts(part.share))
        for one, part in zip(MODELS, expected, strict=True)
    }
    loads = small.loads(MODELS, seconds)
    requests = coming(loads)
    if args.quick:
        requests = [replace(one, output=min(one.output, QUICK_OUTPUT)) for one in requests]
    simulated = small.on_one_unit(MODELS, {name: one.how for name, one in CASES.items()}, seconds)
    result = report.begin("adbs", {"cluster": CLUSTER, "send_s": seconds, "quick": args.quick})
    arena = sum(quotas.values())
    engines = [VirtualEngine(one.name, one.model, device, GPUS, arena) for one in MODELS]
    for name, case in CASES.items():
        began = time.process_time()
        seen = VirtualUnit(device, GPUS, engines, shares, quotas, *case.how).run(requests)
        result.samples.append(
            {
                "case": name,
                **case.how._asdict(),
                "published": case.published,
                "simulated": simulated[name],
                **figures(device, seen),
                "cpu_s": time.process_time() - began,
            }
        )
        report.say(f"{name}: {result.samples[-1]['weighted']:.2f}")
    for engine in engines:
        engine.close()
    result.summary = summary({one["case"]: one for one in result.samples})
    result.targets = dict(TARGETS)
    columns = ("policy", "weighted", "simulated", "published", "req/s", "preempted", "shares %")
    rows = [
        (
            *(one[key] or "" for key in ("case", "weighted", "simulated", "published")),
            one["requests_per_s"],
            sum(one["preempted"].values()),
            " ".join(f"{100 * share:.0f}" for share in one["block_shares"].values()),
        )
        for one in result.samples
    ]
    return report.finish(result, args, [report.table("Figure 9a, real engines", columns, rows)])


def figures(device: DeviceCosts, seen: Seen) -> dict[str, Any]:
    """Of one run. Throughput of a model: its requests / the time from its first arrival to its last
    end; weighted: by rate, as the paper's figure."""
    throughput = {
        name: len(told) / (max(one.finished for one in told) - min(one.arrival for one in told))
        for name, told in seen.told.items()
    }
    rates = {one.name: one.rate for one in MODELS}
    wanted = {
        one.name: one.rate * one.tokens * device.models[one.model].token_bytes for one in MODELS
    }
    total = sum(wanted.values())
    waits = [one.first - one.arrival for told in seen.told.values() for one in told]
    return {
        "weighted": sum(rates[one] * throughput[one] for one in rates) / sum(rates.values()),
        "requests_per_s": sum(throughput.values()),
        "throughput": throughput,
        "preempted": dict(seen.preempted),
        "block_shares": seen.shares,
        "block_shares_off_points": 100
        * max(abs(seen.shares[one] - part / total) for one, part in wanted.items()),
        "steps": seen.steps,
        "job_seconds": {f"{one} {kind}": spent for (one, kind), spent in seen.job_seconds.items()},
        "ttft_mean_s": sum(waits) / len(waits),
    }


def summary(of: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """By case."""
    others = ("round-robin", "fcfs", "round-robin on shares", "free")
    keys = {"": "weighted", "requests_": "requests_per_s"}
    return {
        **{f"weighted_{name}": one["weighted"] for name, one in of.items()},
        **{
            f"{start}adbs_times_{other}": of["adbs"][key] / of[other][key]
            for start, key in keys.items()
            for other in others
        },
        "adbs_block_shares_off_points": of["adbs"]["block_shares_off_points"],
        "adbs_fixed_block_shares_off_points": of["adbs, fixed quotas"]["block_shares_off_points"],
        "simulator_off_most": max(abs(a["weighted"] / a["simulated"] - 1) for a in of.values()),
        "cpu_s": sum(one["cpu_s"] for one in of.values()),
    }


def coming(loads: Sequence[Load]) -> list[Coming]:
    """Their requests."""
    from bench.virtual_gpu import Coming

    return [
        Coming(at, load.llm.name, prompt, output)
        for load in loads
        for at, prompt, output in zip(load.arrivals, load.prompts, load.outputs, strict=True)
    ]


if __name__ == "__main__":
    sys.exit(main())
