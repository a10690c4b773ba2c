"""Lets idle sessions leave an instance that drains: one after the other, until its deadline.

What goes where, and in what order, is decided in `kvmig.controlplane.session_carriage`; here
sessions are counted, ordered away, and what stays is reported.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Protocol

from kvmig.asgi.errors import GatewayError, SessionBusy, UnknownSession
from kvmig.controlplane.front_messages import CarrySessions, SessionsCarried
from kvmig.controlplane.session_carriage import CachedSession, SessionCarriage, plan_carriages
from kvmig.core.clock import TimeSource
from kvmig.core.prefix_marks import MARK_TOKENS
from kvmig.frontend.instances import InstancePool
from kvmig.frontend.session_memory import RememberedSession, SessionMemory
from kvmig.kvtransfer.report import MigrationReport

LOOK_S = 0.05
"""Pause between two looks at whether the instance reports that it drains, and between two tries."""
PATIENCE_S = 10.0
"""Longest wait of one session for requests that move first."""
AT_ONCE = 64
"""Sessions that are looked up before other work has its turn."""

log = logging.getLogger(__name__)


class SessionOrders(Protocol):
    """What moves a session: `kvmig.frontend.session_moves.SessionMoves`."""

    memory: SessionMemory

    async def carry(self, owner: int, destination: str, patience_s: float) -> MigrationReport:
        """Raises what `kvmig.asgi.errors` names when it can't start."""
        ...


class SessionCarrier:
    """The sessions of one front end."""

    def __init__(self, orders: SessionOrders, fleet: InstancePool, clock: TimeSource) -> None:
        self._orders = orders
        self._fleet = fleet
        self._clock = clock

    async def carry(self, order: CarrySessions) -> SessionsCarried:
        """Move what has room elsewhere, until all has moved, the deadline is over, or the instance
        doesn't drain any more."""
        deadline = self._clock() + order.within_s
        if not self._remembered(order):
            return SessionsCarried()
        while (  # noqa: ASYNC110 - its reports are no events; until then a turn may come back there
            self._fleet.state_of(order.instance) != "draining" and self._clock() < deadline
        ):
            await asyncio.sleep(LOOK_S)
        idle = await self._look_up(order)
        rooms = self._fleet.rooms_beside(order.instance)
        if idle and not rooms:
            return SessionsCarried(stayed={"no_destination": len(idle)})
        plan = plan_carriages(
            idle, rooms, self._fleet.block_tokens, self._fleet.block_bytes(order.instance)
        )
        planned = {one.owner for one in plan}
        lacking = [one for one in idle if one.owner not in planned]
        stayed = Counter[str]()
        stayed["no_room"] = sum(one.tokens > max(one.held.values(), default=0) for one in lacking)
        moved = nbytes = 0
        for number, carriage in enumerate(plan):
            if stop := self._stop(order.instance, deadline):
                stayed[stop] += len(plan) - number
                break
            report = await self._carry_one(carriage, order.instance, deadline)
            if isinstance(report, str):
                stayed[report] += report != ""
                continue
            if report.state == "committed":
                moved, nbytes = moved + 1, nbytes + report.bytes
            elif report.reason == "unsupported":  # so it is for all of them
                stayed[report.reason] += len(plan) - number
                break
            elif report.reason != "finished":  # of which nothing is cached any more
                stayed[report.reason] += 1
        return SessionsCarried(moved, nbytes, dict(+stayed))

    def _remembered(self, order: CarrySessions) -> list[RememberedSession]:
        owners = None if order.owners is None else set(order.owners)
        return [
            one
            for one in self._orders.memory.find_all()
            if one.instance == order.instance and (owners is None or one.owner in owners)
        ]

    async def _look_up(self, order: CarrySessions) -> list[CachedSession]:
        """The sessions of which something is cached there, as far as its reports show."""
        found = []
        for number, one in enumerate(self._remembered(order)):
            if number % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
            tokens, held = self._fleet.held_elsewhere(one.marks, order.instance)
            if tokens == MARK_TOKENS * len(one.marks):  # all of its prompt, so its answer, too
                tokens += len(one.output_token_ids)
            if tokens:
                found.append(CachedSession(one.owner, tokens, one.ended_at, held))
        return found

    def _stop(self, instance: str, deadline: float) -> str:
        """Why no more sessions go; empty: they do."""
        if self._clock() >= deadline:
            return "deadline"
        return "" if self._fleet.state_of(instance) == "draining" else "not_draining"

    async def _carry_one(
        self, carriage: SessionCarriage, source: str, deadline: float
    ) -> MigrationReport | str:
        """The report; or why there is none, empty for one that has a request, or is elsewhere."""
        while not (stop := self._stop(source, deadline)):
            patience_s = min(PATIENCE_S, max(LOOK_S, deadline - self._clock()))
            try:
                report = await self._orders.carry(carriage.owner, carriage.destination, patience_s)
            except (SessionBusy, UnknownSession):
                return ""
            except GatewayError as error:
                log.warning("a session stays on instance %s: %s", source, error)
                return "error"
            if report.reason != "busy":
                return report
            await asyncio.sleep(LOOK_S)
        return stop
