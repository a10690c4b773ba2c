"""What a llumlet does while the scheduler has paired it: move requests, one after another."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection

from kvmig.controlplane.messages import Pair
from kvmig.controlplane.victims import next_victim
from kvmig.engines.base import RequestState
from kvmig.ground.clock import Clock, monotonic
from kvmig.kvtransfer.report import MigrationReport

log = logging.getLogger(__name__)

REMEMBERED = 4096


class Pairing:
    """Holds the present pair and moves requests until its budget is spent.

    The budget bounds what a dead scheduler's last word can do.
    """

    def __init__(
        self,
        requests: Callable[[], Awaitable[list[RequestState]]],
        migrating: Callable[[], Collection[str]],
        migrate: Callable[[str, Pair], Awaitable[MigrationReport]],
        clock: Clock = monotonic,
    ) -> None:
        self._requests = requests
        self._migrating = migrating
        self._migrate = migrate
        self._clock = clock
        self._arrived: OrderedDict[str, float] = OrderedDict()
        self._pair: Pair | None = None
        self._changed = asyncio.Event()

    def set(self, pair: Pair) -> None:
        """The scheduler's word; an empty destination ends the pair."""
        self._pair = pair if pair.destination else None
        self._changed.set()

    def arrived(self, request_id: str) -> None:
        """A request came here by a migration: it stays for a while."""
        self._arrived[request_id] = self._clock()
        self._arrived.move_to_end(request_id)
        while len(self._arrived) > REMEMBERED:
            self._arrived.popitem(last=False)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            spent = 0.0
            while (pair := self._pair) is not None and not self._changed.is_set():
                requests = await self._requests()
                victim = next_victim(
                    requests, pair, spent, self._migrating(), self._arrived, self._clock()
                )
                if victim is None:
                    break
                spent += next(one.blocks for one in requests if one.request_id == victim)
                report = await self._migrate(victim, pair)
                if report.state == "aborted":
                    log.info("request %s stays: %s %s", victim, report.reason, report.detail)
                    if report.reason not in ("finished", "aborted_by_client"):
                        break  # the pair doesn't work now; the next round decides anew
