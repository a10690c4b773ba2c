"""MuxServe's Algorithm 1: models in the order of their computation, each to the unit where the
objective gains most; over groups of meshes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvmig.placement.estimator import PlanEstimator
from kvmig.placement.meshes import Group, groups, neighbours
from kvmig.placement.problem import GpuUnit, PlacedInstance, Plan, floor_bytes, ordered

ALL_GROUPS = 400
"""Number of groups up to which all are tried; beyond, units are halved while that helps."""


class UnplacedMember(NamedTuple):
    """A member that found no unit."""

    placed: int
    """Members that did."""
    llm: int
    missing_bytes: float
    """Bytes that are missing in the unit with the most room; 0 or less: memory isn't missing."""


def added(unit: GpuUnit, more: PlacedInstance) -> GpuUnit:
    """The unit with a member, or with more of a member's rate."""
    rates = dict(unit.members)
    rates[more.llm] = rates.get(more.llm, 0.0) + more.rate
    return GpuUnit(unit.gpus, tuple(PlacedInstance(llm, rates[llm]) for llm in sorted(rates)))


def place(
    estimator: PlanEstimator, members: Sequence[PlacedInstance], group: Group
) -> Plan | UnplacedMember:
    """Algorithm 1 on one group. Ties go to fewer GPUs."""
    units = [GpuUnit(size, ()) for size in group]
    for count, member in enumerate(by_computation(estimator, members)):
        best: tuple[tuple[float, int], int, GpuUnit] | None = None
        tried: set[GpuUnit] = set()
        for at, unit in enumerate(units):
            if unit in tried:
                continue
            tried.add(unit)
            larger = added(unit, member)
            value, before = estimator.value(larger), estimator.value(unit)
            if value is None or before is None:
                continue
            merit = (round(value - before, 9), -unit.gpus)
            if best is None or merit > best[0]:
                best = (merit, at, larger)
        if best is None:
            return _stuck(estimator, units, member.llm, count)
        units[best[1]] = best[2]
    return ordered(units)


def place_by_memory(
    estimator: PlanEstimator, members: Sequence[PlacedInstance], group: Group
) -> Plan | UnplacedMember:
    """Put models with the highest rate first, each to the unit with the most memory left: what
    MuxServe is compared with in its Figure 8."""
    units = [GpuUnit(size, ()) for size in group]
    for count, member in enumerate(sorted(members, key=lambda one: (-one.rate, one.llm))):
        fitting = [
            (estimator.left_bytes(one), -at, larger)
            for at, one in enumerate(units)
            if estimator.value(larger := added(one, member)) is not None
        ]
        if not fitting:
            return _stuck(estimator, units, member.llm, count)
        _, at, larger = max(fitting, key=lambda one: one[:2])
        units[-at] = larger
    return ordered(units)


def _stuck(
    estimator: PlanEstimator, units: Sequence[GpuUnit], llm: int, placed: int
) -> UnplacedMember:
    model, cluster = estimator.models[llm], estimator.cluster
    room = [
        estimator.left_bytes(unit)
        for unit in units
        if cluster.device.models[model.model].cost_on(unit.gpus) is not None
    ]
    missing = floor_bytes(model, cluster.device) - max(room, default=0.0)
    return UnplacedMember(placed, llm, missing)


def by_computation(
    estimator: PlanEstimator, members: Sequence[PlacedInstance]
) -> list[PlacedInstance]:
    """The most computation first: rate x weights (MuxServe's order)."""
    models, device = estimator.models, estimator.cluster.device

    def computation(one: PlacedInstance) -> float:
        return one.rate * device.models[models[one.llm].model].weight_bytes

    return sorted(members, key=lambda one: (-computation(one), one.llm))


def best_of_groups(
    estimator: PlanEstimator, members: Sequence[PlacedInstance]
) -> Plan | UnplacedMember:
    """Algorithm 1 over the cluster's groups of meshes."""
    cluster = estimator.cluster
    found = groups(cluster.nodes, cluster.gpus)
    if len(found) <= ALL_GROUPS:
        return _better(estimator, [place(estimator, members, one) for one in found])
    seen: dict[Group, Plan | UnplacedMember] = {}
    best: Plan | UnplacedMember | None = None
    for start in _starts(found):
        seen[start] = here = place(estimator, members, start)
        group: Group | None = start
        while group is not None:
            best_group, group = group, None
            for one in neighbours(best_group):
                if one not in seen:
                    seen[one] = place(estimator, members, one)
                if _merit(estimator, seen[one]) > _merit(estimator, here):
                    here, group = seen[one], one
        if best is None or _merit(estimator, here) > _merit(estimator, best):
            best = here
    assert best is not None
    return best


def _starts(found: Sequence[Group]) -> list[Group]:
    """Groups of equal units, and the coarsest."""
    return [one for one in found if one == found[0] or (len(set(one)) == 1 and one[0] > 1)]


def _merit(estimator: PlanEstimator, one: Plan | UnplacedMember) -> tuple[float, float]:
    if isinstance(one, UnplacedMember):
        return (-1.0, one.placed)
    return (round(estimator.total(one), 9), -used(one))


def used(plan: Plan) -> int:
    """GPUs that some model uses."""
    return sum(one.gpus for one in plan if one.members)


def _better(
    estimator: PlanEstimator, results: Sequence[Plan | UnplacedMember]
) -> Plan | UnplacedMember:
    return max(results, key=lambda one: _merit(estimator, one))
