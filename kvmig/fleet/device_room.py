"""The GPUs that a model's instances get, and why they get none. Pure; all sizes are bytes.

An instance has as many GPUs as it has workers, and the same number of bytes on each. Its GPUs must
reach each other's memory. `assign` finds places whenever there are some: what is refused has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvmig.core.devices import in_gib

Strategy = Literal["spread", "pack"]
"""Whether instances prefer the emptiest GPU, or the fullest one that has room."""
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


def assign(
    free: Free,
    need: DeviceNeed,
    instances: int,
    groups: Sequence[Sequence[str]],
    strategy: Strategy = "spread",
) -> Places | None:
    """Places for these instances; None: there are none for all of them together."""
    if need.at:
        wanted_on = Counter(gpu for place in need.at for gpu in place)
        fits = all(free.get(gpu, 0) >= count * need.each for gpu, count in wanted_on.items())
        return need.at if fits else None
    if most_instances(free, need, groups, instances) < instances:
        return None
    left, places = dict(free), list[tuple[str, ...]]()
    for rest in reversed(range(instances)):
        for chosen in _choices(left, need, groups, strategy, places, rest + 1):
            after = {one: left[one] - need.each * (one in chosen) for one in left}
            if most_instances(after, need, groups, rest) == rest:
                left = after
                places.append(chosen)
                break
        else:  # the last choice of one group always holds
            raise AssertionError("there was room for all instances")
    return tuple(places)


def _choices(
    free: Free,
    need: DeviceNeed,
    groups: Sequence[Sequence[str]],
    strategy: Strategy,
    places: Sequence[tuple[str, ...]],
    instances: int,
) -> Iterator[tuple[str, ...]]:
    """GPUs for one of the remaining instances, the preferred ones first. places: of its siblings.

    The second half takes what the others miss least: GPUs that have room for most of them.
    """
    fitting = [
        [one for one in group if free[one] >= need.each]
        for group in _groups_for(need, free, groups)
    ]
    fitting = [group for group in fitting if len(group) >= need.devices]
    beside = [one for place in places for one in place]

    def preference(one: str) -> tuple[int, int]:
        if strategy == "pack":
            return 0, free[one]
        return beside.count(one), -free[one]

    preferred = [sorted(group, key=preference)[: need.devices] for group in fitting]
    preferred.sort(key=lambda chosen: [preference(one) for one in chosen])
    safest = [
        sorted(group, key=lambda one: -_slots(free[one], need, instances))[: need.devices]
        for group in fitting
    ]
    for chosen in (*preferred, *safest):
        yield tuple(one for one in free if one in chosen)


def _groups_for(need: DeviceNeed, free: Free, groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """The groups, with the GPUs that it may have; one GPU need not reach another."""
    within: Sequence[Sequence[str]] = groups if need.devices > 1 else [tuple(free)]
    return [[one for one in group if not need.only or one in need.only] for group in within]


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
        if need.only and one.id not in need.only:
            yield f"{one.title} is not one of its gpus"
        elif one.total < need.each:
            yield f"{one.title} has {one.total} bytes, {need.each - one.total} too few"
        else:
            yield f"{one.title} has {one.total} bytes"


def reasons(need: DeviceNeed, devices: Sequence[DeviceMemory]) -> list[str]:
    """List for each GPU what an instance needs there, what is free, and who has the rest."""
    found = []
    for one in devices:
        if need.only and one.id not in need.only:
            found.append(f"{one.title}: not one of its gpus")
            continue
        holders = [
            f"{holder if is_unit(holder) else f'model {holder}'} has {in_gib(size)}"
            for holder, size in one.claims.items()
            if size
        ]
        if one.others:
            holders.append(one.whose or f"other processes have {in_gib(one.others)}")
        taken = f" ({', '.join(holders)})" if holders else ""
        found.append(
            f"{one.title}: needs {need.each} bytes, {one.free} of {one.total} are free{taken}"
        )
    return found


def no_room(need: DeviceNeed, free: Free, groups: Sequence[Sequence[str]]) -> str:
    """Why an instance has no place now; names no other model, for clients read it."""
    allowed = [size for one, size in free.items() if not need.only or one in need.only]
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
