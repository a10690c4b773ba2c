"""A queue whose head fits nowhere beside what runs: it moves, or room is made for it. Pure.

The head of a queue may want more blocks than its instance has free though the cluster has
enough. If another instance has them, waiting requests go there: they hold nothing, so
that costs nothing. If none has, running requests of its own instance go to where there is
room, no more than it takes to let the head in.
"""

from __future__ import annotations

import numpy as np

from kvmig.controlplane.columns import Column
from kvmig.controlplane.ledger import MAX_DESTINATIONS, Ledger


def move_queues(ledger: Ledger) -> None:
    """Pair instances whose head can't start with ones where it can, at once."""
    columns = ledger.columns
    missing = _missing(ledger)
    stuck = ledger.worst(ledger.serving & (missing > 0), -missing)
    if not stuck:
        return
    takers = ledger.best(ledger.serving & (columns.waiting == 0), _room(ledger))
    for source in stuck:
        wanted = float(columns.head[source])
        if not takers:
            return
        destination = max(takers, key=lambda row: _room_at(ledger, row))
        room = _room_at(ledger, destination)
        if room < wanted or not ledger.may_pair(source, destination):
            continue
        queue = wanted + float(columns.behind[source])
        blocks = min(queue, room)
        requests = float(columns.waiting[source]) * blocks / queue
        ledger.pair(source, destination, requests, blocks, budget=blocks, room=room, why="queue")


def make_room(ledger: Ledger) -> None:
    """Pair instances whose head fits nowhere with those who can take enough of what runs."""
    columns = ledger.columns
    missing = _missing(ledger)
    possible = (columns.total >= columns.head) & (columns.running > columns.out)
    stuck = ledger.worst(ledger.serving & (missing > 0) & possible, missing)
    if not stuck:
        return
    takers = ledger.best(ledger.serving & (columns.waiting == 0), _room(ledger))
    for source in stuck:
        average = float(columns.used[source] / columns.running[source])
        need = float(missing[source])
        shares: list[tuple[int, float]] = []
        for row in takers:
            room = _room_at(ledger, row)
            if len(shares) == MAX_DESTINATIONS or need <= 0 or room < 1:
                break
            if ledger.may_pair(source, row):
                shares.append((row, min(room, need)))
                need -= room
        if need > 0:  # to move some but not enough helps nobody
            continue
        out = float(columns.out[source]) * average
        for row, share in shares:
            budget, out = max(share - out, 0.0), max(out - share, 0.0)
            room = _room_at(ledger, row)
            requests = share / max(average, 1.0)
            ledger.pair(source, row, requests, share, budget=budget, room=room, why="defragment")


def _missing(ledger: Ledger) -> Column:
    """Blocks that the head of each queue lacks; 0 or less: it can start."""
    columns = ledger.columns
    missing: Column = columns.head - (columns.total - columns.used)
    return np.where(columns.waiting > 0, missing, 0.0)


def _room(ledger: Ledger) -> Column:
    """Blocks that each can take in with one request more and stay above its threshold."""
    floor = max(ledger.rounds.destination_above, 0.0)
    room: Column = ledger.free - floor * (ledger.batch + 1)
    return room


def _room_at(ledger: Ledger, row: int) -> float:
    floor = max(ledger.rounds.destination_above, 0.0)
    return float(ledger.free[row] - floor * (ledger.batch[row] + 1))
