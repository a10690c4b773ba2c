"""Another placement for rates that have changed, if it is worth the way there. Pure.

The units stay, and instances have one size for each model, as where no agent shares KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

import msgspec
from msgspec.structs import replace

from kvmig.core.errors import ConfigError
from kvmig.placement.estimator import FixedSize, PlanEstimator
from kvmig.placement.file import PlacedModel, PlacedUnit, UnitPlacement, plan_of
from kvmig.placement.greedy import UnplacedMember
from kvmig.placement.moves import PlanRefused
from kvmig.placement.problem import GpuCluster, ModelLoad, Objective, Plan
from kvmig.placement.rates import LEAST_RATE
from kvmig.placement.search import CLOSE, search
from kvmig.placement.step_costs import DeviceCosts, ModelCost
from kvmig.placement.told import worth_to_text
from kvmig.placement.way import estimated_leases, estimated_rates, on_units, way_between
from kvmig.placement.worth import worth

EVALUATIONS = 30_000
"""Bound on the work of one search: a server has other work, too."""
Seconds = Annotated[float, msgspec.Meta(ge=1, le=1e6)]


class ReplanRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a placement is planned again, and with which costs."""

    device: DeviceCosts
    """Costs on one of the placement's GPUs."""
    models: list[ModelLoad]
    """The models of the placement, with the rates for which it was planned."""
    objective: Objective = "slo"
    horizon_s: Seconds = 600.0
    """Seconds for which another placement must be worth it, and stays at least."""
    span_s: Seconds = 300.0
    """Time over which rates are measured."""
    change: Annotated[float, msgspec.Meta(gt=0, le=10)] = 0.25
    """Part of a rate that must have changed."""

    @property
    def planned(self) -> dict[str, float]:
        """Requests per second for which the placement was planned, by model."""
        return {one.name: one.rate for one in self.models}

    def planned_for(self, rates: Mapping[str, float]) -> ReplanRule:
        """The same, once the placement is planned for other rates."""
        return replace(
            self,
            models=[
                replace(one, rate=max(LEAST_RATE, rates.get(one.name, LEAST_RATE)))
                for one in self.models
            ],
        )


class ReplanVerdict(NamedTuple):
    """What came of planning again."""

    placement: UnitPlacement | None
    """The new one; None: the one that is there stays."""
    why: str
    """The reason, for people."""


def check_rule(rule: ReplanRule, placement: UnitPlacement, where: str) -> None:
    """Whether this placement can be planned again so. Raises ConfigError."""
    names, placed = [one.name for one in rule.models], placement.models()
    if placement.elastic:
        raise ConfigError(
            f"{where}: arena_bytes of the placement's units must be 0: one whose models share KV"
            " cache isn't planned again by rates"
        )
    for unit in placement.units:
        for at in unit.models:
            if at.kv_bytes != placed[at.name].kv_bytes:
                raise ConfigError(
                    f"{where}: kv_bytes of model {at.name} must be the same in all units: it is"
                    f" planned again with instances of one size"
                )
    for name in placed:
        if names.count(name) != 1:
            raise ConfigError(
                f"{where}: models has {name} {names.count(name)} times, must have each model of the"
                " placement once"
            )
    for one in rule.models:
        if one.name not in placed:
            raise ConfigError(f"{where}: models has {one.name}, which the placement doesn't place")
        if one.model not in rule.device.models:
            raise ConfigError(
                f"{where}: model of {one.name} is {one.model!r:.100}, must be of"
                f" {', '.join(sorted(rule.device.models))}"
            )
    _estimated(placement, rule, where)


def replanned(
    placement: UnitPlacement,
    rule: ReplanRule,
    rates: Mapping[str, float],
    start_s: Mapping[str, float],
) -> ReplanVerdict:
    """rates: requests per second, as they are now; start_s: seconds of a start, by model."""
    estimator, before, now = _estimated(placement, rule.planned_for(rates), "the placement")
    found = search(estimator, EVALUATIONS, now)
    if isinstance(found, UnplacedMember):
        return ReplanVerdict(None, "no other placement has room for all models")
    gain = estimator.total(found) - estimator.total(now)
    if gain <= CLOSE * estimator.total(now):
        return ReplanVerdict(None, "no other placement serves noticeably more")
    after = on_units(before, _with_sizes(estimator, found, before))
    site = after.site(start_s)
    leases = estimated_leases(estimator, before, now)
    way = way_between(before, after, site, leases, estimated_rates(estimator, before, now))
    if isinstance(way, PlanRefused):
        return ReplanVerdict(None, f"there is no way to a better one: {way.why}")
    gained = worth(gain, rule.horizon_s, way.delayed)
    why = worth_to_text(gained, rule.horizon_s)
    return ReplanVerdict(way.placement if gained.it and way.waves else None, why)


def _estimated(
    placement: UnitPlacement, rule: ReplanRule, where: str
) -> tuple[PlanEstimator, UnitPlacement, Plan]:
    """The placement as the estimator has it: with its bytes, and the rates of the rule. Its shares
    are those of a whole device: no order changes them. Raises ConfigError."""
    sizes = placement.models()
    device = replace(
        rule.device,
        memory_bytes=min(unit.memory_bytes // unit.size for unit in placement.units),
        usable=1.0,
        instance_bytes=0,
        models={
            one.name: _held(rule.device.models[one.model], sizes[one.name]) for one in rule.models
        },
    )
    loads = [replace(one, model=one.name) for one in rule.models]
    fixed = [FixedSize(sizes[one.name].held_bytes, sizes[one.name].kv_bytes) for one in loads]
    gpus = max(unit.size for unit in placement.units)
    cluster = GpuCluster(len(placement.units), gpus, device)
    estimator = PlanEstimator(loads, cluster, rule.objective, fixed)
    before = replace(placement, units=[_rated(unit, placement) for unit in placement.units])
    return estimator, before, plan_of(before, estimator, where)


def _held(cost: ModelCost, placed: PlacedModel) -> ModelCost:
    return replace(cost, weight_bytes=max(1, placed.held_bytes))


def _rated(unit: PlacedUnit, placement: UnitPlacement) -> PlacedUnit:
    """The unit with equal rates of a model's instances where a placement by hand has none."""
    total = {
        name: sum(one.rate for at in placement.units for one in at.models if one.name == name)
        for name in placement.models()
    }
    models = [
        replace(one, rate=one.rate if total[one.name] else 1.0, decode_share=1.0)
        for one in unit.models
    ]
    return replace(unit, models=models)


def _with_sizes(estimator: PlanEstimator, plan: Plan, before: UnitPlacement) -> UnitPlacement:
    """The plan as a placement, each model with the bytes that it has."""
    sizes = before.models()
    units: list[PlacedUnit] = []
    for unit in plan:
        like = next(one for one in before.units if one.size == unit.gpus)
        members = [
            replace(
                sizes[estimator.models[member.llm].name],
                rate=member.rate,
                batch=round(one.batch),
                expected_rate=round(one.throughput, 6),
                tp=unit.gpus,
            )
            for member, one in zip(unit.members, estimator.unit(unit) or (), strict=True)
        ]
        units.append(replace(like, models=members))
    return replace(before, units=units)
