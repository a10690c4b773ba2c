"""The GPUs that a model's instances get, and why they get none. Pure; all sizes are bytes.

An instance has as many GPUs as it has workers, and the same number of bytes on each. Its GPUs must
reach each other's memory. Which of them it gets is decided in `kvmig.fleet.place_choice`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvmig.core.devices import in_gib

Strategy = Literal["spread", "pack"]
"""Whether instances prefer the place with the fewest instances, or the fullest one with room."""
Places = tuple[tuple[str, ...], ...]
"""The GPUs of each instance, in the order of its workers."""


def unit_holder(name: str) -> str:
    """What claims the KV cache of a unit; no model has such a name."""
    return f"unit {name}"


def is_unit(holder: str) -> bool:
    """Whether a claim is of a unit, not of a model."""
    return holder.startswith("unit ")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of one GPU, or of one part of a GPU that is split."""

    id: str
    """The UUID."""
    title: str
    """What people call it."""
    total: int
    others: int = 0
    """Bytes of processes that are not the fleet's."""
    whose: str = ""
    """The holders of these bytes."""
    claims: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each model of the fleet, and of each unit's KV cache (`unit_holder`)."""
    peers: frozenset[str] = frozenset()
    """GPUs that it reaches."""

    @property
    def free(self) -> int:
        """Bytes that are neither taken nor claimed."""
        return max(0, self.total - self.others - sum(self.claims.values()))


@dataclass(frozen=True, slots=True)
class DeviceNeed:
    """What each instance of a model wants of GPUs."""

    each: int
    """Bytes of each of its GPUs."""
    devices: int = 1
    """How many GPUs it has."""
    only: frozenset[str] = frozenset()
    """The GPUs that it may have; empty: any."""
    at: Places = ()
    """The GPUs of each instance, where a placement says them; empty: any."""

    def allows(self, gpu: str) -> bool:
        """Whether it may have that GPU."""
        return not self.only or gpu in self.only


Free = Mapping[str, int]
"""Free bytes by GPU."""


def groups_of(devices: Iterable[DeviceMemory]) -> list[tuple[str, ...]]:
    """The GPUs in groups, in each of which all reach each other."""
    groups: list[list[DeviceMemory]] = []
    for one in devices:
        for group in groups:
            if all(other.id in one.peers and one.id in other.peers for other in group):
                group.append(one)
                break
        else:
            groups.append([one])
    return [tuple(one.id for one in group) for group in groups]


def most_instances(free: Free, need: DeviceNeed, groups: Sequence[Sequence[str]], most: int) -> int:
    """How many instances find room together, up to `most`."""
    found = 0
    for group in _groups_for(need, free, groups):
        slots = [_slots(free[one], need, most) for one in group]
        count = 0
        while count < most and sum(min(one, count + 1) for one in slots) >= (
            (count + 1) * need.devices
        ):
            count += 1
        found += count
    return min(found, most)


def best_choices(
    free: Free,
    need: DeviceNeed,
    groups: Sequence[Sequence[str]],
    preference: Callable[[str], tuple[float, int]],
) -> list[tuple[str, ...]]:
    """The GPUs for one instance that are preferred in each group with enough of them. preference:
    less is better; what comes first in `free` wins among equal ones."""
    found: list[tuple[str, ...]] = []
    for group in _groups_for(need, free, groups):
        fitting = [one for one in group if free[one] >= need.each]
        if len(fitting) >= need.devices:
            if need.devices == 1:
                found.append((min(fitting, key=preference),))
            else:
                chosen = sorted(fitting, key=preference)[: need.devices]
                found.append(tuple(one for one in free if one in chosen))
    return found


def safest_choices(
    free: Free, need: DeviceNeed, groups: Sequence[Sequence[str]], instances: int
) -> list[tuple[str, ...]]:
    """The same with the GPUs that further instances miss least: those that have room for most of
    them. After it a group holds one less. instances: in all."""
    return best_choices(free, need, groups, lambda one: (-_slots(free[one], need, instances), 0))


def _groups_for(
    need: DeviceNeed, free: Free, groups: Sequence[Sequence[str]]
) -> list[Sequence[str]]:
    """The groups, with the GPUs that it may have; one GPU need not reach another."""
    within: Sequence[Sequence[str]] = groups if need.devices > 1 else [tuple(free)]
    if not need.only:
        return list(within)
    return [[one for one in group if one in need.only] for group in within]


def _slots(free: int, need: DeviceNeed, most: int) -> int:
    """Instances for which one GPU has room, up to `most`."""
    if free < need.each:
        return 0
    return most if not need.each else min(most, free // need.each)


# -- reasons


def too_large(who: str, need: DeviceNeed, devices: Sequence[DeviceMemory]) -> str:
    """Why it could not even start on unused GPUs; empty: it could. who: such as "model NAME"."""
    empty = {one.id: one.total for one in devices}
    if most_instances(empty, need, groups_of(devices), 1):
        return ""
    return f"{who} needs {wanted(need)}; {'; '.join(_sizes(need, devices))}"


def wanted(need: DeviceNeed) -> str:
    """What an instance needs, in words."""
    size = f"{need.each} bytes ({in_gib(need.each)})"
    if need.devices == 1:
        return f"{size} of a GPU"
    return f"{size} of each of {need.devices} GPUs that reach each other"


def _sizes(need: DeviceNeed, devices: Sequence[DeviceMemory]) -> Iterator[str]:
    if not devices:
        yield "there is no GPU"
    for one in devices:
        if not need.allows(one.id):
            yield f"{one.title} is not one of its gpus"
        elif one.total < need.each:
            yield f"{one.title} has {one.total} bytes, {need.each - one.total} too few"
        else:
            yield f"{one.title} has {one.total} bytes"


def reasons(need: DeviceNeed, devices: Sequence[DeviceMemory]) -> list[str]:
    """List for each GPU what an instance needs there, what is free, and who has the rest."""
    found = []
    for one in devices:
        if not need.allows(one.id):
            found.append(f"{one.title}: not one of its gpus")
            continue
        found.append(
            f"{one.title}: needs {need.each} bytes, {one.free} of {one.total} are"
            f" free{holders_of(one)}"
        )
    return found


def holders_of(device: DeviceMemory) -> str:
    """The models and processes that have a GPU's memory, in brackets; empty: none has any."""
    holders = [
        f"{holder if is_unit(holder) else f'model {holder}'} has {in_gib(size)}"
        for holder, size in device.claims.items()
        if size
    ]
    if device.others:
        holders.append(device.whose or f"other processes have {in_gib(device.others)}")
    return f" ({', '.join(holders)})" if holders else ""


def no_room(need: DeviceNeed, free: Free, groups: Sequence[Sequence[str]]) -> str:
    """Why an instance has no place now; names no other model, for clients read it."""
    allowed = [size for one, size in free.items() if need.allows(one)]
    best = max(allowed, default=0)
    size = f"{need.each / (1 << 30):.1f} GiB"
    if need.devices == 1:
        return f"no room: it needs {size} of a GPU's memory, {best / (1 << 30):.1f} GiB is free"
    enough = max(
        (sum(free[one] >= need.each for one in group) for group in _groups_for(need, free, groups)),
        default=0,
    )
    return (
        f"no room: it needs {size} of the memory of each of {need.devices} GPUs, {enough} GPUs"
        " that reach each other have that"
    )
