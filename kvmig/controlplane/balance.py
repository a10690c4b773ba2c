"""Load balance: who is short of room gives to who has much, where that helps. Pure.

Sources lie below one threshold of slack and destinations above another. The lowest is
paired with the highest, then with the next highest, until it is above its threshold:
k average requests of the source go, k the largest number for which the destination

- stays at or above its threshold, so that the predicted effect of a round never calls for
  the way back, and
- stays at or above the source, so that no more goes than evens the two out,

and the lower of the two must come up by `min_gain`.
"""

from __future__ import annotations

import math

from kvmig.controlplane.freeness import slack
from kvmig.controlplane.ledger import Ledger, Takers


def balance(ledger: Ledger) -> None:
    """Decide the pairs."""
    columns, rounds = ledger.columns, ledger.rounds
    slacks = ledger.slacks()
    movable = columns.running > columns.out
    low = ledger.serving & movable & (slacks < rounds.source_below)
    high = ledger.serving & (slacks > rounds.destination_above) & ~low
    sources = [row for row in ledger.worst(low, slacks) if not _slow(ledger, row)]
    if not sources:
        return
    takers = Takers(ledger, high, slacks, ledger.slack)
    for source in sources:
        highest = takers.take(source)
        _relieve(ledger, source, highest)
        takers.put_back(highest)


def _slow(ledger: Ledger, row: int) -> bool:
    """Whether one average request would be on its way for too long."""
    bandwidth = ledger.view.instances[row].bandwidth
    return bandwidth > 0 and _average(ledger, row) > bandwidth * ledger.rounds.longest_move_s


def _average(ledger: Ledger, row: int) -> float:
    """Blocks of one running request."""
    return max(float(ledger.columns.used[row] / ledger.columns.running[row]), 1.0)


def _relieve(ledger: Ledger, source: int, highest: list[int]) -> None:
    """Pair one source with the highest, until it needs no more."""
    out = float(ledger.columns.out[source])
    for destination in highest:
        moves = _moves(ledger, source, destination)
        if moves < 1:  # nobody else is higher
            return
        out = _pair(ledger, source, destination, moves, out)
        if ledger.slack(source) >= ledger.rounds.source_below:
            return


def _pair(ledger: Ledger, source: int, destination: int, moves: int, out: float) -> float:
    """Decide it. What moves already (`out`) uses the budget up; returns how much is left."""
    average = _average(ledger, source)
    budget = max(moves - out, 0.0) * average
    room = ledger.room(destination)
    ledger.pair(
        source, destination, moves, moves * average, budget=budget, room=room, why="balance"
    )
    return max(out - moves, 0.0)


def _moves(ledger: Ledger, source: int, destination: int) -> int:
    """How many average requests go; 0: the pair doesn't help."""
    average = _average(ledger, source)
    floor = ledger.floor
    free_s, batch_s = float(ledger.free[source]), float(ledger.batch[source])
    free_d, batch_d = float(ledger.free[destination]), float(ledger.batch[destination])
    # (free_d - k average) / (batch_d + k) >= floor
    most = (free_d - floor * batch_d) / (average + floor)
    # (free_s + k a) / (batch_s - k) <= (free_d - k a) / (batch_d + k): k^2 cancels out, and
    # k <= gap / slope. A slope below 0: the source stays below 0 whatever moves.
    gap = free_d * batch_s - free_s * batch_d
    slope = free_s + free_d + average * (batch_s + batch_d)
    level = gap / slope if slope > 0 else math.inf
    running = float(ledger.columns.running[source])
    moves = math.floor(min(most, level, running, batch_s))
    if moves < 1:
        return 0
    low = slack(free_s + moves * average, int(batch_s) - moves)
    high = slack(free_d - moves * average, int(batch_d) + moves)
    gain = min(low, high) - slack(free_s, int(batch_s))
    return moves if gain >= ledger.rounds.min_gain else 0
