"""The agents of a placement's units: which a model's deployment joins, and how it is started.

Units of a placement that have an arena share KV cache (`kvmig.sharing`). Their agents run as long
as a placement wants them, or a deployment runs that was started for them. A deployment knows the
agents of all units from its start on, so that its instances can move between these.
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
from kvmig.placement.file import PlacedUnit
from kvmig.placement.starts import tenths

SHARES = "--unit-shares"
OF_UNIT = ("--unit", "--unit-guarantee")
"""Flags of which a placement decides."""
NAME = re.compile(r"(?!i\d+$)[A-Za-z0-9][A-Za-z0-9._:,-]{0,63}")
"""Name of a unit; one as i0 is an instance's."""


class PlacedAgents:
    """The agents of the placement that is wanted now."""

    def __init__(self, settings: FleetSettings, units: FleetUnits, devices: DeviceBudget) -> None:
        self._settings = settings
        self._units = units
        self._devices = devices
        self._records: tuple[UnitRecord, ...] = ()

    def take_units(self, units: Iterable[PlacedUnit]) -> None:
        """Take the units of the placement that is wanted; those without an arena have no agents."""
        self._records = tuple(
            UnitRecord(one.called, self._devices.named(tuple(map(str, one.gpus))), one.arena_bytes)
            for one in units
            if one.arena_bytes
        )
        self._units.placed = frozenset(one.unit for one in self._records)
        self.recall(self._records)

    def recall(self, records: Iterable[UnitRecord]) -> None:
        """Know of agents of which a deployment may be a member."""
        for one in records:
            self._units.recall(one.unit, one.gpus, one.arena)

    def records(self, units: Sequence[PlacedUnit]) -> tuple[UnitRecord, ...]:
        """The agents that a model's deployment knows. units: those of its instances."""
        return self._records if units else ()

    def spec(self, spec: ModelSpec, units: Sequence[PlacedUnit]) -> ModelSpec:
        """The specification as its deployment starts: without KV cache of its own. units: those of
        its instances."""
        known = self.records(units)
        if not known:
            return spec
        return changed(spec, unit=units[0].called, unit_memory=units[0].arena_bytes)

    def words(self, spec: ModelSpec, units: Sequence[PlacedUnit]) -> list[str]:
        """Flags of a deployment that starts. units: those of its instances."""
        known = self.records(units)
        own = [f"--unit={one.unit}: {self._settings.unit(one.unit)}" for one in known]
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

    def hold_back(self, plan: CapacityPlan, starting: Iterable[str]) -> CapacityPlan:
        """The plan in which these models start once all agents answer."""
        waits = next((why for one in self._records if (why := self._units.waits(one.unit))), "")
        names = set(starting) - plan.refused.keys() - plan.never.keys()
        if not waits or not names:
            return plan
        return replace(plan, refused={**plan.refused, **dict.fromkeys(names, waits)})


def check_agent(
    unit: PlacedUnit,
    gpus: tuple[str, ...],
    running: UnitRecord | None,
    of_specs: frozenset[str],
) -> None:
    """Whether the fleet can start an agent for a unit. gpus: the unit's, as UUIDs. running: of the
    agent that runs; None: none does. of_specs: units that models have by their specifications.
    Raises ConfigError."""
    where = f"placement: unit {unit.called}"
    if len(unit.gpus) > 1:
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
    if running.arena != unit.arena_bytes:
        raise ConfigError(
            f"{where}: arena_bytes is {unit.arena_bytes}, must be {running.arena} as long as its"
            " agent runs"
        )
    if running.gpus != gpus:  # its instances would stay where they are
        raise ConfigError(
            f"{where}: gpus is {', '.join(gpus) or 'empty'}, must be"
            f" {', '.join(running.gpus) or 'empty'} as long as its agent runs"
        )


def check_member(model: ManagedModel, units: Sequence[str]) -> None:
    """Whether a model can be a member of these units' agents. Raises ConfigError."""
    name, spec = model.wanted.name, model.wanted.spec
    if spec.engine != "vllm":
        raise ConfigError(
            f"placement: model {name}: engine is {spec.engine}, must be vllm: units have"
            " arena_bytes"
        )
    for word in spec.flags:
        if (flag := word.partition("=")[0]) in OF_UNIT:
            raise ConfigError(
                f"placement: model {name}: flags has {flag}, must be without: units have"
                " arena_bytes"
            )
    known = {one.unit for one in model.agents}
    if model.deployment and (others := [one for one in units if one not in known]):
        raise ConfigError(
            f"placement: model {name} was not started for the agent of unit {others[0]}, must start"
            f" as a member: kvmig model off {name}, set the placement, kvmig model on {name}"
        )
