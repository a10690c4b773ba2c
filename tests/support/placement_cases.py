"""Placement problems, and the best answer to small ones by going through all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from kvmig.placement.estimator import PlanEstimator
from kvmig.placement.greedy import added
from kvmig.placement.meshes import groups
from kvmig.placement.problem import GpuUnit, ModelLoad, PlacedInstance, Plan, ordered


def small_case(seed: int) -> list[ModelLoad]:
    """Two to four models at rates that some placements carry and others don't."""
    draw = Random(seed)
    kinds = ["llama-7b", "llama-13b", "llama-30b"]
    return [
        ModelLoad(f"m{at}", draw.choice(kinds), round(draw.uniform(0.5, 12), 2))
        for at in range(draw.choice([2, 3, 4]))
    ]


def best_value(estimator: PlanEstimator, members: Sequence[PlacedInstance]) -> float:
    """The highest objective of any group of meshes and any way to put `members` there."""
    cluster = estimator.cluster
    return max(
        estimator.total(plan)
        for group in groups(cluster.nodes, cluster.gpus)
        for plan in _all_plans([GpuUnit(size, ()) for size in group], list(members), estimator)
    )


def _all_plans(
    units: list[GpuUnit], members: list[PlacedInstance], estimator: PlanEstimator
) -> Iterator[Plan]:
    if not members:
        yield ordered(units)
        return
    first, *rest = members
    for at in {unit: at for at, unit in enumerate(units)}.values():
        larger = added(units[at], first)
        if estimator.value(larger) is not None:
            yield from _all_plans([*units[:at], larger, *units[at + 1 :]], rest, estimator)
