"""What runs, as the deployments report it, compared with a placement. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from kvmig.core.api_records import InstanceRow, RequestRow, UnitMemory
from kvmig.core.errors import ConfigError
from kvmig.placement.file import PlacedModel, UnitPlacement
from kvmig.placement.moves import PlacedLease, PlanStep, Slot

NO_WORKERS: Mapping[str, str] = MappingProxyType({})
MOST_LOOKS = 10_000
"""Most looks for units of instances that report none."""


Rows = Mapping[str, Sequence[InstanceRow]]
"""Instances by deployment, which is named as its model in the placement."""


class ObservedPlacement(NamedTuple):
    """Instances that serve, by their places."""

    leases: dict[Slot, PlacedLease]
    instances: dict[Slot, str]
    failed: list[tuple[str, str]]
    """Deployment and instance of those that were given up, and only take a name."""
    unsettled: str
    """Why nothing can be planned yet; empty: something can."""
    requests: dict[Slot, int]
    """Requests that run or wait on each instance."""
    shared: dict[Slot, UnitMemory]
    """What each instance reports of a unit whose KV cache it shares."""

    def sharing(self, model: str) -> list[UnitMemory]:
        """The same of one model's instances."""
        return [memory for slot, memory in self.shared.items() if slot[0] == model]


def check(
    placement: UnitPlacement, deployments: Sequence[str], where: str, nodes: Collection[int] = ()
) -> None:
    """Whether a placement is one of these deployments by hand. nodes: those of which the id is
    known. Raises ConfigError."""
    models = placement.models()
    for name in models:
        if name not in deployments:
            raise ConfigError(
                f"{where}: model is {name!r:.100}, must be of {', '.join(sorted(deployments))} "
                "(--deployment)"
            )
    for name in deployments:
        if name not in models:
            raise ConfigError(f"{where}: deployment {name} has no place, must have one at least")
    for unit in placement.units:
        if unit.worker:  # its name says where it is
            continue
        if unit.gpus and unit.node not in nodes and (unit.node or nodes):
            known = ", ".join(map(str, sorted(nodes))) or "0: instances get GPUs of one host"
            raise ConfigError(
                f"{where}: unit {unit.called}: node is {unit.node}, must be {known} (--node)"
            )
    for unit in () if placement.elastic else placement.units:
        for one in () if unit.gpus else unit.models:
            if one.kv_bytes != models[one.name].kv_bytes:
                raise ConfigError(
                    f"{where}: model {one.name}: kv_bytes is {one.kv_bytes} in unit {unit.called}, "
                    f"must be {models[one.name].kv_bytes}, as before: where units have no agents "
                    "(arena_bytes) and no GPUs, instances have one size"
                )


def adopted(
    placement: UnitPlacement, rows: Rows, workers: Mapping[str, str] = NO_WORKERS
) -> dict[str, dict[str, str]]:
    """Units for instances that report none, by deployment and instance: where
    the placement has the model, as far as there is room for all.

    The GPUs of an instance, by index, are those of its unit; only a host's CPUs can be meant by
    several units. workers: ids of the Ray nodes of units' workers, by name: an instance is in a
    unit of its node. Raises ConfigError where no unit is left.
    """
    there = [(name, row) for name, listed in rows.items() for row in listed
             if row.state != "failed"]  # fmt: skip
    homeless = [(name, row) for name, row in there if not row.unit]
    size = {name: one.held_bytes + one.kv_bytes for name, one in placement.models().items()}
    room = Counter({one.called: one.memory_bytes for one in placement.units})
    for name, row in there:
        room[row.unit] -= size[name]
    nodes = {one.called: workers.get(one.worker, "") for one in placement.units}
    places = [(name, row.gpus, row.node) for name, row in homeless]
    search = _UnitSearch(placement, places, size, nodes)
    units = search.units_from(0, frozenset((name, row.unit) for name, row in there), room)
    if units is None:
        names = {node: name for name, node in workers.items()}
        listed = ", ".join(
            f"{name} {row.id}{_on(row.gpus, names.get(row.node, ''))}" for name, row in homeless
        )
        raise ConfigError(
            f"the units of {listed} are not known, and the units without GPUs, or on the same ones,"
            " have no room for all"
        )
    found: dict[str, dict[str, str]] = {name: {} for name in rows}
    for (name, row), unit in zip(homeless, units, strict=True):
        found[name][row.id] = unit
    return found


def _on(gpus: Sequence[str], worker: str) -> str:
    where = [f"worker {worker}"] if worker else []
    where += [f"GPU {','.join(gpus)}"] if gpus else []
    return f" ({', '.join(where)})" if where else ""


