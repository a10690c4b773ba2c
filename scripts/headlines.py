"""The ten figures that README shows: what they say, and in which result they stand."""

from __future__ import annotations

from typing import NamedTuple


class Source(NamedTuple):
    """One figure of a result's summary; out_of: the figure that it is a part of."""

    file: str
    figure: str
    out_of: str = ""


class Headline(NamedTuple):
    """A line of README's table; None: there is no such measurement for that device."""

    says: str
    gpu: Source | None
    cpu: Source | None


HEADLINES = (
    Headline(
        "longest gap in a stream around a move, relative to the same stream without one, median;"
        " engines that share only the host",
        None,
        Source("downtime-device10ms", "live_worst_gap_over_quiet_background_0"),
    ),
    Headline(
        "the same, engines that share one GPU or two cores",
        Source("gpu_vllm", "longest_gap_over_quiet"),
        Source("downtime", "live_worst_gap_over_quiet_background_0"),
    ),
    Headline(
        "the same, 90th percentile",
        Source("gpu_vllm", "longest_gap_over_quiet_p90"),
        Source("downtime", "live_worst_gap_over_quiet_p90_background_0"),
    ),
    Headline(
        "streams that a move changed, of all moves",
        Source("gpu_vllm", "streams_that_a_move_changed", "moves"),
        Source("soak", "wrong", "migrations_committed"),
    ),
    Headline(
        "pause of a request with 3,500 tokens, relative to one with 128 (GPU: the copy alone,"
        " 32,768 and 256)",
        Source("gpu_downtime", "live_growth"),
        Source("downtime", "live_3500_over_128_background_0"),
    ),
    Headline(
        "step time of the other requests during a move, relative to without",
        Source("gpu_interference", "slowdown"),
        Source("overhead", "step_time_during_migration_ratio"),
    ),
    Headline(
        "throughput of one instance, relative to plain vLLM with as many processes",
        Source("gpu_vllm", "throughput_over_plain"),
        Source("overhead", "throughput_over_plain_uni"),
    ),
    Headline(
        "time to first token of plain vLLM, relative to kvmig's, calls at once",
        Source("gpu_vllm", "ttft_of_plain_over_kvmig"),
        Source("overhead", "ttft_of_plain_uni_over_kvmig"),
    ),
    Headline(
        "an instance is killed: longest wait of its streams, s",
        Source("gpu_vllm", "killed_gap_s_most"),
        Source("faults", "killed_gap_s_most"),
    ),
    Headline(
        "first token of a model that was stopped, Qwen3-0.6B's shape, s",
        None,
        Source("cold-qwen3-0.6b", "cold ttft_s median"),
    ),
)
