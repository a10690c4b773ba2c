"""The places of models while the workers of their units are lost. Pure.

A model that has lost all of its places gets another one: in a unit of as many GPUs that has room
for it next to its own models. The others serve on with the places that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from msgspec.structs import replace

from kvmig.core.devices import in_gib
from kvmig.placement.file import PlacedModel, PlacedUnit, UnitPlacement

Refuses = Callable[[str, str], str]
"""Why a worker can't have a model; empty: it can. Of the model's name and the worker's."""


class StandIns(NamedTuple):
    """What is wanted until the workers are back."""

    placement: UnitPlacement
    """The same units, those of lost workers without models."""
    moved: dict[str, str]
    """The units that models are in whose places are all lost, by model."""
    waiting: dict[str, str]
    """Why such models have no other unit, by model."""


def stand_ins(placement: UnitPlacement, lost: Collection[str], refuses: Refuses) -> StandIns:
    """The placement without these workers."""
    units = [replace(one, models=[]) if one.worker in lost else one for one in placement.units]
    there = {one.name for unit in units for one in unit.models}
    moved, waiting = dict[str, str](), dict[str, str]()
    for name, one in placement.models().items():
        if name in there:
            continue
        size = next(it.size for it in placement.units if one in it.models)
        others = [it for it in units if it.worker not in lost and it.size == size]
        fitting = [it for it in others if not refuses(name, it.worker)]
        best = max(fitting, key=lambda unit: _room(unit, one), default=None)
        if best is None:
            waiting[name] = _why_none(name, others, size, refuses)
        elif (left := _room(best, one)) < 0:
            waiting[name] = (
                f"no other unit has room for it: unit {best.called} has {in_gib(-left)} too few"
            )
        else:
            at = units.index(best)
            units[at] = replace(best, models=[*best.models, _shrunk(best, one)])
            moved[name] = best.called
    return StandIns(replace(placement, units=units), moved, waiting)


def stand_ins_to_text(found: StandIns) -> str:
    """The models that had to go elsewhere, and those that wait, for people; empty: none."""
    said = [f"model {name} is in unit {unit} until then" for name, unit in found.moved.items()]
    said += [f"model {name} waits, {why}" for name, why in found.waiting.items()]
    return "; ".join(said)


def _room(unit: PlacedUnit, one: PlacedModel) -> int:
    """Bytes that are left once the model is there, too; negative: that are missing."""
    taken = sum(it.held_bytes + it.kv_bytes for it in unit.models)
    left = unit.memory_bytes - taken - one.held_bytes
    if not unit.arena_bytes:
        return left - one.kv_bytes
    cache = unit.arena_bytes - sum(it.kv_bytes for it in unit.models)
    return min(left, cache) - max(1, one.floor_bytes)


def _shrunk(unit: PlacedUnit, one: PlacedModel) -> PlacedModel:
    """The model with the KV cache that is left for it. Without an agent it has what it always
    has."""
    if not unit.arena_bytes:
        return one
    return replace(one, kv_bytes=min(one.kv_bytes, _room(unit, one) + max(1, one.floor_bytes)))


def _why_none(name: str, others: list[PlacedUnit], size: int, refuses: Refuses) -> str:
    if not others:
        return f"no other unit has {size} GPUs" if size > 1 else "there is no other unit"
    whys = {one.worker: refuses(name, one.worker) for one in others}
    return "; ".join(f"worker {worker} can't have it: {why}" for worker, why in whys.items())