class _UnitSearch:
    """Finds a unit for each of some instances, by backtracking."""

    def __init__(
        self,
        placement: UnitPlacement,
        homeless: Sequence[tuple[str, Sequence[str], str]],
        size: Mapping[str, int],
        nodes: Mapping[str, str],
    ) -> None:
        """homeless: the instances' models, GPUs and nodes. size: bytes of an instance, by model.
        nodes: ids of units' nodes, by unit; empty: it has none."""
        self._nodes = nodes
        self._units = placement.units
        self._homeless = homeless
        self._size = size
        self._looks = 0

    def units_from(
        self, at: int, taken: frozenset[Slot], room: Mapping[str, int]
    ) -> list[str] | None:
        """Units for the instances from the at-th on; None: there is no way to place them all.

        taken: where models have an instance. room: bytes that are left, by unit.
        """
        if at == len(self._homeless):
            return []
        name, gpus, node = self._homeless[at]
        for unit in self._candidates(name, gpus, node):
            if (name, unit) in taken or room[unit] < self._size[name] or self._tired():
                continue
            left = {**room, unit: room[unit] - self._size[name]}
            rest = self.units_from(at + 1, taken | {(name, unit)}, left)
            if rest is not None:
                return [unit, *rest]
        return None

    def _candidates(self, name: str, gpus: Sequence[str], node: str) -> list[str]:
        """Units by name, first those for which the placement has the model."""
        fitting = [
            one
            for one in self._units
            if not one.gpus or set(map(str, one.gpus)) == set(gpus)
            if self._nodes[one.called] in ("", node)
        ]
        fitting.sort(key=lambda unit: all(one.name != name for one in unit.models))
        return [one.called for one in fitting]

    def _tired(self) -> bool:
        """Whether it has looked often enough."""
        tired = self._looks > MOST_LOOKS
        self._looks += 1
        return tired


def observed(placement: UnitPlacement, rows: Rows) -> ObservedPlacement:
    """The place of each instance. Raises ConfigError for one whose place isn't of the placement."""
    units = [one.called for one in placement.units]
    usual = placement.models()
    models = {(one.name, unit.called): one for unit in placement.units for one in unit.models}
    found = ObservedPlacement({}, {}, [], "", {}, {})
    unsettled: list[str] = []
    for name, listed in rows.items():
        for row in listed:
            if row.state == "failed":
                found.failed.append((name, row.id))
                continue
            slot = (name, row.unit)
            if row.unit not in units:
                raise ConfigError(
                    f"deployment {name}: unit of instance {row.id} is {row.unit!r:.100}, must be "
                    f"of {', '.join(units)} (--instance-unit, or unit of POST /kvmig/v1/instances)"
                )
            if slot in found.instances:
                raise ConfigError(
                    f"deployment {name}: instances {found.instances[slot]} and {row.id} are both "
                    f"in unit {row.unit}, delete one of them"
                )
            untold = placement.elastic and row.shared is None and row.state == "serving"
            if untold and row.blocks_total:
                raise ConfigError(
                    f"deployment {name}: instance {row.id} shares no KV cache (--unit), but unit "
                    f"{row.unit} has arena_bytes"
                )
            found.instances[slot] = row.id
            found.requests[slot] = row.running + row.waiting
            if row.shared is not None:
                found.shared[slot] = row.shared
            placed = models.get(slot, usual[name])
            found.leases[slot] = _lease(row, placed, elastic=placement.elastic)
            if row.state != "serving":
                why = f" ({row.detail})" if row.detail else ""
                unsettled.append(f"instance {row.id} of {name} is {row.state}{why}")
            elif untold:
                unsettled.append(f"instance {row.id} of {name} has not reported its unit")
    return found._replace(unsettled="; ".join(unsettled))


def _lease(row: InstanceRow, model: PlacedModel, *, elastic: bool) -> PlacedLease:
    least = row.running + row.waiting  # never 0 while somebody is there
    if elastic and row.shared is not None:
        used = max(row.shared.used_bytes, least) if least else 0  # vLLM's null block is nobody's
        return PlacedLease(row.shared.guarantee_bytes, used)
    quota = model.floor_bytes if elastic else model.kv_bytes
    used = math.ceil(quota * row.blocks_used / max(1, row.blocks_total))
    return PlacedLease(quota, min(max(used, least), quota))


def leaving(requests: Sequence[RequestRow], instance: str, used: int, size: int) -> list[str]:
    """Requests that hold `size` of the `used` bytes of an instance, or just more, the largest
    first; all that can be moved, where that is less."""
    here = [one for one in requests if one.instance == instance and one.state == "running"]
    blocks = sum(one.blocks for one in here)
    chosen: list[str] = []
    for one in sorted(here, key=lambda one: (-one.blocks, one.id)):
        if size > 0 and one.blocks and not one.unmovable:
            chosen.append(one.id)
            size -= used * one.blocks // blocks
    return chosen


def unfinished(steps: Sequence[PlanStep], gone: Mapping[Slot, str], rows: Rows) -> Iterator[str]:
    """Starts and ends of a wave that aren't over, in words; other orders are over once they are
    answered. gone: ids of instances that shall leave."""
    for step in steps:
        listed = rows.get(step.model, ())
        serves = any(row.unit == step.unit and row.state == "serving" for row in listed)
        ends = step.kind in ("drain", "gap")
        if step.kind == "start" and not serves:
            yield f"{step.model} starts in {step.unit}"
        if ends and any(row.id == gone[step.model, step.unit] for row in listed):
            yield f"{step.model} leaves {step.unit}"
