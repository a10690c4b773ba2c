"""What is asked of the servers, and what came of it. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np

from bench.arrivals import Arrival
from kvmig.core.errors import ConfigError
from kvmig_tools.sim.traces import read

FIGURES = ("ttft_ms", "tpot_ms", "e2e_ms")
STATISTICS = ("mean", "p50", "p99")


@dataclass(frozen=True)
class Call:
    """One request of a trace. at: seconds after the first."""

    at: float
    prompt: int
    output: int
    high: bool = False


@dataclass(frozen=True)
class Answer:
    """What a client saw of one call. at: as wanted; times in ms, from then on.

    tpot_ms: a token after the first; None where there was only one.
    """

    policy: str
    repeat: int
    at: float
    prompt: int
    output: int
    high: bool
    ttft_ms: float
    tpot_ms: float | None
    e2e_ms: float


@dataclass(frozen=True)
class Run:
    """One trace at one server. migrations: that committed, by what they were for."""

    policy: str
    repeat: int
    seconds: float
    preemptions: int
    migrations: Mapping[str, int]
    migrations_aborted: int


def calls_of(
    trace: Path, count: int, *, rate: float, scale: float, longest: int, high: float, seed: int
) -> list[Call]:
    """The first `count` requests of the trace that have at most `longest` tokens.

    rate: requests a second to which arrivals are stretched; scale: of all lengths; high: share
    of requests that get the priority class above. Raises ConfigError.
    """
    chance = random.Random(seed)
    calls: list[Call] = []
    for one in read(trace):
        lengths = one.input_tokens, one.final_tokens - one.input_tokens
        prompt, output = (max(round(length * scale), 1) for length in lengths)
        if prompt + output <= longest:
            calls.append(Call(one.arrival, prompt, output, chance.random() < high))
        if len(calls) == count:
            break
    if not calls:
        raise ConfigError(
            f"--trace {trace} has no request of at most {longest} tokens at --scale {scale:g}"
        )
    begin, end = calls[0].at, calls[-1].at
    stretch = (len(calls) - 1) / rate / (end - begin) if end > begin else 0.0
    return [Call((one.at - begin) * stretch, one.prompt, one.output, one.high) for one in calls]


def answer_of(call: Call, policy: str, repeat: int, arrivals: Sequence[Arrival]) -> Answer:
    """arrivals: in seconds after the call was due."""
    first, last = arrivals[0].at * 1e3, arrivals[-1].at * 1e3
    later = arrivals[-1].end - 1
    return Answer(
        policy,
        repeat,
        round(call.at, 3),
        call.prompt,
        call.output,
        call.high,
        round(first, 2),
        round((last - first) / later, 3) if later else None,
        round(last, 2),
    )


def statistics_of(answers: Iterable[Answer]) -> dict[str, dict[str, float]]:
    """Figure -> statistic -> value, of one run."""
    them = list(answers)
    found = {}
    for figure in FIGURES:
        values = [value for one in them if (value := getattr(one, figure)) is not None]
        found[figure] = {
            "mean": fmean(values),
            "p50": float(np.percentile(values, 50)),
            "p99": float(np.percentile(values, 99)),
        }
    return found


def summarise(answers: Sequence[Answer], runs: Sequence[Run]) -> dict[str, float]:
    """`policy[.class].figure.statistic` -> the median over the repeats."""
    summary: dict[str, float] = {}
    classes = (
        {"": None, ".high": True, ".normal": False} if any(a.high for a in answers) else {"": None}
    )
    for policy in dict.fromkeys(run.policy for run in runs):
        mine = [run for run in runs if run.policy == policy]
        for label, high in classes.items():
            each = [
                statistics_of(
                    one
                    for one in answers
                    if (one.policy, one.repeat) == (policy, run.repeat) and high in (None, one.high)
                )
                for run in mine
            ]
            for figure in FIGURES:
                for statistic in STATISTICS:
                    summary[f"{policy}{label}.{figure}.{statistic}"] = median(
                        one[figure][statistic] for one in each
                    )
        summary[f"{policy}.preemptions"] = median(run.preemptions for run in mine)
        summary[f"{policy}.migrations"] = median(sum(run.migrations.values()) for run in mine)
    return summary
