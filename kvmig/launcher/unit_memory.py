"""What instances in units find of a GPU's memory: decided before anything loads. Pure.

Of a GPU, the KV cache that a unit may still lease is kept for the unit's members, whichever they
are. Instances that start there get what is left for everything else: weights, working memory, CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from kvmig.core.config import UnitConfig
from kvmig.core.devices import in_gib
from kvmig.launcher.gpu_division import OUTSIDE, GpuDivision, GpuNeed, NoRoom, in_bytes


class UnitArena(msgspec.Struct, frozen=True):
    """The KV cache of a unit, as its agent reports it. Bytes."""

    path: str
    """The agent's socket."""
    size: int
    leased: int = 0
    """What its members have by now, which the GPU's used bytes count already."""

    @property
    def kept(self) -> int:
        """What members may take yet."""
        return max(0, self.size - self.leased)


class InstanceUnits(msgspec.Struct, frozen=True):
    """The units of a server's instances."""

    arenas: Mapping[str, UnitArena]
    """Units by path."""
    config: UnitConfig
    """Which instance is in which."""

    def unit_of(self, instance: str, place: str) -> UnitArena:
        """Return the instance's unit. place: its unit in a placement."""
        return self.arenas[self.config.config_for(instance, place).path]

    @property
    def largest(self) -> int:
        """Bytes of the largest unit."""
        return max(one.size for one in self.arenas.values())

    @property
    def kept(self) -> int:
        """What members of all these units may take yet."""
        return sum(one.kept for one in self.arenas.values())


def without_cache(need: GpuNeed) -> int:
    """Bytes of a GPU that an instance takes besides its unit's KV cache."""
    return OUTSIDE + need.weights


def fit_in_units(
    division: GpuDivision, needs: Mapping[str, GpuNeed], unit_of: Callable[[str], UnitArena]
) -> None:
    """Give each of these instances the bytes that it takes besides its unit's KV cache.

    unit_of: of any instance. Raises NoRoom for the first one for which a GPU has too few.
    """
    for name in needs:
        division.resize(name, 0)
    for name, need in needs.items():
        size = without_cache(need)
        for gpu in division.place(name).gpus:
            kept = _kept(map(unit_of, division.having(gpu)))
            free = division.left(gpu) - sum(kept.values())
            if free < size:
                raise NoRoom(_refusal(division, name, gpu, need, max(0, free), kept))
        division.resize(name, size)


def _kept(units: Iterable[UnitArena]) -> dict[str, int]:
    return {one.path: one.kept for one in units}


def _refusal(
    division: GpuDivision, name: str, gpu: str, need: GpuNeed, free: int, kept: Mapping[str, int]
) -> str:
    device = division.devices[gpu]
    has = [f"{in_gib(size)} are kept for KV cache of unit {path}" for path, size in kept.items()]
    others = [one for one in division.having(gpu) if one != name and division.place(one).size]
    has += [f"{one} has {in_gib(division.place(one).size)}" for one in others]
    if whose := device.whose():
        has.append(whose)
    return (
        f"instance {name} doesn't fit on {device}: besides KV cache it needs"
        f" {in_bytes(without_cache(need))}: {in_gib(need.weights)} of weights, {in_gib(OUTSIDE)}"
        f" for CUDA; of {in_gib(device.total)} {in_bytes(free)} are free for it;"
        f" {', '.join(has)}"
    )
