"""kvmig's placement: models may have replicas. Pure, and the same for the same input.

Where requests move between instances, a model needn't run in one place. So a rate is cut into
parts that one small unit carries, Algorithm 1 places the parts as if they were models, and then
single steps follow while one helps: a part moves, two parts change places, half a part goes to
another unit, a unit is halved, two are joined.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

from kvmig.placement.dedicated import replicas
from kvmig.placement.estimator import PlanEstimator
from kvmig.placement.greedy import UnplacedMember, added, best_of_groups, place
from kvmig.placement.meshes import packs
from kvmig.placement.problem import GpuCluster, GpuUnit, PlacedInstance, Plan, ordered

GRAINS = (0.0, 0.5, 0.7, 0.9)
"""What share of a small unit's throughput a part may be; 0: models stay whole."""
CLOSE = 0.0075
"""Plans whose objectives differ by less are equal, as far as an estimate can say. Then the one is
taken that was climbed to from instances that share nothing."""
LEAST_GAIN = 1e-6
"""Least gain of the objective for a step to count."""
Step = tuple[tuple[int, ...], tuple[GpuUnit, ...]]
"""Units that go, by index, and units that come."""


def search(
    estimator: PlanEstimator, evaluations: int = 150_000, now: Plan | None = None
) -> Plan | UnplacedMember:
    """The best plan found; evaluations: of units, the bound on the work after Algorithm 1.

    now: what is there; its units stay, and it is a start of the climb, too. None: nothing is.
    """
    group = None if now is None else tuple(sorted((one.gpus for one in now), reverse=True))
    starts: list[Plan] = []
    stuck: UnplacedMember | None = None
    for members in dict.fromkeys(tuple(parts(estimator, grain)) for grain in GRAINS):
        found = (
            best_of_groups(estimator, members)
            if group is None
            else place(estimator, members, group)
        )
        if isinstance(found, UnplacedMember):
            stuck = stuck or found
        else:
            starts.append(found)
    starts = sorted(starts, key=lambda one: -round(estimator.total(one), 9))[:2]
    first = replicas(estimator) if now is None else ordered(now)
    if not isinstance(first, UnplacedMember):
        starts.insert(0, first)
    if not starts:
        assert stuck is not None
        return stuck
    most = evaluations // len(starts)
    plans = [climb(estimator, one, most, cut=now is None) for one in starts]
    best = max(estimator.total(one) for one in plans)
    return next(one for one in plans if estimator.total(one) >= (1 - CLOSE) * best)


def parts(estimator: PlanEstimator, grain: float) -> Iterator[PlacedInstance]:
    """Equal parts of each model's rate, which its smallest unit can serve at `grain` load."""
    cluster = estimator.cluster
    for index, llm in enumerate(estimator.models):
        count = 1
        if grain:
            smallest = GpuUnit(
                cluster.device.models[llm.model].sizes[0], (PlacedInstance(index, llm.rate),)
            )
            alone = estimator.unit(smallest)
            if alone is not None:
                count = math.ceil(llm.rate / (grain * alone[0].throughput) - 1e-9)
        count = max(1, min(count, cluster.nodes * cluster.gpus))
        yield from [PlacedInstance(index, llm.rate / count)] * count


def climb(estimator: PlanEstimator, plan: Plan, evaluations: int, cut: bool = True) -> Plan:
    """Steps that help, the first one found each time, until none does or the bound is met.

    cut: units may be halved and joined.
    """
    left = evaluations
    going = True
    while going and left > 0:
        going = False
        for gone, come in _steps(estimator, plan, cut):
            left -= len(come)
            if left <= 0:
                break
            gain = _gain(estimator, plan, gone, come)
            if gain is not None and gain > LEAST_GAIN * max(1.0, estimator.total(plan)):
                kept = [one for at, one in enumerate(plan) if at not in gone]
                plan = ordered([*kept, *come])
                going = True
                break
    return plan


