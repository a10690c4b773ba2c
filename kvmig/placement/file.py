"""A placement as a file: what `python -m kvmig.placement --out` writes, and people by hand. Pure.

[[units]]
name = "left"
memory_bytes = 4294967296

[[units.models]]
name = "chat"
held_bytes = 1073741824
floor_bytes = 67108864
kv_bytes = 536870912
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kvmig.core.errors import ConfigError
from kvmig.placement.estimator import OVERBOOKED, PlanEstimator
from kvmig.placement.moves import GIB, ModelNeeds, MoveUnit, PlacedLease, PlacementSite, Slot
from kvmig.placement.problem import GpuUnit as PlannedUnit
from kvmig.placement.problem import PlacedInstance, Plan, floor_bytes

MOST_BYTES = 1 << 60


class PlacedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An instance."""

    name: str
    kv_bytes: int
    """Quota of KV cache."""
    held_bytes: int = 0
    """Weights, activations: all before the first token."""
    floor_bytes: int = 0
    """KV cache of one request of the greatest length: no quota may be less."""
    rate: float = 0.0
    """Requests per second that are meant to come here."""
    decode_share: float = 1.0
    """Share of the unit's SMs for decode steps."""
    batch: int = 0
    """Requests that are expected to run at once."""
    expected_rate: float = 0.0
    tp: int | None = None
    """Number of GPUs that it runs on: those of the unit."""


class PlacedUnit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A set of GPUs and who shares them."""

    memory_bytes: int
    """Bytes for weights, instances and KV cache, all GPUs together."""
    name: str = ""
    """Empty: from its node, or worker, and GPUs."""
    node: int = 0
    gpus: list[int] = []
    """GPUs of that node, or worker; none: its CPUs."""
    models: list[PlacedModel] = []
    arena_bytes: int = 0
    """KV cache that its agent (`kvmig.sharing`) leases, so that quotas change while instances
    serve; 0: it has none, and they don't."""
    worker: str = ""
    """Name of the fleet's worker that it is on (`kvmig up --ray`); empty: there are no workers."""

    @property
    def called(self) -> str:
        """The name that instances are given."""
        return self.name or f"{self.worker or self.node}:{','.join(map(str, self.gpus))}"

    @property
    def size(self) -> int:
        """GPUs on which its models run; the host's CPUs count as one."""
        return max(1, len(self.gpus))


class UnitPlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The units of a placement, empty ones included."""

    units: list[PlacedUnit]
    objective: str = ""
    """Objective by which it was found."""

    def leases(self) -> dict[Slot, PlacedLease]:
        """What each instance may hold."""
        return {
            (one.name, unit.called): PlacedLease(one.kv_bytes, share=one.decode_share)
            for unit in self.units
            for one in unit.models
        }

    def models(self) -> dict[str, PlacedModel]:
        """Places by name, the first one of each model."""
        found: dict[str, PlacedModel] = {}
        for unit in self.units:
            for one in unit.models:
                found.setdefault(one.name, one)
        return found

    def site(
        self, start_s: Mapping[str, float], byte_s: Mapping[str, float] | None = None
    ) -> PlacementSite:
        """What planning needs to know of it. start_s, byte_s: of models, as `ModelNeeds` has
        them."""
        return PlacementSite(
            {
                one.called: MoveUnit(one.memory_bytes, len(one.gpus), one.arena_bytes or None)
                for one in self.units
            },
            {
                name: ModelNeeds(
                    one.held_bytes, one.floor_bytes, start_s[name], (byte_s or {}).get(name, 0.0)
                )
                for name, one in self.models().items()
            },
            elastic=self.elastic,
        )

    @property
    def elastic(self) -> bool:
        """Whether units have agents, by whose orders quotas change while instances serve."""
        return any(one.arena_bytes for one in self.units)


def read(text: str, where: str) -> UnitPlacement:
    """Parse TOML. Raises ConfigError: which field of `where` is wrong, and what is allowed."""
    try:
        given = msgspec.toml.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: {error}") from error
    return placement_from(given, where)


def placement_from(given: object, where: str) -> UnitPlacement:
    """Convert the content of TOML or JSON. Raises ConfigError: which field of `where` is wrong, and
    what is allowed."""
    try:
        found = msgspec.convert(given, UnitPlacement)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not found.units:
        raise ConfigError(f"{where}: units is empty, must have one unit at least")
    if twice := _twice(one.called for one in found.units):
        raise ConfigError(f"{where}: unit {twice} is there twice")
    if twice := _twice(f"{gpu} of {_host(one)}" for one in found.units for gpu in one.gpus):
        raise ConfigError(f"{where}: GPU {twice} is in two units")
    for unit in found.units:
        _check_unit(unit, f"{where}: unit {unit.called}")
        if found.elastic and not unit.arena_bytes:
            raise ConfigError(
                f"{where}: unit {unit.called}: arena_bytes is 0, must be 1 or more: all units have "
                "agents or none"
            )
    for name, first in found.models().items():
        for unit in found.units:
            for one in unit.models:
                for field in ("held_bytes", "floor_bytes"):
                    _alike(where, name, field, getattr(first, field), one, unit)
    return found


def _host(unit: PlacedUnit) -> str:
    return f"worker {unit.worker}" if unit.worker else f"node {unit.node}"


def _twice(names: Iterable[str]) -> str:
    return next((name for name, count in Counter(names).items() if count > 1), "")


def _alike(
    where: str, name: str, field: str, value: int, one: PlacedModel, unit: PlacedUnit
) -> None:
    if one.name == name and getattr(one, field) != value:
        raise ConfigError(
            f"{where}: model {name}: {field} is {getattr(one, field)} in unit {unit.called}, must "
            f"be {value}, as before"
        )


def _check_unit(unit: PlacedUnit, where: str) -> None:
    if not 0 < unit.memory_bytes <= MOST_BYTES:
        raise ConfigError(
            f"{where}: memory_bytes is {unit.memory_bytes}, must be 1 to {MOST_BYTES}"
        )
    if twice := _twice(one.name for one in unit.models):
        raise ConfigError(f"{where}: model {twice} is there twice, a unit has one of each")
    for one in unit.models:
        _check_model(one, unit, f"{where}: model {one.name}")
    if not 0 <= unit.arena_bytes <= unit.memory_bytes:
        raise ConfigError(
            f"{where}: arena_bytes is {unit.arena_bytes}, must be 0 to {unit.memory_bytes} "
            "(memory_bytes)"
        )
    beyond = sum(one.kv_bytes for one in unit.models) - unit.arena_bytes
    if unit.arena_bytes and beyond > 0:
        raise ConfigError(
            f"{where}: kv_bytes of its models are {beyond} bytes more than arena_bytes, "
            f"{unit.arena_bytes}"
        )
    over = sum(one.held_bytes + one.kv_bytes for one in unit.models) - unit.memory_bytes
    if over > 0:
        raise ConfigError(
            f"{where}: its models take {over / GIB:.3g} GiB more than memory_bytes, "
            f"{unit.memory_bytes / GIB:.3g} GiB"
        )
    shares = sum(one.decode_share for one in unit.models)
    if len(unit.models) > 1 and unit.gpus and shares > OVERBOOKED + 1e-3:
        raise ConfigError(
            f"{where}: decode_share is {shares:.4g} in all, must be {OVERBOOKED:g} at most"
        )


def _check_model(one: PlacedModel, unit: PlacedUnit, where: str) -> None:
    if not 1 <= len(one.name) <= 200:
        raise ConfigError(f"{where}: name has {len(one.name)} characters, must have 1 to 200")
    if not 0 < one.decode_share <= 1:
        raise ConfigError(
            f"{where}: decode_share is {one.decode_share:g}, must be above 0 and at most 1"
        )
    for name, rate in (("rate", one.rate), ("expected_rate", one.expected_rate)):
        if not (math.isfinite(rate) and rate >= 0):
            raise ConfigError(f"{where}: {name} is {rate:g}, must be a number of 0 or more")
    for name, size in (("held_bytes", one.held_bytes), ("floor_bytes", one.floor_bytes)):
        if not 0 <= size <= MOST_BYTES:
            raise ConfigError(f"{where}: {name} is {size}, must be 0 to {MOST_BYTES}")
    if not one.floor_bytes <= one.kv_bytes <= MOST_BYTES:
        raise ConfigError(
            f"{where}: kv_bytes is {one.kv_bytes}, must be {one.floor_bytes} (floor_bytes) or more"
        )
    if one.tp is not None and one.tp != unit.size:
        raise ConfigError(
            f"{where}: tp is {one.tp}, must be {unit.size}: a model runs on all GPUs of its unit"
        )


# -- plans of the estimator


def where(estimator: PlanEstimator, plan: Plan) -> list[tuple[int, list[int]]]:
    """Node and GPUs of each unit, large ones first: the first node with room."""
    cluster = estimator.cluster
    taken = [0] * cluster.nodes
    found: list[tuple[int, list[int]]] = []
    for unit in plan:
        node = next(at for at, used in enumerate(taken) if used + unit.gpus <= cluster.gpus)
        found.append((node, list(range(taken[node], taken[node] + unit.gpus))))
        taken[node] += unit.gpus
    return found


def placement_of(estimator: PlanEstimator, plan: Plan) -> UnitPlacement:
    """A plan with names, bytes and places."""
    device = estimator.cluster.device
    units: list[PlacedUnit] = []
    for (node, gpus), unit in zip(where(estimator, plan), plan, strict=True):
        members: list[PlacedModel] = []
        expected = estimator.unit(unit) or ()
        floors = [floor_of(estimator, member) for member in unit.members]
        quotas = at_least(floors, [int(one.kv_bytes) for one in expected])
        for member, one, floor, quota in zip(unit.members, expected, floors, quotas, strict=True):
            llm = estimator.models[member.llm]
            members.append(
                PlacedModel(
                    name=llm.name,
                    kv_bytes=quota,
                    held_bytes=device.fixed_bytes(llm.model),
                    floor_bytes=floor,
                    rate=member.rate,
                    decode_share=round(one.share, 4),
                    batch=round(one.batch),
                    expected_rate=round(one.throughput, 6),
                    tp=unit.gpus,
                )
            )
        units.append(PlacedUnit(int(device.memory(unit.gpus)), "", node, gpus, members))
    return UnitPlacement(units, estimator.objective)


def floor_of(estimator: PlanEstimator, member: PlacedInstance) -> int:
    """Bytes of KV cache for one request of the member's model."""
    llm, device = estimator.models[member.llm], estimator.cluster.device
    return math.ceil(floor_bytes(llm, device)) - device.fixed_bytes(llm.model)


