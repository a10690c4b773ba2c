"""How long drains take, learnt from the migrations that deployments report. Pure.

A request's handshake waits for steps of both engines, so a drain's time goes by requests much more
than by bytes. What counts is how long the requests of a drain took together, several of which
move at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

APART_S = 5.0
"""Seconds without a migration after which an instance's next one is of another drain."""
LAST = 4
"""Drains that count: older ones were under another load."""
HANDSHAKE_STEPS = 14
"""Steps of a handshake between engines of one pace; the wait for a phase is most of them
(`kvmig.kvtransfer.pause`). The four drains of `bench.replace --quick` took 8 to 16."""
BETWEEN_TOKENS = "vllm:inter_token_latency_seconds_"


class LearnedMigration(msgspec.Struct, frozen=True):
    """The part of a migration's report that counts here (`GET /kvmig/v1/migrations`)."""

    id: str
    source: str
    state: str
    why: str
    total_ms: float
    ended_at: float
    """Unix time."""


class LearnedDrain(NamedTuple):
    """One that has been."""

    requests: int
    """Requests that have moved."""
    seconds: float
    """Seconds from the first one's beginning to the last one's end."""
    ended_at: float


def drains(reports: Iterable[LearnedMigration]) -> list[LearnedDrain]:
    """Drains in the order of their ends; none without a request that has moved."""
    found: list[LearnedDrain] = []
    by_source: dict[str, list[LearnedMigration]] = {}
    for one in reports:
        if one.why == "drain":
            by_source.setdefault(one.source, []).append(one)
    for listed in by_source.values():
        requests, began, ended = 0, 0.0, float("-inf")
        for one in sorted(listed, key=_began):
            if _began(one) > ended + APART_S:
                found.append(LearnedDrain(requests, ended - began, ended))
                requests, began = 0, _began(one)
            requests += one.state == "committed"
            ended = max(ended, one.ended_at)
        found.append(LearnedDrain(requests, ended - began, ended))
    return sorted((one for one in found if one.requests), key=lambda one: one.ended_at)


def _began(one: LearnedMigration) -> float:
    return one.ended_at - one.total_ms / 1e3


def as_many_as(requests: Iterable[int], at_once: int) -> int:
    """The requests of some drains, where `at_once` move at once: a drain of fewer takes as long as
    one of that many."""
    return sum(max(one, at_once) for one in requests if one)


def request_s(known: Sequence[LearnedDrain], at_once: int) -> float | None:
    """Seconds of a drain for each request, by the last ones; None: there was none."""
    last = known[-LAST:]
    if not last:
        return None
    return sum(one.seconds for one in last) / as_many_as((one.requests for one in last), at_once)


def handshake_s(step_s: float, at_once: int) -> float:
    """The estimate before there was any drain, of engines with steps of `step_s`.

    Example: steps of 0.1 s and 4 requests at once are 0.35 s a request.
    """
    return HANDSHAKE_STEPS * step_s / at_once


def requests_s(
    known: Mapping[str, Sequence[LearnedDrain]],
    steps_s: Mapping[str, float | None],
    at_once: int,
    usual_s: float,
) -> dict[str, float]:
    """Seconds of a drain for each request of each model: by its own drains, or else by those of
    the others, or else by the steps of its engines (`steps_s`, if they are known), or else
    `usual_s`."""
    every = request_s(sorted((one for of in known.values() for one in of), key=_ended), at_once)
    found: dict[str, float] = {}
    for name, of in known.items():
        measured = request_s(of, at_once) or every
        if measured is None and (step_s := steps_s.get(name)):
            measured = handshake_s(step_s, at_once)
        found[name] = usual_s if measured is None else measured
    return found


def _ended(one: LearnedDrain) -> float:
    return one.ended_at


def step_s(metrics: str) -> float | None:
    """Mean seconds between two tokens of a request, by a deployment's metrics; None: unknown."""
    total = {"sum": 0.0, "count": 0.0}
    for line in metrics.splitlines():
        name, _, rest = line.partition("{")
        which = name.removeprefix(BETWEEN_TOKENS)
        if name != which and which in total:
            total[which] += float(rest.rpartition(" ")[2])
    return total["sum"] / total["count"] if total["count"] else None


def mean(measured: Sequence[float], usual: float) -> float:
    """The mean of the last ones, or `usual` where there is none."""
    last = measured[-LAST:]
    return sum(last) / len(last) if last else usual