def _gain(
    estimator: PlanEstimator, plan: Plan, gone: Sequence[int], come: Sequence[GpuUnit]
) -> float | None:
    after = 0.0
    for one in come:
        value = estimator.value(one)
        if value is None:
            return None
        after += value
    return after - sum(estimator.value(plan[at]) or 0.0 for at in gone)


def _steps(estimator: PlanEstimator, plan: Plan, cut: bool) -> Iterator[Step]:
    """Every step from here; those of members that lack most throughput first."""
    lacking: list[tuple[float, int, PlacedInstance]] = []
    for at, unit in enumerate(plan):
        for member, one in zip(unit.members, estimator.unit(unit) or (), strict=True):
            worth = estimator.models[member.llm].rate if estimator.objective == "paper" else 1.0
            lacking.append((-worth * (member.rate - one.throughput), at, member))
    lacking.sort()
    distinct = [at for at, unit in enumerate(plan) if at == 0 or plan[at - 1] != unit]
    for _, at, member in lacking:
        yield from _of_member(plan, at, member, distinct)
    if cut:
        yield from _of_sizes(plan, estimator.cluster)


def _of_member(
    plan: Plan, at: int, member: PlacedInstance, distinct: Sequence[int]
) -> Iterator[Step]:
    """The steps of one member: it moves, half of it does, or it changes places with another."""
    half = PlacedInstance(member.llm, member.rate / 2)
    left = _without(plan[at], member)
    for to in distinct:
        if to == at:
            continue
        yield (at, to), (left, added(plan[to], member))
        yield (at, to), (added(left, half), added(plan[to], half))
        for other in plan[to].members:
            if other.llm != member.llm:
                there = added(_without(plan[to], other), member)
                yield (at, to), (added(left, other), there)


def _of_sizes(plan: Plan, cluster: GpuCluster) -> Iterator[Step]:
    """A unit is halved, its members on both sides; two equal ones join where a node has room."""
    for at, unit in enumerate(plan):
        if unit.gpus > 1:
            half = unit.gpus // 2
            both = tuple(PlacedInstance(one.llm, one.rate / 2) for one in unit.members)
            yield (at,), (GpuUnit(half, both), GpuUnit(half, both))
            for cut in range(1, len(unit.members)):
                yield (at,), (GpuUnit(half, unit.members[:cut]), GpuUnit(half, unit.members[cut:]))
    for one, two in combinations(range(len(plan)), 2):
        sizes = [unit.gpus for at, unit in enumerate(plan) if at not in (one, two)]
        larger = 2 * plan[one].gpus
        if plan[one].gpus == plan[two].gpus and packs(
            [*sizes, larger], cluster.nodes, cluster.gpus
        ):
            joined = GpuUnit(larger, plan[one].members)
            for member in plan[two].members:
                joined = added(joined, member)
            yield (one, two), (joined,)


def _without(unit: GpuUnit, member: PlacedInstance) -> GpuUnit:
    return GpuUnit(unit.gpus, tuple(one for one in unit.members if one.llm != member.llm))


def next_best(
    estimator: PlanEstimator, plan: Plan, number: int
) -> tuple[int, float, int, float] | None:
    """The move of the members of one unit that costs least: (model, share of it, to which unit,
    what the objective loses). None: no move can be."""
    found: list[tuple[float, int, float, int]] = []
    distinct = [at for at, unit in enumerate(plan) if at == 0 or plan[at - 1] != unit]
    for member in plan[number].members:
        for share in (1.0, 0.5):
            part = PlacedInstance(member.llm, member.rate * share)
            left = _without(plan[number], member)
            left = left if share == 1 else added(left, part)
            for to in distinct:
                if to != number:
                    come = (left, added(plan[to], part))
                    gain = _gain(estimator, plan, (number, to), come)
                    if gain is not None:
                        found.append((-gain, member.llm, share, to))
    if not found:
        return None
    loss, llm, share, to = min(found)
    return llm, share, to, loss
