"""Rebalancing: which instance shall move requests where. Pure.

Sources lie below one threshold of slack and destinations above another. The lowest is
paired with the highest, again and again, where moving helps: k average requests of the
source, k the largest number for which the destination

- stays at or above its threshold, so that it can't become a source by it, and
- stays at or above the source, so that the two don't change roles,

must bring the lower of the two up by `min_gain`. Both conditions together mean that the
predicted effect of a round never calls for the way back.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec

from kvmig.controlplane.freeness import Queued, batch_size, free_blocks, slack
from kvmig.controlplane.messages import Why
from kvmig.controlplane.view import ClusterView, InstanceView


class Rounds(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler does each round. Freeness in KV blocks a request."""

    queued: Queued = "all"
    source_below: float = 3.0
    """An instance whose freeness is under this is a source."""
    destination_above: float = 6.0
    """An instance whose freeness is over this may take requests in."""
    min_gain: float = 1.0
    """Least predicted growth of the lower freeness of two that makes a pair worth it."""


class Pairing(msgspec.Struct, frozen=True):
    """Move up to `budget_blocks` of requests from source to destination this round."""

    source: str
    destination: str
    budget_blocks: float
    room_blocks: float
    """Size of the largest single request that leaves the destination above its threshold."""
    why: Why = "balance"


class _Side(msgspec.Struct, frozen=True):
    """What a decision needs of an instance."""

    instance: str
    free: float
    batch: int
    slack: float


def _side(one: InstanceView, queued: Queued) -> _Side:
    # The fake request of a terminating instance, even if its own report doesn't have it yet.
    free = -math.inf if one.state == "draining" else free_blocks(one, queued)
    batch = batch_size(one, queued)
    return _Side(one.instance, free, batch, slack(free, batch))


def rebalance(
    view: ClusterView,
    last: Collection[Pairing],
    rounds: Rounds,
) -> list[Pairing]:
    """The pairs of this round; each instance is in one at most.

    last: the pairs of the round before. A pair that isn't decided again is over (its
    source is back inside the thresholds, or it helps no more), and the reverse of one
    is never decided, whatever the estimates missed. A draining, stale or broken instance
    takes nothing in; the latter two aren't asked to move anything either.
    """
    sources: list[tuple[_Side, InstanceView]] = []
    destinations: list[_Side] = []
    for one in view.instances:
        if view.stale(one) or one.state not in ("serving", "draining"):
            continue
        side = _side(one, rounds.queued)
        if side.slack < rounds.source_below and one.load.running > one.migrations_out:
            sources.append((side, one))
        elif side.slack > rounds.destination_above and one.state == "serving":
            destinations.append(side)
    sources.sort(key=lambda pair: (pair[0].slack, pair[0].instance))
    destinations.sort(key=lambda side: (side.slack, side.instance))

    before = {(pair.source, pair.destination) for pair in last}
    pairings: list[Pairing] = []
    for side, one in sources:
        if not destinations:
            break
        destination = destinations[-1]
        if (destination.instance, side.instance) in before:
            continue
        pairing = _pair(side, one, destination, rounds)
        if pairing is not None:
            pairings.append(pairing)
            destinations.pop()
    return pairings


def _pair(source: _Side, one: InstanceView, destination: _Side, rounds: Rounds) -> Pairing | None:
    """The pair if it helps."""
    average = max(one.load.used_blocks / one.load.running, 1.0)
    floor = max(rounds.destination_above, 0.0)
    room = destination.free - floor * destination.batch
    # (free_d - k average) / (batch_d + k) >= floor
    bounds = [room / (average + floor), one.load.running]
    draining = source.free == -math.inf
    if not draining:
        bounds.append(_level(source, destination, average))
    moves = math.floor(min(bounds))
    if moves < 1:
        return None
    low = slack(source.free + moves * average, source.batch - moves)
    high = slack(destination.free - moves * average, destination.batch + moves)
    if not draining and min(low, high) - source.slack < rounds.min_gain:
        return None
    # What moves already is still counted at its source: it uses the budget up.
    moves = max(moves - one.migrations_out, 0)
    return Pairing(source.instance, destination.instance, moves * average, room - floor)


def _level(source: _Side, destination: _Side, average: float) -> float:
    """The number of moves up to which the destination stays at or above the source.

    (free_s + k a) / (batch_s - k) <= (free_d - k a) / (batch_d + k): k^2 cancels out, and
    k <= gap / slope. A slope below 0 belongs to a source that stays below 0 whatever moves.
    """
    gap = destination.free * source.batch - source.free * destination.batch
    slope = source.free + destination.free + average * (source.batch + destination.batch)
    return gap / slope if slope > 0 else math.inf
