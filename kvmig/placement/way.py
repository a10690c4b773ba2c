"""The way from one placement to another on the same units, and what it delays. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from kvmig.placement import moves
from kvmig.placement.estimator import PlanEstimator
from kvmig.placement.file import PlacedUnit, UnitPlacement
from kvmig.placement.moves import (
    Leases,
    PlacedLease,
    PlacementSite,
    PlanRefused,
    PlanWave,
    Slot,
    nearest,
)
from kvmig.placement.problem import Plan
from kvmig.placement.worth import delayed


class PlannedWay(NamedTuple):
    """How another placement is reached."""

    placement: UnitPlacement
    """The new one, with the units that there are in their order."""
    units: list[PlacedUnit]
    """The same in the order of the plan."""
    waves: list[PlanWave]
    delayed: float
    """Requests that wait because of it."""


def way_between(
    before: UnitPlacement,
    after: UnitPlacement,
    site: PlacementSite,
    leases: Leases,
    rates: Mapping[Slot, float],
) -> PlannedWay | PlanRefused:
    """after: by `on_units`; units that are alike may change places. leases, rates: what each
    instance holds, and its requests per second, now."""
    named = nearest(site, leases, after.leases())
    units = {one.called: one for one in before.units}
    planned = [replace(units[named[one.called]], models=one.models) for one in after.units]
    of = {one.called: one for one in planned}
    after = replace(after, units=[of[one.called] for one in before.units])
    waves = moves.plan(site, leases, after.leases())
    if isinstance(waves, PlanRefused):
        return waves
    then = {(one.name, at.called): one.expected_rate for at in after.units for one in at.models}
    return PlannedWay(after, planned, waves, delayed(waves, rates, then))


def on_units(before: UnitPlacement, after: UnitPlacement) -> UnitPlacement:
    """The same, on the units that there are: any of the same size."""
    left = list(before.units)
    units: list[PlacedUnit] = []
    for one in after.units:
        at = next(at for at, unit in enumerate(left) if unit.size == one.size)
        units.append(replace(left.pop(at), models=one.models))
    return replace(after, units=units)


def estimated_leases(
    estimator: PlanEstimator, before: UnitPlacement, now: Plan
) -> dict[Slot, PlacedLease]:
    """What each instance may hold, and holds by the estimate."""
    leases = before.leases()
    device = estimator.cluster.device
    for unit, planned in zip(before.units, now, strict=True):
        for member, one in zip(planned.members, estimator.unit(planned) or (), strict=True):
            llm = estimator.models[member.llm]
            slot = (llm.name, unit.called)
            used = one.batch * llm.context * device.models[llm.model].token_bytes
            leases[slot] = leases[slot]._replace(used=min(int(used), leases[slot].quota))
    return leases


def estimated_rates(
    estimator: PlanEstimator, before: UnitPlacement, now: Plan
) -> dict[Slot, float]:
    """Requests per second of each instance, by the estimate."""
    return {
        (estimator.models[member.llm].name, unit.called): one.throughput
        for unit, planned in zip(before.units, now, strict=True)
        for member, one in zip(planned.members, estimator.unit(planned) or (), strict=True)
    }
