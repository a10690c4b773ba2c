"""The scheduler: runs the pure rules once a round. No sockets, no clock of its own.

`RoundConfig` holds rules and thresholds, `RoundPlan` is what a round has decided so far, and
`RoundScheduler` what it orders of the sources. The rules of a round run one after the other on one
ledger: each sees the free blocks and batches as those before it will have left them. An instance
either gives or takes in a round, never both, and the reverse of a pair of the last round is never
made.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator

import msgspec
import numpy as np

from kvmig.controlplane.freeness import Queued, batch_sizes, free_blocks_of, slack, slacks
from kvmig.controlplane.messages import PairedDestination, Pairs, Why
from kvmig.controlplane.view import DRAINING, ClusterView, Column, Mask

MAX_SOURCES = 128
"""Instances that a rule looks at in a round, the worst first: the others' turn comes in
the next one. It bounds what a round costs when all are overloaded at once."""
MAX_DESTINATIONS = 4
"""Destinations of one source in a round."""


class RoundConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rules and thresholds of a round. Freeness in KV blocks per request."""

    rules: tuple[Callable[[RoundPlan], None], ...]
    """The rules, in their order."""
    queued: Queued = "all"
    source_below: float = 3.0
    """An instance whose freeness is under this is a source."""
    destination_above: float = 3.0
    """An instance whose freeness is over this may take requests in."""
    min_gain: float = 1.0
    """Least predicted growth of the lower freeness of two that makes a pair worth it."""
    preempted_give: bool = False
    """Whether an instance where a preempted request waits is a source with any freeness, and
    never a destination (`extremes`)."""
    inexact: bool = False
    """Whether requests move between numerics classes, if they have the same weights."""
    apart: tuple[str, ...] = ()
    """Instances that compute prompts: nothing comes to them while others serve
    (`kvmig.controlplane.prompts`)."""
    longest_move_s: float = 5.0
    """A source that needs longer for an average request, by the bandwidth it measured, does
    not balance: it isn't known whether the request lasts that long."""


class InstancePairing(msgspec.Struct, frozen=True):
    """Move up to `budget_blocks` of requests from source to destination this round."""

    source: str
    destination: str
    budget_blocks: float
    room_blocks: float
    """Size of the largest single request that leaves the destination well."""
    why: Why = "balance"
    endpoint: str = ""
    """The destination's."""
    priority: int | None = None
    """priority: only requests that come after this one."""


class RoundPlan:
    """What one round has decided so far. Rows are those of the view; sizes in KV blocks.

    serving, draining: of those whose requests can be moved at all.
    """

    def __init__(
        self, view: ClusterView, last: Collection[InstancePairing], rounds: RoundConfig
    ) -> None:
        columns = view.columns
        self.view = view
        self.columns = columns
        self.rounds = rounds
        movable = columns.movable > 0
        heard = columns.fresh_until >= view.now
        self.draining: Mask = movable & heard & (columns.state == DRAINING)
        self.serving: Mask = movable & (columns.open_until >= view.now)
        self.apart: Mask = view.rows_of(rounds.apart)
        if not (self.serving & ~self.apart).any():
            self.apart[:] = False
        self.free: Column = free_blocks_of(columns, rounds.queued).copy()
        self.free[columns.state == DRAINING] = -np.inf
        self.batch: Column = batch_sizes(columns, rounds.queued).copy()
        self.floor = max(rounds.destination_above, 0.0)
        self.kinds: Column = columns.weights if rounds.inexact else columns.numerics
        """Requests move between equal ones only."""
        alike = bool((self.kinds == self.kinds[:1]).all())
        self.each_kind: list[float] = (self.kinds[:1] if alike else np.unique(self.kinds)).tolist()
        self._before = {(pair.source, pair.destination) for pair in last}
        self._pairs: dict[tuple[int, int], InstancePairing] = {}
        self._gives: set[int] = set()
        self._takes: set[int] = set()

    @property
    def pairings(self) -> list[InstancePairing]:
        """The pairs that were decided, in order."""
        return list(self._pairs.values())

    def capacity_of(self, row: int) -> float:
        """Blocks that it can take in with one request more and stay above its threshold."""
        return float(self.free[row] - self.floor * (self.batch[row] + 1))

    def rooms(self) -> Column:
        """`capacity_of` of each."""
        rooms: Column = self.free - self.floor * (self.batch + 1)
        return rooms

    def slacks(self) -> Column:
        """The slack of each, as predicted now."""
        return slacks(self.free, self.batch)

    def slack(self, row: int) -> float:
        """The slack of one, as predicted now."""
        return slack(float(self.free[row]), int(self.batch[row]))

    def worst(self, rows: Mask, by: Column) -> list[int]:
        """Rows that may still give, lowest `by` first, at most MAX_SOURCES."""
        return [row for row in _first(rows, by) if row not in self._takes]

    def best(self, rows: Mask, by: Column) -> list[int]:
        """Rows that may still take, highest `by` first, at most MAX_SOURCES."""
        return [row for row in _first(rows & ~self.apart, -by) if row not in self._gives]

    def is_source(self, row: int) -> bool:
        """Whether something of it goes by what was decided."""
        return row in self._gives

    def may_pair(self, source: int, destination: int) -> bool:
        """Whether this pair is still allowed this round."""
        names = self.view.instances
        return (
            source != destination
            and self.kinds[source] == self.kinds[destination]
            and destination not in self._gives
            and source not in self._takes
            and (source, destination) not in self._pairs
            and (names[destination].instance, names[source].instance) not in self._before
        )

    def pair(
        self,
        source: int,
        destination: int,
        requests: float,
        blocks: float,
        *,
        budget: float,
        room: float,
        why: Why,
        priority: int | None = None,
    ) -> None:
        """Decide a pair that will move `requests` of `blocks` in all.

        budget: what is left to move of them, less what is on its way already.
        """
        names = self.view.instances
        there = names[destination]
        self._pairs[source, destination] = InstancePairing(
            names[source].instance, there.instance, budget, room, why, there.endpoint, priority
        )
        self._gives.add(source)
        self._takes.add(destination)
        self.free[source] += blocks
        self.free[destination] -= blocks
        self.batch[source] -= requests
        self.batch[destination] += requests


