"""The GPUs of a node's units, taken from Ray so that no other program gets them. Pure.

Ray gives an actor any GPU of its node that is free. So one GPU after the other is taken, until each
unit has those that it may have; the others go back. All units of a node take them together: what
Ray gives for one of them may be another one's.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

from kvmig.core.clock import TimeSource
from kvmig.core.errors import StartupError

PATIENCE_S = 30.0
"""Longest wait until Ray gives another GPU; those that are not wanted go back then."""
AGAIN_S = 30.0
"""Pause before the GPUs are asked for again."""

log = logging.getLogger(__name__)


class GpuHolder(Protocol):
    """One GPU that Ray was asked for."""

    def given(self) -> str:
        """The GPU's UUID; empty: Ray has not given one yet. Keeps it for another while. Raises
        StartupError: it is gone."""

    def release(self) -> None:
        """Give the GPU back to Ray."""


class HolderSource(Protocol):
    """Takes GPUs of one node from Ray."""

    def find_holders(self, fleet: str) -> dict[int, GpuHolder]:
        """The holders of a fleet that were there before, by number. Raises StartupError."""

    def take_gpu(self, fleet: str, number: int) -> GpuHolder:
        """Ask Ray for one more. Raises StartupError."""


class GpuWish(NamedTuple):
    """What a unit wants."""

    allowed: tuple[str, ...]
    """UUIDs of GPUs that it may have."""
    number: int = 1
    """How many of these."""


class UnitGpu(NamedTuple):
    """The state of a unit's GPUs."""

    uuids: tuple[str, ...] = ()
    """UUIDs of its GPUs, in the desired order; empty: not all of them yet, or it needs none."""
    why: str = ""
    """Why the unit has not all its GPUs yet; empty: it has them, or needs none."""


Shares = dict[str, tuple[str, ...]]
"""UUIDs of the GPUs of units, by the units' paths."""


def assign_gpus(
    wishes: Mapping[str, GpuWish], given: Collection[str], before: Mapping[str, tuple[str, ...]]
) -> Shares:
    """The GPUs that each unit has. given: those that Ray has given. before: the last answer.

    A unit keeps what it has. Those that have the fewest to choose from choose first.
    """
    found: dict[str, list[str]] = {}
    left = set(given)
    for unit, wish in wishes.items():
        kept = [one for one in before.get(unit, ()) if one in left and one in wish.allowed]
        found[unit] = kept[: wish.number]
        left.difference_update(found[unit])
    for unit, wish in sorted(wishes.items(), key=lambda one: len(one[1].allowed) - one[1].number):
        more = [one for one in wish.allowed if one in left][: wish.number - len(found[unit])]
        found[unit] += more
        left.difference_update(more)
    return {
        unit: tuple(sorted(uuids, key=wishes[unit].allowed.index)) for unit, uuids in found.items()
    }


class UnitGpus:
    """Call its methods from one thread at a time, once a second: none of them waits."""

    def __init__(self, source: HolderSource, clock: TimeSource) -> None:
        """source: of the node."""
        self._source = source
        self._clock = clock
        self._fleet: str | None = None
        """The fleet whose holders were looked for; None: none yet."""
        self._holders: dict[int, GpuHolder] = {}
        self._gave: set[int] = set()
        """Numbers of the holders that have had a GPU."""
        self._shares: Shares = {}
        self._since = 0.0
        """When the last one was asked for."""
        self._again_at = 0.0
        self._lacked: frozenset[str] = frozenset()
        """Units that had to wait until then."""
        self._why = ""
        """Why the last attempt has failed; empty: Ray did not give what they lacked."""

    def hold_gpus(self, wishes: Mapping[str, GpuWish], fleet: str = "") -> dict[str, UnitGpu]:
        """Hold GPUs for these units, by their paths, and for no others. A unit that may have none
        needs none. fleet: its word; other fleets have holders of their own."""
        asking = {unit: wish for unit, wish in wishes.items() if wish.allowed}
        if not asking and self._fleet is None:
            return dict.fromkeys(wishes, UnitGpu())
        try:
            if self._fleet != fleet:
                found = self._source.find_holders(fleet)
                self._fleet, self._holders, self._since = fleet, found, self._clock()
            failed = self._take_step(asking)
        except StartupError as error:
            return {unit: UnitGpu(why=str(error) if unit in asking else "") for unit in wishes}
        return {unit: self._state_of(unit, wish, failed) for unit, wish in wishes.items()}

    def forget_all(self) -> None:
        """Keep nothing any more: who comes after this finds the holders, which go on."""
        self._fleet = None
        self._holders, self._shares = {}, {}

    def _take_step(self, wishes: Mapping[str, GpuWish]) -> bool:
        """Take one GPU more, or give back what is not wanted; whether this has failed, and is tried
        again after a pause. Raises StartupError."""
        now = self._clock()
        given, failed = self._given()
        self._shares = assign_gpus(wishes, [one for one in given.values() if one], self._shares)
        lacking = frozenset(
            unit for unit, wish in wishes.items() if len(self._shares[unit]) < wish.number
        )
        taken = {one for uuids in self._shares.values() for one in uuids}
        others = [number for number, uuid in given.items() if uuid not in taken]
        pauses = now < self._again_at and lacking <= self._lacked
        pending = "" in given.values()
        if lacking and not pauses and not failed and not pending:
            number = next(at for at in range(len(given) + 1) if at not in given)
            self._holders[number] = self._source.take_gpu(self._fleet or "", number)
            self._since = now
            self._gave.discard(number)
            return False
        gives_up = bool(failed) or (pending and now - self._since >= PATIENCE_S)
        if lacking and not pauses and not gives_up:
            return False
        for number in others:
            self._holders.pop(number).release()
        if lacking and not pauses:
            self._again_at, self._lacked, self._why = now + AGAIN_S, lacking, failed
        return bool(lacking)

    def _state_of(self, unit: str, wish: GpuWish, failed: bool) -> UnitGpu:
        has = self._shares.get(unit, ())
        if not wish.allowed or len(has) == wish.number:
            return UnitGpu(has)
        if failed and self._why:
            return UnitGpu(why=self._why)
        lacks = [one for one in wish.allowed if one not in has]
        words = (" and " if wish.number == len(wish.allowed) else " or ").join(lacks)
        if failed:
            return UnitGpu(why=f"Ray has given GPU {words} to others, or does not have it")
        return UnitGpu(why=f"Ray has not given GPU {words} yet")

    def _given(self) -> tuple[dict[int, str], str]:
        """UUIDs by holders' numbers, and why one ended that never had a GPU; empty: none did."""
        found: dict[int, str] = {}
        failed = ""
        for number, one in list(self._holders.items()):
            try:
                found[number] = one.given()
            except StartupError as error:
                log.warning("a GPU of units is not held any more: %s", error)
                del self._holders[number]
                if number not in self._gave:
                    failed = str(error)
            else:
                if found[number]:
                    self._gave.add(number)
        return found, failed
