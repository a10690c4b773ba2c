"""The agents of a placement's units: which a model's deployment joins, and how it is started.

Units of a placement that have an arena share KV cache (`kvmig.sharing`). Their agents run as long
as a placement wants them, or a deployment runs that was started for them. A deployment knows the
agents of all units from its start on, so that its instances can move between these. On workers,
units with GPUs are kept as those with an arena: their nodes take the GPUs from Ray.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from msgspec.structs import replace as changed

from kvmig.core.errors import ConfigError
from kvmig.fleet.capacity import CapacityPlan
from kvmig.fleet.device_budget import DeviceBudget
from kvmig.fleet.managed_model import ManagedModel
from kvmig.fleet.settings import FleetSettings
from kvmig.fleet.spec import ModelSpec, text_in
from kvmig.fleet.units import FleetUnits, UnitRecord
from kvmig.fleet.worker_pool import GPU, WorkerPool
from kvmig.placement.file import PlacedUnit, UnitPlacement
from kvmig.placement.starts import own_flags, tenths

SHARES = "--unit-shares"
OF_UNIT = ("--unit", "--unit-guarantee")
"""Flags of which a placement decides."""
NAME = re.compile(r"(?!i\d+$)[A-Za-z0-9][A-Za-z0-9._:,-]{0,63}")
"""Name of a unit; one as i0 is an instance's."""


class PlacedAgents:
    """The agents of the placement that is wanted now."""

    def __init__(
        self, settings: FleetSettings, units: FleetUnits, devices: DeviceBudget, pool: WorkerPool
    ) -> None:
        self._settings = settings
        self._units = units
        self._devices = devices
        self._pool = pool
        self._records: tuple[UnitRecord, ...] = ()

    def take_units(self, units: Iterable[PlacedUnit]) -> None:
        """Take the units of the placement that is wanted, of which some are not kept."""
        self._records = tuple(map(self.record_of, filter(is_kept, units)))
        self._units.placed = frozenset(one.unit for one in self._records)
        self.recall(self._records)

    def record_of(self, unit: PlacedUnit) -> UnitRecord:
        """The record of a unit that is kept."""
        name, arena, at = unit.called, unit.arena_bytes, tuple(unit.gpus)
        if unit.worker:
            gpus = self._pool.gpus_at(self._pool.node_id(unit.worker), at)
            return UnitRecord(name, gpus, arena, unit.worker, at)
        return UnitRecord(name, self._devices.named(tuple(map(str, at))), arena)

    def recall(self, records: Iterable[UnitRecord]) -> None:
        """Know of units that are kept, in which a deployment may have instances."""
        for one in records:
            self._units.recall_placed(one)

    def records(self, units: Sequence[PlacedUnit]) -> tuple[UnitRecord, ...]:
        """The units in which a model's deployment may have instances. units: those in which it has
        some."""
        return self._records if units else ()

    def resources(
        self, given: Mapping[str, float], units: Sequence[PlacedUnit]
    ) -> Mapping[str, float]:
        """What an instance in these units takes of Ray. given: what it takes elsewhere. GPUs of
        units that are kept are the units'."""
        if not any(map(is_kept, units)):
            return given
        return {name: amount for name, amount in given.items() if name != GPU}

    def gpus(
        self, units: Sequence[PlacedUnit], places: Sequence[tuple[str, ...]]
    ) -> list[tuple[str, ...]]:
        """The GPUs of first instances as the launcher names them; none where a unit's agent, or
        Ray, gives them. places: their UUIDs."""
        if any(one.worker and one.gpus and not one.arena_bytes for one in units):
            return list(places)
        return [one for one in map(self._devices.ids, places) if one]

    def spec(self, spec: ModelSpec, units: Sequence[PlacedUnit]) -> ModelSpec:
        """The specification as its deployment starts: without KV cache of its own. units: those of
        its instances."""
        if not units or not units[0].arena_bytes:
            return spec
        return changed(spec, unit=units[0].called, unit_memory=units[0].arena_bytes)

    def words(self, spec: ModelSpec, units: Sequence[PlacedUnit]) -> list[str]:
        """Flags of a deployment that starts. units: those of its instances."""
        known = [one for one in self.records(units) if one.arena]
        own = [f"--unit={one.unit}: {self._settings.unit(one.unit)}" for one in known]
        own += [f"--instance-flags=i{at}: {one}" for at, one in _own_flags(spec, units) if one]
        if known and not text_in(spec.flags, SHARES):
            of_model = [one for unit in units for one in unit.models if one.name == spec.name]
            share = max((one.decode_share for one in of_model), default=1.0)
            own += [f"{SHARES}=100,{tenths(share)}"] if share < 1 else []
        return own

    def in_units(
        self, models: Mapping[str, ManagedModel], placed: Collection[str]
    ) -> dict[str, frozenset[str]]:
        """The models that run in units, or wait for their start there, by unit. placed: those whose
        instances a placement sets."""
        found: dict[str, frozenset[str]] = {}
        for name, model in models.items():
            if model.unit and (model.deployment or model.asks_since is not None):
                units = [model.unit]
            elif name in placed and not model.deployment:
                units = [one.unit for one in self._records]
            else:
                units = [one.unit for one in model.agents]
            for unit in units:
                found[unit] = found.get(unit, frozenset()) | {name}
        return found

    def hold_back(
        self, plan: CapacityPlan, starting: Mapping[str, Sequence[PlacedUnit]]
    ) -> CapacityPlan:
        """The plan in which these models start once all agents answer; on workers those of their
        own units. starting: units by model."""
        refused = dict(plan.refused)
        for name, units in starting.items():
            own = {one.called for one in units}
            needed = [one.unit for one in self._records if not one.worker or one.unit in own]
            waits = next((why for one in needed if (why := self._units.waits(one))), "")
            if waits and name not in plan.refused and name not in plan.never:
                refused[name] = waits
        return replace(plan, refused=refused)


