"""What a llumlet does while the scheduler has paired it: move requests to its destinations.

One request at a time to each destination, to several destinations at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence

from kvmig.controlplane.messages import Pair
from kvmig.controlplane.victims import DEFAULT_RULE, VictimRule, next_victim
from kvmig.engines.base import RequestState
from kvmig.ground.clock import Clock, monotonic
from kvmig.kvtransfer.report import MigrationReport

log = logging.getLogger(__name__)

REMEMBERED = 4096


class Pairing:
    """Holds the present pairs and moves requests until their budgets are spent.

    The budget bounds what a dead scheduler's last word can do.
    """

    def __init__(
        self,
        requests: Callable[[], Awaitable[list[RequestState]]],
        migrating: Callable[[], Collection[str]],
        migrate: Callable[[str, Pair], Awaitable[MigrationReport]],
        rule: VictimRule = DEFAULT_RULE,
        clock: Clock = monotonic,
    ) -> None:
        self._requests = requests
        self._migrating = migrating
        self._migrate = migrate
        self._rule = rule
        self._clock = clock
        self._arrived: OrderedDict[str, float] = OrderedDict()
        self._pairs: dict[str, Pair] = {}
        self._spent: dict[str, float] = {}
        self._chosen: set[str] = set()
        self._changed = asyncio.Event()

    def set(self, pairs: Sequence[Pair]) -> None:
        """The scheduler's word; no pairs: stop."""
        self._pairs = {pair.destination: pair for pair in pairs}
        self._spent = dict.fromkeys(self._pairs, 0.0)
        self._changed.set()

    def arrived(self, request_id: str) -> None:
        """A request came here by a migration: it stays for a while."""
        self._arrived[request_id] = self._clock()
        self._arrived.move_to_end(request_id)
        while len(self._arrived) > REMEMBERED:
            self._arrived.popitem(last=False)

    async def run(self) -> None:
        """Until cancelled."""
        busy: set[str] = set()

        async def move_to(destination: str) -> None:
            try:
                while await self._move_one(destination):
                    pass
            except Exception:  # the next round decides anew, and other moves go on
                log.exception("a move to instance %s failed", destination)
            finally:
                busy.discard(destination)

        async with asyncio.TaskGroup() as movers:
            while True:
                await self._changed.wait()
                self._changed.clear()
                for destination in self._pairs.keys() - busy:
                    busy.add(destination)
                    movers.create_task(move_to(destination), name=f"moves to {destination}")

    async def _move_one(self, destination: str) -> bool:
        """Whether one moved, so that the next may."""
        requests = await self._requests()
        pair = self._pairs.get(destination)
        if pair is None:
            return False
        victim = next_victim(
            requests,
            pair,
            self._spent[destination],
            self._chosen.union(self._migrating()),
            self._arrived,
            self._clock(),
            self._rule,
        )
        if victim is None:
            return False
        self._spent[destination] += victim.weight_blocks
        self._chosen.add(victim.request_id)
        try:
            report = await self._migrate(victim.request_id, pair)
        finally:
            self._chosen.discard(victim.request_id)
        if report.state != "aborted":
            return True
        log.info("request %s stays: %s %s", victim.request_id, report.reason, report.detail)
        # For other reasons the pair doesn't work now; the next round decides anew.
        return report.reason in ("finished", "aborted_by_client", "started")
