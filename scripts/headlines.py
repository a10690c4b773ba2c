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
        "longest gap that a client sees around a move / in as long without one, engines that share"
        " nothing but the host (`device10ms`), median",
        Source("downtime-device10ms", "live_worst_gap_over_quiet_background_0"),
        None,
    ),
    Headline(
        "the same, 90th percentile",
        Source("downtime-device10ms", "live_worst_gap_over_quiet_p90_background_0"),
        None,
    ),
    Headline(
        "the same, engines and clients on two shared cores, median",
        Source("downtime", "live_worst_gap_over_quiet_background_0"),
        None,
    ),
    Headline(
        "the same, 90th percentile",
        Source("downtime", "live_worst_gap_over_quiet_p90_background_0"),
        None,
    ),
    Headline(
        "pause of a move with 3,500 tokens / with 128 (GPU: with 32,768 / with 256)",
        Source("downtime", "live_3500_over_128_background_0"),
        Source("gpu_downtime", "live_growth"),
    ),
    Headline(
        "pause of computing a request of 3,500 tokens again elsewhere / of moving it",
        Source("downtime", "recompute_over_live_3500_background_0"),
        None,
    ),
    Headline(
        "time of the other requests' steps during a move / without",
        Source("overhead", "step_time_during_migration_ratio"),
        Source("gpu_interference", "slowdown"),
    ),
    Headline(
        "throughput of one instance / of plain vLLM",
        Source("overhead", "throughput_over_plain"),
        None,
    ),
    Headline(
        "time to the first token of plain vLLM / of kvmig",
        Source("overhead", "ttft_of_plain_over_kvmig"),
        None,
    ),
    Headline(
        "an instance is killed: longest wait of its streams, s",
        Source("faults", "killed_gap_s_most"),
        None,
    ),
    Headline(
        "99th percentile of the time to the first token, policy `kvmig` / `llumnix`, simulated",
        Source("policies", "kvmig_ttft_p99_s_over_llumnix"),
        None,
    ),
    Headline(
        "a fleet's model from zero, first token / plain vLLM started for it",
        Source("cold", "cold / plain vLLM"),
        None,
    ),
)