def is_kept(unit: PlacedUnit) -> bool:
    """Whether the fleet keeps something for a unit of a placement: an agent, or a worker's GPUs."""
    return bool(unit.arena_bytes or (unit.worker and unit.gpus))


def _own_flags(spec: ModelSpec, units: Sequence[PlacedUnit]) -> list[tuple[int, str]]:
    """The engine's flags of first instances on workers, by their numbers: one host's start without
    a placement, or in units with an arena."""
    placement = UnitPlacement(list(units))
    return [
        (at, own_flags(placement, spec.name, len(unit.gpus), one.kv_bytes))
        for at, unit in enumerate(units)
        for one in unit.models
        if unit.worker and one.name == spec.name
    ]


def check_agent(
    unit: PlacedUnit,
    gpus: tuple[str, ...],
    running: UnitRecord | None,
    of_specs: frozenset[str],
) -> None:
    """Whether the fleet can keep a unit. gpus: the unit's, as UUIDs. running: of the one that is
    kept now; None: none is. of_specs: units that models have by their specifications. Raises
    ConfigError."""
    where = f"placement: unit {unit.called}"
    if len(unit.gpus) > 1 and unit.arena_bytes:
        raise ConfigError(
            f"{where}: gpus has {len(unit.gpus)}, must have 1 at most with arena_bytes: an instance"
            " with several workers shares no KV cache"
        )
    if NAME.fullmatch(unit.called) is None:
        raise ConfigError(
            f"{where[:100]}: name is {unit.called!r:.100}, must be letters, digits and . _ : , -,"
            " at most 64, the first a letter or a digit, and not be as an instance's, i0"
        )
    if unit.called in of_specs:
        raise ConfigError(
            f"{where}: name is {unit.called!r:.100}, which models have as unit in their"
            " specifications"
        )
    if running is None:
        return
    if running.worker != unit.worker:
        raise ConfigError(
            f"{where}: worker is {unit.worker!r:.100}, must be {running.worker} as long as models"
            " of it run there"
        )
    if running.arena != unit.arena_bytes:
        raise ConfigError(
            f"{where}: arena_bytes is {unit.arena_bytes}, must be {running.arena} as long as its"
            " agent runs"
        )
    if running.worker and running.at != tuple(unit.gpus):
        listed = ", ".join(map(str, running.at))
        raise ConfigError(
            f"{where}: gpus is {unit.gpus}, must be [{listed}] as long as models of it run there"
        )
    if not running.worker and running.gpus != gpus:  # its instances would stay where they are
        raise ConfigError(
            f"{where}: gpus is {', '.join(gpus) or 'empty'}, must be"
            f" {', '.join(running.gpus) or 'empty'} as long as its agent runs"
        )


def check_member(model: ManagedModel, units: Sequence[str], *, elastic: bool) -> None:
    """Whether a model can be in these units, which are kept. elastic: whether they have agents.
    Raises ConfigError."""
    name, spec = model.wanted.name, model.wanted.spec
    if elastic and spec.engine != "vllm":
        raise ConfigError(
            f"placement: model {name}: engine is {spec.engine}, must be vllm: units have"
            " arena_bytes"
        )
    for word in spec.flags if elastic else ():
        if (flag := word.partition("=")[0]) in OF_UNIT:
            raise ConfigError(
                f"placement: model {name}: flags has {flag}, must be without: units have"
                " arena_bytes"
            )
    known = {one.unit for one in model.agents}
    if model.deployment and (others := [one for one in units if one not in known]):
        what = "for the agent of" if elastic else "on GPUs of"
        raise ConfigError(
            f"placement: model {name} was not started {what} unit {others[0]}, must start as a"
            f" member: kvmig model off {name}, set the placement, kvmig model on {name}"
        )
