"""The quickest way from one placement to another, by going through all of them.

For small cases. It shares no code with `kvmig.placement.moves` but the names of things: what may be
is decided by Hall's condition instead of a flow, and every set of steps is tried as a wave.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator

from kvmig.placement.moves import IDLE_GAP, LIVE_GAP, Leases, PlacementSite, Slot

Slots = frozenset[Slot]


def subsets(of: Iterable[Slot]) -> Iterator[Slots]:
    items = sorted(of)
    for size in range(len(items) + 1):
        for some in itertools.combinations(items, size):
            yield frozenset(some)


class Oracle:
    def __init__(self, site: PlacementSite, now: Leases, target: Leases) -> None:
        self.site, self.now, self.target = site, now, target
        self.all = [(model, unit) for model in site.models for unit in site.units]
        self.live = {
            model: sum(one.used for slot, one in now.items() if slot[0] == model)
            for model in site.models
        }

    def least(self, slot: Slot) -> int:
        floor = self.site.models[slot[0]].floor
        if self.site.elastic:
            return floor
        known = self.now.get(slot) or self.target.get(slot)
        return floor if known is None else known.quota

    def legal(self, on: Slots, holders: Slots) -> bool:
        """Memory of every unit; and for every set of models, room where they have holders."""
        spare: dict[str, int] = {}
        for unit, one in self.site.units.items():
            there = [slot for slot in on if slot[1] == unit]
            spare[unit] = one.memory - sum(self.site.models[slot[0]].held for slot in there)
            if one.arena is not None:
                spare[unit] = min(spare[unit], one.arena)
            spare[unit] -= sum(self.least(slot) for slot in there)
        if min(spare.values()) < 0:
            return False
        demand = {
            model: max(0, self.live[model] - sum(self.least(s) for s in holders if s[0] == model))
            for model in {slot[0] for slot in holders}
        }
        if not self.site.elastic:
            return not any(demand.values())
        for size in range(1, len(demand) + 1):
            for some in itertools.combinations(sorted(demand), size):
                units = {slot[1] for slot in holders if slot[0] in some}
                if sum(demand[model] for model in some) > sum(spare[unit] for unit in units):
                    return False
        return True

    def waves(self, on: Slots) -> Iterator[tuple[Slots, float]]:
        """What may come next, and what it costs."""
        ends = {model for model, _ in self.target}
        for drains in subsets(on):
            holders = on - drains
            gone = {slot for slot in drains if not any(one[0] == slot[0] for one in holders)}
            if len({slot[0] for slot in gone}) < len(gone):
                continue  # one of them drains to the other before
            gaps = [self.live[slot[0]] > 0 for slot in gone]
            if any(gaps) and not self.site.allow_gap:
                continue
            if any(self.live[slot[0]] and slot[0] not in ends for slot in gone):
                continue
            cost = sum(
                self.site.models[slot[0]].start_s * (LIVE_GAP if self.live[slot[0]] else IDLE_GAP)
                for slot in gone if slot[0] in ends
            )  # fmt: skip
            if not self.legal(on, holders):
                continue
            times = [
                self.site.drain_s
                + self.live[slot[0]]
                / sum(one[0] == slot[0] for one in on)
                * (1 / self.site.bandwidth + self.site.models[slot[0]].byte_s)
                for slot in drains
            ]
            for starts in self.starts(on, holders):
                if starts or drains:
                    begun = [self.site.models[slot[0]].start_s for slot in starts]
                    yield (on | starts) - drains, max(times + begun) + cost

    def starts(self, on: Slots, holders: Slots) -> Iterator[Slots]:
        free = [slot for slot in self.all if slot not in on]

        def more(chosen: Slots, rest: list[Slot]) -> Iterator[Slots]:
            yield chosen
            for at, slot in enumerate(rest):
                if self.legal(on | chosen | {slot}, holders):
                    yield from more(chosen | {slot}, rest[at + 1 :])

        yield from more(frozenset(), free)

    def best(self) -> float | None:
        """Cost of the quickest way; None: there is none."""
        begin, end = frozenset(self.now), frozenset(self.target)
        if not self.legal(end, end) or any(
            live and not any(slot[0] == model for slot in end) for model, live in self.live.items()
        ):
            return None
        costs = {begin: 0.0}
        heap = [(0.0, sorted(begin))]
        while heap:
            cost, at = heapq.heappop(heap)
            on = frozenset(at)
            if on == end:
                return cost
            if cost > costs[on]:
                continue
            for after, took in self.waves(on):
                if cost + took < costs.get(after, float("inf")) - 1e-9:
                    costs[after] = cost + took
                    heapq.heappush(heap, (cost + took, sorted(after)))
        return None