class DestinationHeap:
    """Destinations, the best first; who was asked for one gets it back in its new place."""

    def __init__(
        self, ledger: RoundPlan, rows: Mask, by: Column, value: Callable[[int], float]
    ) -> None:
        """by: what orders them now; value: the same of one row, as predicted later."""
        self._ledger = ledger
        self._value = value
        self._heaps: dict[float, list[tuple[float, int]]] = {}
        """Order by `RoundPlan.kinds`."""
        alike = len(ledger.each_kind) == 1
        for kind in ledger.each_kind:
            best = ledger.best(rows if alike else rows & (ledger.kinds == kind), by)
            self._heaps[kind] = heap = [(-value(row), row) for row in best]
            heapq.heapify(heap)

    def offer(self, sources: Iterable[int]) -> Iterator[tuple[int, list[int]]]:
        """Yield each source with the best for it, which are put back after its turn."""
        for source in sources:
            best = self.pop_best(source)
            yield source, best
            self.put_back(best)

    def pop_best(self, source: int) -> list[int]:
        """The best that may be paired with it, at most MAX_DESTINATIONS; to be put back."""
        heap = self._heaps.get(float(self._ledger.kinds[source]), [])
        taken: list[int] = []
        passed: list[tuple[float, int]] = []
        while heap and len(taken) < MAX_DESTINATIONS and len(passed) < MAX_DESTINATIONS:
            entry = heapq.heappop(heap)
            if self._ledger.may_pair(source, entry[1]):
                taken.append(entry[1])
            else:
                passed.append(entry)
        for entry in passed:
            heapq.heappush(heap, entry)
        return taken

    def put_back(self, rows: Iterable[int]) -> None:
        """Put the rows back, once their pairs are decided."""
        for row in rows:
            heap = self._heaps[float(self._ledger.kinds[row])]
            heapq.heappush(heap, (-self._value(row), row))


def _first(rows: Mask, by: Column) -> list[int]:
    """`rows` by their `by`, lowest first, ties in the view's order; at most MAX_SOURCES."""
    found = np.flatnonzero(rows)
    keys = by[found]
    if len(found) > MAX_SOURCES:
        cut = np.partition(keys, MAX_SOURCES - 1)[MAX_SOURCES - 1]
        near = keys <= cut
        found, keys = found[near], keys[near]
    ordered: list[int] = found[np.argsort(keys, kind="stable")].tolist()
    return ordered[:MAX_SOURCES]


def rebalance(
    view: ClusterView, last: Collection[InstancePairing], rounds: RoundConfig
) -> list[InstancePairing]:
    """The pairs of this round.

    last: the pairs of the round before. A pair that isn't decided again is over (its
    source is back inside the thresholds, or it helps no more), and the reverse of one
    is never decided, even where the estimates were wrong. A draining or stale instance
    takes nothing in; one that is stale, hangs or failed isn't asked to move anything either.
    """
    ledger = RoundPlan(view, last, rounds)
    for rule in rounds.rules:
        rule(ledger)
    return ledger.pairings


UNPAIR = Pairs()


class RoundScheduler:
    """Same views in the same order, same orders out."""

    def __init__(self, rounds: RoundConfig | None) -> None:
        """rounds: of a policy; None: nothing moves."""
        self._rounds = rounds
        self._pairings: list[InstancePairing] = []

    @property
    def rebalances(self) -> bool:
        """Whether rounds do anything: some policies only dispatch."""
        return self._rounds is not None

    def round(self, view: ClusterView) -> list[tuple[str, Pairs]]:
        """The orders of this round by source: its pairs, renewed every round, or to stop."""
        if self._rounds is None:
            return []
        last, self._pairings = (
            self._pairings,
            rebalance(view, self._pairings, self._rounds),
        )
        paired: dict[str, Pairs] = {}
        for pairing in self._pairings:
            pair = PairedDestination(
                pairing.destination,
                pairing.endpoint,
                pairing.budget_blocks,
                pairing.room_blocks,
                pairing.why,
                pairing.priority,
            )
            before = paired.get(pairing.source, UNPAIR).pairs
            paired[pairing.source] = Pairs((*before, pair))
        over = {one.source: UNPAIR for one in last if one.source not in paired}
        if over:
            here = {one.instance for one in view.instances}
            over = {source: stop for source, stop in over.items() if source in here}
        return [*over.items(), *paired.items()]
