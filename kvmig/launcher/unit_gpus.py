"""The GPUs of a node's units, taken from Ray so that no other program gets them. Pure.

Ray gives an actor any GPU of its node that is free. So one GPU after the other is taken, until one
of those is among them that the unit may have; the others go back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvmig.core.clock import Clock
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
        """Give it back."""


class HolderSource(Protocol):
    """Takes GPUs of one node from Ray."""

    def find_holders(self, unit: str) -> dict[int, GpuHolder]:
        """The holders of a unit that were there before, by number. Raises StartupError."""

    def take_gpu(self, unit: str, number: int) -> GpuHolder:
        """Ask Ray for one more. Raises StartupError."""


class HoldStep(NamedTuple):
    """What is to be done about a unit's holders."""

    release: tuple[int, ...] = ()
    """Numbers of the holders that give theirs back."""
    take: bool = False
    """Whether one more is asked for."""


class UnitGpu(NamedTuple):
    """How it stands with a unit's GPU."""

    uuid: str = ""
    """The one that it has; empty: none yet, or it needs none."""
    why: str = ""
    """Why it has none yet; empty: it has one, or needs none."""


def chosen_holder(allowed: Sequence[str], given: Mapping[int, str]) -> int | None:
    """The holder whose GPU is the unit's; None: none is. allowed: UUIDs. given: UUIDs by holders'
    numbers; empty: not yet."""
    return next((number for number in sorted(given) if given[number] in allowed), None)


def next_step(allowed: Sequence[str], given: Mapping[int, str], gives_up: bool) -> HoldStep:
    """allowed, given: as in `chosen_holder`. gives_up: whether a holder has failed, or was waited
    for too long."""
    chosen = chosen_holder(allowed, given)
    if gives_up or chosen is not None:
        return HoldStep(release=tuple(number for number in given if number != chosen))
    return HoldStep(take="" not in given.values())


@dataclass(eq=False)
class _UnitHold:
    """The holders of one unit."""

    holders: dict[int, GpuHolder] = field(default_factory=dict)
    since: float = 0.0
    """When the last one was asked for."""
    again_at: float = 0.0
    why: str = ""
    """Why the last attempt has failed."""
    gave: set[int] = field(default_factory=set)
    """Numbers of the holders that have had a GPU."""


class UnitGpus:
    """Call its methods from one thread at a time, once a second: none of them waits."""

    def __init__(self, source: HolderSource, clock: Clock) -> None:
        """source: of the node."""
        self._source = source
        self._clock = clock
        self._units: dict[str, _UnitHold] = {}

    def hold_gpu(self, unit: str, allowed: Sequence[str]) -> UnitGpu:
        """Hold one of these GPUs for a unit. unit: its path. allowed: UUIDs; none: it needs
        none."""
        if not allowed:
            return UnitGpu()
        try:
            if unit not in self._units:
                found = self._source.find_holders(unit)
                self._units[unit] = _UnitHold(found, self._clock())
            return self._keep(unit, self._units[unit], allowed)
        except StartupError as error:
            return UnitGpu(why=str(error))

    def release_all_but(self, units: Iterable[str]) -> None:
        """Give back the GPUs of all other units."""
        for unit in self._units.keys() - set(units):
            for one in self._units.pop(unit).holders.values():
                one.release()

    def forget_all(self) -> None:
        """Keep nothing any more: who comes after this finds the holders, which go on."""
        self._units.clear()

    def _keep(self, unit: str, hold: _UnitHold, allowed: Sequence[str]) -> UnitGpu:
        now = self._clock()
        given, failed = self._given(unit, hold)
        chosen = chosen_holder(allowed, given)
        if chosen is None and now < hold.again_at:
            return UnitGpu(why=hold.why)
        late = chosen is None and "" in given.values() and now - hold.since >= PATIENCE_S
        gives_up = late or (chosen is None and bool(failed))
        step, words = next_step(allowed, given, gives_up), " or ".join(allowed)
        for number in step.release:
            hold.holders.pop(number).release()
        if gives_up:
            hold.again_at = now + AGAIN_S
            hold.why = failed or f"Ray has given GPU {words} to others, or does not have it"
        elif step.take:
            number = next(at for at in range(len(given) + 1) if at not in given)
            hold.holders[number] = self._source.take_gpu(unit, number)
            hold.since, hold.why = now, ""
            hold.gave.discard(number)
        if chosen is not None:
            return UnitGpu(given[chosen])
        return UnitGpu(why=hold.why or f"Ray has not given GPU {words} yet")

    def _given(self, unit: str, hold: _UnitHold) -> tuple[dict[int, str], str]:
        """UUIDs by holders' numbers, and why one ended that never had a GPU; empty: none did."""
        found: dict[int, str] = {}
        failed = ""
        for number, one in list(hold.holders.items()):
            try:
                found[number] = one.given()
            except StartupError as error:
                log.warning("a GPU of unit %s is not held any more: %s", unit, error)
                del hold.holders[number]
                if number not in hold.gave:
                    failed = str(error)
            else:
                if found[number]:
                    hold.gave.add(number)
        return found, failed
