"""The figures that README shows first: what they say, and in which result they stand."""

from __future__ import annotations

from typing import NamedTuple


class Source(NamedTuple):
    """One figure of `bench/results/FILE.json`'s summary."""

    file: str
    figure: str


class Headline(NamedTuple):
    """A line of README's table; None: there is no such measurement for that device."""

    says: str
    cpu: Source | None
    gpu: Source | None


HEADLINES = (
    Headline(
        "longest gap of a client around a live migration / in as long without one, idle, median",
        Source("downtime", "live_worst_gap_over_quiet_background_0"),
        None,
    ),
    Headline(
        "90th percentile of the same",
        Source("downtime", "live_worst_gap_over_quiet_p90_background_0"),
        None,
    ),
    Headline(
        "with 4 more requests an instance, median",
        Source("downtime", "live_worst_gap_over_quiet_background_4"),
        None,
    ),
    Headline(
        "90th percentile of the same",
        Source("downtime", "live_worst_gap_over_quiet_p90_background_4"),
        None,
    ),
    Headline(
        "engines that don't share cores (`device10ms`), idle, median",
        Source("downtime-device10ms", "live_worst_gap_over_quiet_background_0"),
        None,
    ),
    Headline(
        "90th percentile of the same",
        Source("downtime-device10ms", "live_worst_gap_over_quiet_p90_background_0"),
        None,
    ),
    Headline(
        "the same engines with 4 more requests each, median",
        Source("downtime-device10ms", "live_worst_gap_over_quiet_background_4"),
        None,
    ),
    Headline(
        "90th percentile of the same",
        Source("downtime-device10ms", "live_worst_gap_over_quiet_p90_background_4"),
        None,
    ),
    Headline(
        "the same with a copy that stops the request, median",
        Source("downtime-device10ms", "blocking_worst_gap_over_quiet_background_4"),
        None,
    ),
    Headline(
        "longest gap in a drain of 20 streams (`device10ms`) / time between two tokens, median",
        Source("drain-device10ms", "ratio_median"),
        None,
    ),
    Headline(
        "gap at the switch, 3,500 tokens / 128 tokens",
        Source("downtime", "live_3500_over_128_background_0"),
        Source("gpu_downtime", "live_growth"),
    ),
    Headline(
        "gap of recomputing elsewhere / at the switch of a live migration, 3,500 tokens",
        Source("downtime", "recompute_over_live_3500_background_0"),
        None,
    ),
    Headline(
        "step time of the other requests during a migration / without",
        Source("overhead", "step_time_during_migration_ratio"),
        Source("gpu_interference", "slowdown"),
    ),
    Headline(
        "the same, engines that don't share cores (`device10ms`)",
        Source("overhead-device10ms", "step_time_during_migration_ratio"),
        None,
    ),
    Headline(
        "throughput / plain vLLM",
        Source("overhead", "throughput_over_plain"),
        None,
    ),
    Headline(
        "time to first token of plain vLLM / kvmig",
        Source("overhead", "ttft_of_plain_over_kvmig"),
        None,
    ),
    Headline(
        "gathering KV blocks / speed of a plain copy",
        Source("gather", "cpu_over_memcpy_1_thread"),
        Source("gpu_gather", "gather_64kb_plain_share"),
    ),
    Headline(
        "one scheduler round over 10,000 instances / NumPy's sort of 10,000 figures",
        Source("scheduler", "round_over_sort_10000"),
        None,
    ),
    Headline(
        "one dispatch among 10,000 instances / the same sort",
        Source("scheduler", "dispatch_over_sort_10000"),
        None,
    ),
    Headline(
        "99th percentile of the time to first token, four real engines, `round-robin`, ms",
        Source("serving", "round-robin.ttft_ms.p99"),
        None,
    ),
    Headline(
        "the same, `llumnix`",
        Source("serving", "llumnix.ttft_ms.p99"),
        None,
    ),
    Headline(
        "the same, `kvmig`",
        Source("serving", "kvmig.ttft_ms.p99"),
        None,
    ),
    Headline(
        "99th percentile of the time between two tokens, four real engines, `round-robin`, ms",
        Source("serving", "round-robin.tpot_ms.p99"),
        None,
    ),
    Headline(
        "the same, `llumnix`",
        Source("serving", "llumnix.tpot_ms.p99"),
        None,
    ),
    Headline(
        "the same, `kvmig`",
        Source("serving", "kvmig.tpot_ms.p99"),
        None,
    ),
    Headline(
        "mean time of a whole answer, four real engines, `round-robin`, ms",
        Source("serving", "round-robin.e2e_ms.mean"),
        None,
    ),
    Headline(
        "the same, `llumnix`",
        Source("serving", "llumnix.e2e_ms.mean"),
        None,
    ),
    Headline(
        "the same, `kvmig`",
        Source("serving", "kvmig.e2e_ms.mean"),
        None,
    ),
    Headline(
        "an instance that is killed: longest wait of its streams, s",
        Source("faults", "killed_gap_s_most"),
        None,
    ),
    Headline(
        "mean time to first token, policy `kvmig` / `llumnix`, simulated",
        Source("policies", "kvmig_ttft_mean_s_over_llumnix"),
        None,
    ),
    Headline(
        "99th percentile of the same",
        Source("policies", "kvmig_ttft_p99_s_over_llumnix"),
        None,
    ),
    Headline(
        "10,000 streams, 50,000 tokens/s offered, one front end: delivered / vLLM's own",
        Source("load", "kvmig_over_vllm_1.delivered_at_50000"),
        None,
    ),
    Headline(
        "the same with two front ends",
        Source("load", "kvmig_over_vllm_2.delivered_at_50000"),
        None,
    ),
    Headline(
        "a fleet's model from zero, first token / plain vLLM started for it",
        Source("cold", "cold / plain vLLM"),
        None,
    ),
    Headline(
        "the same with a model of Qwen3-0.6B's shape",
        Source("cold-qwen3-0.6b", "cold / plain vLLM"),
        None,
    ),
)
