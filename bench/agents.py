"""Agents of several units of this host, one of which is killed now and then, and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.units.site import Agent
from kvmig.core.errors import TransportError
from kvmig.sharing.unit_state import fetch_unit

AWAY_S = 2.0
"""Between an agent's end and the start of the next one."""
ANSWER_S = 0.5


class Agents:
    """Made by `agents_of`."""

    def __init__(self, folder: Path, units: Sequence[str], arena: int) -> None:
        self.arena = arena
        self._paths = {unit: folder / unit for unit in units}
        self._agents: dict[str, Agent] = {}

    @property
    def flags(self) -> list[str]:
        """kvmig.serve's; instances that are in none of the units join the first one."""
        named = [f"--unit={unit}: {path}" for unit, path in self._paths.items()]
        return [*named, f"--unit={next(iter(self._paths.values()))}"]

    async def kill(self, unit: str) -> None:
        """With SIGKILL; returns once the next one answers."""
        self._agents[unit].close()
        await asyncio.sleep(AWAY_S)
        await asyncio.to_thread(self.start, unit)

    async def leased(self, unit: str) -> int:
        """Bytes that its members may have, all together; 0 while it doesn't answer."""
        try:
            shares = (await fetch_unit(str(self._paths[unit]), ANSWER_S)).shares
        except TransportError:
            return 0
        return sum(one.lease for one in shares)

    def start(self, unit: str) -> None:
        """Return once it answers."""
        self._agents[unit] = Agent(self._paths[unit], self.arena)

    def close(self) -> None:
        """End them all."""
        for one in self._agents.values():
            one.close()


@contextmanager
def agents_of(folder: Path, units: Sequence[str], arena: int) -> Iterator[Agents]:
    """One a unit, which listens in the folder and has an arena of so many bytes."""
    agents = Agents(folder, units, arena)
    try:
        for unit in units:
            agents.start(unit)
        yield agents
    finally:
        agents.close()
