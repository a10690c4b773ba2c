"""Moves of conversations that have no request, in the simulator: ahead of a turn, or by rounds.

Ahead of a turn the live code decides (`kvmig.controlplane.carry_ahead`). That sessions leave by
themselves an instance that is short of room is judged here alone: it gains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from kvmig.controlplane.carry_ahead import LEAST_BLOCKS, CarryRates, carry_ratio, plan_carriage
from kvmig_tools.sim.cost import CostModel
from kvmig_tools.sim.events import EventQueue
from kvmig_tools.sim.llumlet import SimLlumlet
from kvmig_tools.sim.network import Network
from kvmig_tools.sim.request import SimRequest


class SessionRelief(msgspec.Struct, frozen=True):
    """Shares of an instance's blocks that requests don't take."""

    leave_below: float = 0.2
    """Sessions leave an instance with less."""
    leave_until: float = 0.3
    """... until it has as much again."""
    take_above: float = 0.4
    """Sessions go to instances with more."""

    def find_sources(self, free: Mapping[str, float], before: set[str]) -> set[str]:
        """Instances that sessions leave. before: those of the last round."""
        return {
            name
            for name, share in free.items()
            if share < (self.leave_until if name in before else self.leave_below)
        }

    def find_rooms(self, free: Mapping[str, float]) -> dict[str, float]:
        """Instances that take sessions, and the share of their blocks that they take."""
        return {
            name: share - self.take_above for name, share in free.items() if share > self.take_above
        }


class SessionRules(msgspec.Struct, frozen=True):
    """What moves by itself."""

    ahead: bool = False
    """Before a turn that dispatch sends elsewhere, which knows that this can be."""
    relief: SessionRelief | None = None
    """Out of instances that are short of room."""


class SimSessionMoves:
    """All of a cluster's."""

    def __init__(
        self, rules: SessionRules, events: EventQueue, network: Network, cost: CostModel
    ) -> None:
        self.rules = rules
        self._events = events
        self._network = network
        self._cost = cost
        capacity = cost.capacity
        self._block_bytes = capacity.block_tokens * cost.copy.bytes_per_token
        chunk = capacity.max_batch_tokens
        self.rates = CarryRates(
            cost.copy.bandwidth / self._block_bytes,
            chunk / capacity.block_tokens / cost.prompt_s(chunk),
        )
        self.ahead = 0
        """Moves ahead of a turn, and..."""
        self.relieved = 0
        """... those out of crowded instances."""
        self._sources: set[str] = set()
        self._busy: set[str] = set()
        """Instances that a session leaves now."""

    def ratio(self, held: Mapping[str, float]) -> float:
        """See `carry_ratio`; of the most that any instance holds."""
        if not self.rules.ahead:
            return 1.0
        return carry_ratio(max(held.values(), default=0.0), self.rates)

    def carry_ahead(
        self,
        request: SimRequest,
        held: Mapping[str, float],
        members: Mapping[str, SimLlumlet],
        chosen: str,
        then: Callable[[], None],
    ) -> None:
        """Copy what another instance holds of it to the chosen one, if that is sooner; then go
        on."""
        holder = max(held, key=lambda name: held[name], default=chosen)
        found = plan_carriage(held, chosen, holder, self.rates) if self.rules.ahead else None
        if found is None or holder not in members:
            then()
            return
        self.ahead += 1
        self._copy(request.prefix, members[holder], members[chosen], int(found.blocks), then)

    def round(self, members: Mapping[str, SimLlumlet]) -> None:
        """Let sessions leave what is crowded, one at a time from each."""
        relief = self.rules.relief
        if relief is None:
            return
        free = {
            name: 1 - one.engine.used_now() / one.engine.total
            for name, one in members.items()
            if one.state == "serving"
        }
        rooms = {
            name: int(share * members[name].engine.total)
            for name, share in relief.find_rooms(free).items()
        }
        self._sources = relief.find_sources(free, self._sources)
        for source in sorted(self._sources - self._busy):
            self._relieve(source, members, rooms)

    def _relieve(
        self, source: str, members: Mapping[str, SimLlumlet], rooms: Mapping[str, int]
    ) -> None:
        """The session that was used last goes: all save as much for each byte."""
        kept = members[source].engine.kept
        if kept is None or not rooms:
            return
        there = max(rooms, key=lambda name: rooms[name])
        for prefix in kept.idle_prefixes():
            blocks = kept.idle_blocks(prefix)
            if LEAST_BLOCKS <= blocks <= rooms[there]:
                self._busy.add(source)
                self.relieved += 1

                def over() -> None:
                    self._busy.discard(source)
                    if source in self._sources and source in members:
                        self.round(members)

                self._copy(prefix, members[source], members[there], blocks, over)
                return

    def _copy(
        self,
        prefix: str,
        source: SimLlumlet,
        there: SimLlumlet,
        blocks: int,
        then: Callable[[], None],
    ) -> None:
        def landed() -> None:
            before, after = source.engine.kept, there.engine.kept
            if before is not None and after is not None:
                kept = before.idle_blocks(prefix)
                if kept:
                    before.give_up(prefix)
                    after.take_in(prefix, max(kept, after.idle_blocks(prefix)))
                elif before.is_running(prefix):  # a turn came there meanwhile: both have it
                    after.take_in(prefix, after.idle_blocks(prefix) + blocks)
            then()

        def begin() -> None:
            self._network.copy(source.name, there.name, blocks * self._block_bytes, landed)

        copy = self._cost.copy
        self._events.after((copy.stage_ms + 4 * copy.hop_ms) / 1e3, begin)
