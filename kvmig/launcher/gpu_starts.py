"""What a start on this host's GPUs waits for and gets: its place, its turn, its flags.

The decisions are `kvmig.launcher.gpu_division`'s; here NVML is read, turns are taken, and what the
first instance has measured is kept for the next ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from kvmig.core.devices import DeviceInventory, find_device
from kvmig.core.errors import ConfigError
from kvmig.launcher.gpu_division import (
    OUTSIDE,
    GpuDivision,
    GpuNeed,
    GpuPlace,
    NoRoom,
    check,
    flags,
    measured,
    measures,
    refusal,
    sized,
)
from kvmig.launcher.launch import LlumletLaunch, PlannedInstance
from kvmig.launcher.unit_memory import InstanceUnits, UnitArena, fit_in_units, without_cache
from kvmig.process.child import say
from kvmig.process.device_turns import DeviceTurn, take_turn
from kvmig.process.nvml import read_devices

log = logging.getLogger(__name__)

READ_S = 10.0
"""Time for NVML's answer, before a start goes on without it."""
RELEASE_S = 10.0
"""Time for the driver to free the memory of an instance that has just ended."""
LOOK_S = 0.2


@dataclass(frozen=True)
class EngineMemory:
    """What is known of an engine's memory before any has started."""

    divides: bool = False
    """Whether it keeps to the flags that divide a GPU's memory."""
    weights: int = 0
    """Bytes of all its workers' weights together; 0: not known."""
    units: InstanceUnits | None = None
    """The units whose KV cache instances share with others; None: each has its own."""

    @property
    def arena(self) -> int:
        """Bytes of addresses of a KV cache that is a unit's; 0: of none."""
        return 0 if self.units is None else self.units.largest


