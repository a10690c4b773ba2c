"""Moves of a paired llumlet: its requests go to the destinations that the scheduler names.

One request at a time to each destination, to several destinations at once; in a drain, where what
is lent is called back, and of prompts, as many as may migrate at once. Prompts that come between
two rounds don't wait for the next one (`look_again`). A request that a destination had no room for,
or can't run, is not tried there again at once (`kvmig.controlplane.refused_moves`): others go.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmig.controlplane.messages import SEVERAL, PairedDestination
from kvmig.controlplane.refused_moves import UNFIT, RefusedMoves
from kvmig.controlplane.victims import DEFAULT_RULE, VictimRule, next_victim
from kvmig.core.clock import TimeSource, monotonic
from kvmig.engines.base import RequestState
from kvmig.kvtransfer.report import MigrationReport

log = logging.getLogger(__name__)

_NEXT = ("finished", "aborted_by_client", "started", "unknown_request", *UNFIT)
"""Reasons for which one request stays, and the next one may go at once."""
MOST_WAITING = 64
"""Waiting requests that are listed at a time: those behind them come once these have left."""


@dataclass(slots=True)
class RequestsHere:
    """The requests here at one moment."""

    requests: asyncio.Task[list[RequestState]]
    tried: set[str] = field(default_factory=set)
    moved: bool = False
    """Whether any of them left: then those behind them may go, too."""


@dataclass(eq=False)
class MigrationDriver:
    """Holds the present pairs and moves requests until their budgets are spent.

    The budget bounds what a dead scheduler's last word can do.
    """

    requests: Callable[[int], Coroutine[Any, Any, list[RequestState]]]
    """The requests here, with a number of those in the queue: `Engine.requests`."""
    migrating: Callable[[], Collection[str]]
    arrived: Callable[[], Mapping[str, float]]
    """When those that were moved here came, by `monotonic`: they stay for a while."""
    migrate: Callable[[str, PairedDestination], Awaitable[MigrationReport]]
    rule: VictimRule = DEFAULT_RULE
    at_once: int = 1
    """Requests that move to one destination at once for a pair of `SEVERAL`."""
    clock: TimeSource = monotonic
    _pairs: dict[str, PairedDestination] = field(default_factory=dict, init=False)
    _spent: dict[str, float] = field(default_factory=dict, init=False)
    _refused: dict[str, set[str]] = field(default_factory=dict, init=False)
    """Requests that were tried, by destination."""
    _waiting: RefusedMoves = field(default_factory=RefusedMoves, init=False)
    """Requests that a destination has refused, and isn't asked for again yet: over all rounds."""
    _listing: RequestsHere | None = field(default=None, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def set(self, pairs: Sequence[PairedDestination]) -> None:
        """The scheduler's word; no pairs: stop."""
        self._pairs = {pair.destination: pair for pair in pairs}
        self._spent = dict.fromkeys(self._pairs, 0.0)
        self._refused = {destination: set() for destination in self._pairs}
        self._waiting.set_pairs(pairs)
        self._listing = None
        self._changed.set()

    def look_again(self) -> None:
        """New requests may be here: let their prompts travel, if the pairs are for that."""
        listing = self._listing
        if (listing is not None and not listing.requests.done()) or not any(
            pair.why == "prompt" for pair in self._pairs.values()
        ):
            return
        self._listing = RequestsHere(self._list())
        self._changed.set()

    def _list(self) -> asyncio.Task[list[RequestState]]:
        return asyncio.create_task(self.requests(MOST_WAITING))

    async def run(self) -> None:
        """Run until cancelled."""
        busy = Counter[str]()

        async def move_to(destination: str) -> None:
            try:
                while await self._move_one(destination):
                    pass
            except Exception:  # the next round decides anew, and other moves go on
                log.exception("a move to instance %s failed", destination)
            finally:
                busy[destination] -= 1

        async with asyncio.TaskGroup() as movers:
            while True:
                await self._changed.wait()
                self._changed.clear()
                # The first to each destination, then the second: so they are shared out.
                for number in range(self.at_once):
                    for destination, pair in self._pairs.items():
                        most = self.at_once if pair.why in SEVERAL else 1
                        if number < most and busy[destination] <= number:
                            busy[destination] += 1
                            movers.create_task(move_to(destination), name=f"moves to {destination}")

    async def _move_one(self, destination: str) -> bool:
        """Whether one moved, so that the next may."""
        chosen = await self._choose(destination)
        if chosen is None:
            return False
        victim, pair, listing = chosen
        self._spent[destination] += victim.weight_blocks
        listing.tried.add(victim.request_id)
        self._refused[destination].add(victim.request_id)
        report = await self.migrate(victim.request_id, pair)
        if report.state != "aborted":
            listing.moved = True
            return True
        log.info("request %s stays: %s %s", victim.request_id, report.reason, report.detail)
        self._waiting.refuse(victim.request_id, pair, report.reason, self.clock())
        # For other reasons the pair doesn't work now; the next round decides anew.
        return report.reason in _NEXT

    async def _choose(
        self, destination: str
    ) -> tuple[RequestState, PairedDestination, RequestsHere] | None:
        """A victim among the requests that were listed when the pairs came: a list costs the engine
        time, so it makes none for each victim, but another one when all of these are done with.
        """
        while True:
            listing = self._listing
            if listing is None:
                listing = RequestsHere(self._list())
                self._listing = listing
            requests = await listing.requests
            if len(self._waiting):
                self._waiting.forget({one.request_id for one in requests})
            pair = self._pairs.get(destination)
            if pair is None:
                return None
            # Where a prompt can't go to one destination, it may go to another one at once.
            tried = self._refused[destination] if pair.why == "prompt" else listing.tried
            now = self.clock()
            victim = next_victim(
                requests,
                pair,
                self._spent[destination],
                tried.union(self.migrating(), self._waiting.waiting(pair, now)),
                self.arrived(),
                now,
                self.rule,
            )
            if victim is not None:
                return victim, pair, listing
            if self._listing is listing:
                if not listing.moved:
                    return None
                self._listing = None
