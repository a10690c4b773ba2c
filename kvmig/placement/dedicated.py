"""Placements in which no two models share a GPU: what sharing is compared with. Pure."""

from __future__ import annotations

from collections.abc import Callable

from kvmig.placement.estimator import PlanEstimator
from kvmig.placement.greedy import UnplacedMember
from kvmig.placement.meshes import packs
from kvmig.placement.problem import GpuUnit, PlacedInstance, Plan, floor_bytes, ordered


def spatial(estimator: PlanEstimator) -> Plan | UnplacedMember:
    """One unit a model; who gains most a GPU gets twice as many GPUs, while some are left."""
    return _grown(
        estimator,
        lambda units: [
            [*units[:at], GpuUnit(2 * one.gpus, one.members), *units[at + 1 :]]
            for at, one in enumerate(units)
        ],
    )


def replicas(estimator: PlanEstimator) -> Plan | UnplacedMember:
    """Put each model on as few GPUs as it runs on; the one that gains most gets one more
    instance."""
    models = range(len(estimator.models))
    return _grown(estimator, lambda units: [_one_more(estimator, units, llm) for llm in models])


def _grown(
    estimator: PlanEstimator, options: Callable[[list[GpuUnit]], list[list[GpuUnit]]]
) -> Plan | UnplacedMember:
    """The smallest units, replaced by the best of their options as long as one gains."""
    units = _smallest(estimator)
    while not isinstance(units, UnplacedMember):
        better = _best(estimator, units, options(units))
        if better is None:
            return ordered(units)
        units = better
    return units


def _one_more(estimator: PlanEstimator, units: list[GpuUnit], llm: int) -> list[GpuUnit]:
    """One more instance of a model, whose rate is shared equally among its instances."""
    (gpus, *others) = [one.gpus for one in units if one.members[0].llm == llm]
    rate = estimator.models[llm].rate / (2 + len(others))
    rest = [one for one in units if one.members[0].llm != llm]
    return [*rest, *[GpuUnit(gpus, (PlacedInstance(llm, rate),))] * (2 + len(others))]


def _smallest(estimator: PlanEstimator) -> list[GpuUnit] | UnplacedMember:
    cluster, units = estimator.cluster, list[GpuUnit]()
    for index, llm in enumerate(estimator.models):
        sizes = cluster.device.models[llm.model].sizes
        fitting = [GpuUnit(size, (PlacedInstance(index, llm.rate),)) for size in sizes]
        unit = next((one for one in fitting if estimator.unit(one) is not None), None)
        if unit is None or not packs([one.gpus for one in [*units, unit]], *cluster[:2]):
            return UnplacedMember(index, index, floor_bytes(llm, cluster.device))
        units.append(unit)
    return units


def _best(
    estimator: PlanEstimator, now: list[GpuUnit], options: list[list[GpuUnit]]
) -> list[GpuUnit] | None:
    """The option with the most gain a GPU; None: none gains, or there is no room."""
    cluster = estimator.cluster
    found: tuple[float, list[GpuUnit]] | None = None
    before, gpus = estimator.total(tuple(now)), sum(one.gpus for one in now)
    for option in options:
        sizes = [one.gpus for one in option]
        if not packs(sizes, cluster.nodes, cluster.gpus) or any(
            estimator.unit(one) is None for one in option
        ):
            continue
        gain = (estimator.total(tuple(option)) - before) / (sum(sizes) - gpus)
        if gain > 1e-9 and (found is None or gain > found[0] + 1e-9):
            found = (gain, option)
    return None if found is None else found[1]