def at_least(floors: Sequence[int], quotas: Sequence[int]) -> list[int]:
    """Quotas of which none is below its floor: those above theirs give in the ratio of what they
    have beyond. The floors fit together."""
    lacking = sum(max(0, floor - quota) for floor, quota in zip(floors, quotas, strict=True))
    beyond = sum(max(0, quota - floor) for floor, quota in zip(floors, quotas, strict=True))
    return [
        floor if quota <= floor else quota - math.ceil(lacking * (quota - floor) / beyond)
        for floor, quota in zip(floors, quotas, strict=True)
    ]


def to_toml(placement: UnitPlacement) -> str:
    """The file; the same placement gives the same bytes."""
    lines = [f'objective = "{placement.objective}"', ""]
    for unit in placement.units:
        lines += [
            "[[units]]",
            f"name = {json.dumps(unit.called, ensure_ascii=False)}",
            f"node = {unit.node}",
            f"gpus = {unit.gpus}",
            *([f"worker = {json.dumps(unit.worker, ensure_ascii=False)}"] if unit.worker else []),
            f"memory_bytes = {unit.memory_bytes}",
            *([f"arena_bytes = {unit.arena_bytes}"] if unit.arena_bytes else []),
            *([] if unit.models else ["models = []"]),
            "",
        ]
        for one in unit.models:
            lines += ["[[units.models]]"]
            for field in one.__struct_fields__:
                value = getattr(one, field)
                if value is not None:
                    text = isinstance(value, str)
                    word = json.dumps(value, ensure_ascii=False) if text else repr(value)
                    lines.append(f"{field} = {word}")
            lines.append("")
    return "\n".join(lines)


def plan_of(placement: UnitPlacement, estimator: PlanEstimator, where_: str) -> Plan:
    """The same as the estimator has it, with the rates of its models as the placement divides
    them; units in the placement's order. Raises ConfigError for what the estimator doesn't know."""
    index = {one.name: at for at, one in enumerate(estimator.models)}
    device = estimator.cluster.device
    total: dict[str, float] = {}
    for unit in placement.units:
        for one in unit.models:
            total[one.name] = total.get(one.name, 0.0) + one.rate
    units: list[PlannedUnit] = []
    for unit in placement.units:
        members: list[PlacedInstance] = []
        for one in unit.models:
            if one.name not in index:
                known = ", ".join(index)
                raise ConfigError(
                    f"{where_}: unit {unit.called}: model is {one.name!r:.100}, must be of {known}"
                )
            llm = estimator.models[index[one.name]]
            cost = device.models[llm.model]
            if cost.cost_on(unit.size) is None:
                sizes = ", ".join(map(str, cost.sizes))
                raise ConfigError(
                    f"{where_}: unit {unit.called}: gpus are {unit.size}, {llm.model} runs on "
                    f"{sizes}"
                )
            if not one.rate:
                raise ConfigError(f"{where_}: unit {unit.called}: model {one.name} needs a rate")
            members.append(PlacedInstance(index[one.name], llm.rate * one.rate / total[one.name]))
        units.append(PlannedUnit(unit.size, tuple(sorted(members))))
    for unit, planned in zip(placement.units, units, strict=True):
        if estimator.unit(planned) is None:
            raise ConfigError(f"{where_}: unit {unit.called}: its models don't fit on its GPUs")
    return tuple(units)