class GpuStarts:
    """The GPUs of this host, for one server's instances."""

    def __init__(
        self,
        division: GpuDivision,
        memory: EngineMemory = EngineMemory(),
        node: str = "",
        read: Callable[[], DeviceInventory] = read_devices,
        turns: Path | None = None,
        at: Mapping[str, str] | None = None,
    ) -> None:
        """division: of the planned instances. turns: the folder of the devices' turns. at: units
        of instances in a placement."""
        self._at = dict(at or {})
        self.division = division
        self.node = node
        self._memory = memory
        self._read = read
        self._turns = turns
        self._planned = frozenset(division.places)
        self._measured: dict[tuple[str, ...], int] = {}
        """Bytes without the KV cache that the first instance with these flags has measured."""

    @property
    def ids(self) -> list[str]:
        """The ids of all GPUs."""
        return list(self.division.devices)

    def check(self, needs: dict[str, GpuNeed]) -> None:
        """Raise NoRoom where an instance can't serve on what it would get."""
        if not self._memory.divides:
            return
        if self._memory.units is None:
            check(self.division, needs)
        else:
            fit_in_units(self.division, needs, self._unit_of)

    def _unit_of(self, name: str) -> UnitArena:
        assert self._memory.units is not None
        return self._memory.units.unit_of(name, self._at.get(name, ""))

    def need(self, workers: int, words: Sequence[str] = (), tree: str = "") -> GpuNeed:
        """What each worker of an instance with these flags needs."""
        known = self._measured.get((tree, *words), 0)
        asked = max(0, self.division.each - OUTSIDE)
        return GpuNeed(self._memory.weights // max(1, workers), known, asked)

    def check_gpus(self, gpus: Sequence[str], workers: int) -> None:
        """Raise ConfigError for GPUs that an instance can't be given."""
        self._named(gpus)
        if gpus and len(gpus) != workers:
            raise ConfigError(f"gpus has {len(gpus)}, must be one for each of {workers} workers")

    def check_room(
        self,
        wanted: Sequence[PlannedInstance],
        gpus: Sequence[str],
        alive: Collection[str],
    ) -> None:
        """Raise NoRoom where instances have no room next to those that are there.

        gpus: of each of `wanted`; none: any.
        """
        self.forget_all_but([*alive, *(one.name for one in wanted)])
        before = dict(self.division.places)
        try:
            for name, workers, words, unit in wanted:
                self._at[name] = unit
                self.place(name, workers, gpus)
                if self._memory.units is not None or not sized(words):
                    self.check({name: self.need(workers, words)})
        finally:
            self.division.places = before

    def place(self, name: str, workers: int, gpus: Sequence[str]) -> GpuPlace:
        """An instance's part of the host's GPUs: as planned, else of what is left. Raises NoRoom.

        gpus: those that it is to have; none: any. Raises ConfigError for those that aren't there.
        """
        if not self.division.devices:
            return GpuPlace()
        gpus = self._named(gpus)
        place = self.division.places.get(name)
        suits = place is not None and len(place.gpus) == workers
        if place is not None and suits and (not gpus or place.gpus == tuple(gpus)):
            return place
        self.division.remove(name)
        return self.division.add(name, workers, gpus)

    def _named(self, gpus: Sequence[str]) -> tuple[str, ...]:
        """The ids of GPUs that may be named by UUID or index, too. Raises ConfigError."""
        found: list[str] = []
        for one in gpus:
            try:
                found.append(find_device(self.division.devices.values(), one).id)
            except KeyError:
                known = ", ".join(self.ids) or "none: there is no GPU"
                raise ConfigError(f"gpus has {one}, allowed are {known}") from None
        return tuple(found)

    def forget_all_but(self, names: Collection[str]) -> None:
        """Free the parts of instances that were not planned, and that are gone."""
        for name in set(self.division.places) - self._planned - set(names):
            self.division.remove(name)

    async def begin(self, launch: LlumletLaunch, workers: int) -> GpuStart:
        """Wait for a turn on its GPUs, and for what it needs of them. Raises StartupError."""
        place = self.place(launch.instance, workers, launch.gpus)
        words, key = launch.engine_argv, (launch.engine_tree, *launch.engine_argv)
        devices = [self.division.devices[gpu] for gpu in place.gpus]
        divides = self._memory.divides

        def measures_itself() -> bool:
            own = measures(words) and not self._memory.arena
            return divides and own and not self._measured.get(key)

        turn = await take_turn(
            {one.uuid for one in devices},
            launch.config.start_timeout_s,
            alone=measures_itself,
            folder=self._turns,
            on_wait=partial(
                say,
                f"instance {launch.instance} waits until another one's start has measured its"
                f" memory on GPU {', '.join(place.gpus)}",
            ),
        )
        try:
            if not (alone := measures_itself()):
                turn.share()
            need = self.need(workers, words, launch.engine_tree)
            total = min((one.total for one in devices), default=0)
            if divides and self._memory.units is not None:
                self.division.resize(launch.instance, without_cache(need))
            elif divides and not sized(words):
                place = await self._room(launch.instance, place, need)
            added = flags(place, total, words, need, self._memory.arena) if divides else []
        except BaseException:
            turn.end()
            raise

        def keep(kv_bytes: int) -> None:
            if alone and kv_bytes and not sized(words):
                self._measured[key] = measured(place, total, kv_bytes)

        return GpuStart(place, added, turn, keep)

    async def _room(self, name: str, place: GpuPlace, need: GpuNeed) -> GpuPlace:
        """Return the part of its place that is free now. Raises NoRoom."""
        deadline = asyncio.get_running_loop().time() + RELEASE_S
        while True:
            try:
                async with asyncio.timeout(READ_S):
                    found = await asyncio.to_thread(self._read)
                now = [found.device(self.division.devices[gpu].uuid) for gpu in place.gpus]
            except (TimeoutError, KeyError) as error:
                log.warning("instance %s starts without a look at its GPUs: %r", name, error)
                return place
            least = min(now, key=lambda one: one.free)
            if least.free >= place.size:
                return place
            if asyncio.get_running_loop().time() >= deadline:
                break
            await asyncio.sleep(LOOK_S)
        for gpu, device in zip(place.gpus, now, strict=True):
            self.division.devices[gpu] = replace(device, id=gpu)
            if device.free < (need.asked or need.least):
                raise NoRoom(refusal(self.division, name, gpu, need, device.free))
        say(
            f"instance {name} gets {least.free} bytes of GPU {', '.join(place.gpus)}, not"
            f" {place.size}: others have the rest by now ({least.whose()})"
        )
        return replace(place, size=least.free)


@dataclass(eq=False)
class GpuStart:
    """One start, until its instance is ready, or gone."""

    place: GpuPlace
    flags: list[str]
    """The engine's flags that are added to the user's."""
    _turn: DeviceTurn
    _keep: Callable[[int], None]

    def serves(self, kv_bytes: int) -> None:
        """Keep what the instance, now ready, has measured. kv_bytes: of a worker."""
        self._keep(kv_bytes)

    def end(self) -> None:
        """Let the next start begin. May be called twice."""
        self._turn.end()
