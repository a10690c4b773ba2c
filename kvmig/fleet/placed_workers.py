"""Which GPUs of workers units of a placement can have, and which placements on workers can be
planned again. Pure.

The unit's worker takes them from Ray (`kvmig.launcher.unit_gpus`), before the unit's models start.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvmig.core.devices import DeviceInventory
from kvmig.core.errors import ConfigError
from kvmig.placement.file import PlacedUnit, UnitPlacement
from kvmig.placement.stand_ins import Refuses


def check_on_worker(
    unit: PlacedUnit, inventory: DeviceInventory, uses: Mapping[str, float]
) -> None:
    """Whether a unit can have its GPUs on its worker. inventory: the worker's. uses: GPUs that an
    instance takes, by model of the unit. Raises ConfigError."""
    where = f"placement: unit {unit.called}"
    there = {one.index for one in inventory.devices}
    listed = ", ".join(map(str, sorted(there))) or "none, as none of its GPUs is known now"
    for gpu in unit.gpus:
        if gpu not in there:
            raise ConfigError(
                f"{where}: gpus has {gpu}, allowed are those of worker {unit.worker}: {listed}"
            )
    for name, amount in uses.items():
        if unit.gpus and not amount:
            raise ConfigError(
                f"{where}: gpus is {unit.gpus}, must be left out: model {name} uses no GPU by"
                " --ray-resources"
            )
        if unit.gpus and amount != int(amount):
            raise ConfigError(
                f"{where}: model {name} has {amount:g} GPU in --ray-resources, must be whole: its"
                " units have whole GPUs"
            )
        if unit.arena_bytes and amount and not unit.gpus:
            raise ConfigError(
                f"{where}: gpus is empty, must have one of those of worker {unit.worker}, {listed}:"
                f" model {name} uses a GPU, on which its KV cache is"
            )


def check_gpus_alike(placement: UnitPlacement) -> None:
    """Whether all units with models have GPUs, or none has. Raises ConfigError."""
    units = [one for one in placement.units if one.models]
    with_gpus = [one.called for one in units if one.gpus]
    without = [one.called for one in units if not one.gpus]
    if with_gpus and without:
        raise ConfigError(
            f"placement: unit {without[0]}: gpus is empty, must have GPUs as unit {with_gpus[0]}:"
            " on workers all units with models have GPUs, or none has"
        )


def check_replan(
    placement: UnitPlacement, refuses: Refuses, inventories: Mapping[str, DeviceInventory]
) -> None:
    """Whether a placement on workers can be planned again: each model may come to each unit, and
    its costs are of one kind of GPU. refuses: why a worker can't have a model. inventories: GPUs by
    worker. Raises ConfigError."""
    for name in placement.models():
        for unit in placement.units:
            if why := refuses(name, unit.worker):
                raise ConfigError(
                    f"replan is given, must be left out: model {name} may come to each unit, but"
                    f" worker {unit.worker} of unit {unit.called} can't have it: {why}"
                )
    kinds: dict[str, str] = {}
    for unit in placement.units:
        for one in inventories[unit.worker].devices:
            if one.index in unit.gpus:
                kinds.setdefault(one.name, unit.called)
    if len(kinds) > 1:
        listed = ", ".join(f"{kind} (unit {unit})" for kind, unit in kinds.items())
        raise ConfigError(
            f"replan is given, must be left out: costs are of one kind of GPU, and the units have"
            f" {listed}"
        )
