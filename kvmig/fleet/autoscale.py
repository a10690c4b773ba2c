"""How many instances a model should have, from what its requests are. Pure.

By concurrency as Knative does it: requests that run or wait, integrated over time, in a stable
window of 60 s and a panic window of 6 s. Up at once, down one at a time and only where the
survivors hold what is there. From zero and to zero is `kvmig.fleet.lifecycle`'s; by freeness a
deployment scales itself (`kvmig.serve --autoscale`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

Kind = Literal["concurrency", "rps"]
Reason = Literal["load", "min", "max", "schedule", "room"]
SAID: Mapping[Reason, str] = {
    "min": "min", "max": "max", "schedule": "by the schedule", "room": "no room for more",
}  # fmt: skip

STABLE_S = 60.0
PANIC_S = 6.0
PANIC_AT = 2.0
"""Times as many as are ready, wanted by the panic window."""
FASTEST = 10
"""Times as many as are ready at most, in one step."""
COOLDOWN_S = 30.0
"""Least time from the last change to a step down."""
GROWTH = 10.0
"""Blocks by which each request could still grow on the survivors of a step down."""


@dataclass(frozen=True, slots=True)
class DemandSample:
    """What a proxy counted in the `seconds` before `at`."""

    at: float
    seconds: float
    request_s: float
    """Requests that ran or waited, times how long."""
    arrivals: int = 0


class DemandWindow:
    """The samples of all proxies that the longer window needs."""

    def __init__(self) -> None:
        self._samples: deque[DemandSample] = deque()

    def add(self, sample: DemandSample) -> None:
        """Add a sample, in any order; drop those that are too old."""
        self._samples.append(sample)
        while self._samples and self._samples[0].at < sample.at - STABLE_S - PANIC_S:
            self._samples.popleft()

    def concurrency(self, now: float, span_s: float) -> float:
        """Mean number of requests that ran or waited in the last `span_s`."""
        return sum(one.request_s * _part(one, now, span_s) for one in self._samples) / span_s

    def rate(self, now: float, span_s: float) -> float:
        """Mean arrivals a second in the last `span_s`."""
        return sum(one.arrivals * _part(one, now, span_s) for one in self._samples) / span_s

    def load(self, kind: Kind, now: float, span_s: float) -> float:
        """What a rule of that kind counts, in the last `span_s`."""
        return (self.concurrency if kind == "concurrency" else self.rate)(now, span_s)


def _part(sample: DemandSample, now: float, span_s: float) -> float:
    """How much of a sample's time lies in the window, 0 to 1."""
    begin = max(sample.at - sample.seconds, now - span_s)
    inside = min(sample.at, now) - begin
    return min(1.0, max(0.0, inside / sample.seconds)) if sample.seconds else float(inside >= 0)


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """What the catalogue says of a model."""

    least: int = 0
    most: int = 1
    target: float = 8.0
    """Concurrent requests, or requests per second, that one instance should have."""
    kind: Kind = "concurrency"


@dataclass(frozen=True, slots=True)
class ObservedDemand:
    """What is seen of it now."""

    ready: int
    """Instances that serve."""
    stable: float
    """Demand in the stable window: requests, or requests per second, by the rule's kind."""
    panic: float
    """The same of the panic window."""
    holds: bool = True
    """Whether one instance less would hold what is there."""
    floor: int = 0
    """Least number by the schedule, now."""
    room: float = math.inf
    """Instances at most, for which there is memory."""


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """What was decided last."""

    wanted: int = 1
    why: str = ""
    """Reason of the decision, for people."""
    reason: Reason = "load"
    changed_at: float = -math.inf
    panic_until: float = field(default=-math.inf)


def decide(
    before: ScalingDecision, rule: ScalingRule, demand: ObservedDemand, now: float
) -> ScalingDecision:
    """How many instances, at least one. now: seconds of any steady clock."""
    panic_until = before.panic_until
    stable, panic = (math.ceil(load / rule.target) for load in (demand.stable, demand.panic))
    if panic >= PANIC_AT * max(demand.ready, 1):
        panic_until = now + STABLE_S
    panicking = now < panic_until
    by_load = max(stable, panic, before.wanted) if panicking else stable
    unit = "" if rule.kind == "concurrency" else "/s"
    load = demand.panic if panicking else demand.stable
    why = f"{load:.1f}{unit} at {rule.target:g}{unit} an instance"
    reason: Reason = "load"
    least = max(1, rule.least, demand.floor)
    if by_load < least:
        by_load, reason = least, "schedule" if demand.floor == least > rule.least else "min"
    if by_load > rule.most:
        by_load, reason = rule.most, "max"
    if by_load > demand.room:
        by_load, reason = int(demand.room), "room"
    wanted = min(by_load, FASTEST * max(demand.ready, 1))
    wanted = _step_down(before, rule, wanted, demand, now) if wanted < before.wanted else wanted
    if wanted == before.wanted:
        return replace(before, panic_until=panic_until)
    way = "up" if wanted > before.wanted else "down"
    said = f"{way} to {wanted}: {SAID.get(reason, why)}"
    return ScalingDecision(wanted, said, reason, now, panic_until)


def _step_down(
    before: ScalingDecision, rule: ScalingRule, wanted: int, demand: ObservedDemand, now: float
) -> int:
    """One less at most, and not before the last change has shown what it does.

    What was ordered is done at once: no more than the rule allows.
    """
    if before.wanted > rule.most:
        return rule.most
    steady = demand.ready >= before.wanted and now - before.changed_at >= COOLDOWN_S
    return max(wanted, before.wanted - 1) if steady and demand.holds else before.wanted


class InstanceLoad(Protocol):
    """What counts here of one instance, as the deployment reports it."""

    @property
    def id(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def blocks_total(self) -> int: ...
    @property
    def blocks_used(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...


def counted(instances: Sequence[InstanceLoad]) -> int:
    """How many of a deployment's instances serve, or will."""
    return sum(one.state not in ("draining", "failed") for one in instances)


def one_less_holds(instances: Sequence[InstanceLoad]) -> bool:
    """Whether the blocks of all but the largest instance hold the requests that are there, and what
    these may still grow by; without known blocks they count as held: such requests end where they
    run."""
    used = sum(one.blocks_used for one in instances)
    most = max(one.blocks_total for one in instances)
    if not most:
        return True
    left = sum(one.blocks_total for one in instances) - most - used
    return left >= GROWTH * sum(one.running + one.waiting for one in instances)


def taken_over(instances: Sequence[InstanceLoad], now: float) -> ScalingDecision:
    """What a server before this one has decided: what there is. This one takes nothing away before
    it has seen as much of the demand as it decides by."""
    return ScalingDecision(counted(instances), changed_at=now + STABLE_S - COOLDOWN_S)


class ScalingOrder(NamedTuple):
    """What the deployment is asked to do next."""

    more: int
    """Instances to add; negative: one is to be drained."""
    failed: Sequence[str]
    """Instances to take out first: the deployment has given them up."""


def next_order(instances: Sequence[InstanceLoad], wanted: int) -> ScalingOrder | None:
    """The step from these instances towards as many as are wanted; None: nothing is to be done."""
    failed = [one.id for one in instances if one.state == "failed"]
    more = wanted - counted(instances)
    return ScalingOrder(more, failed) if failed or more else None
