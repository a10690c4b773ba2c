"""A queue whose head can't start where it is: it moves, or room is made for it. Pure.

The head of a queue may want more blocks than its instance has free, or a seat in a full
batch. If another instance has them, waiting requests go there: they hold nothing, so that
costs nothing. If it fits nowhere, those behind it go where they fit. If the blocks are nowhere
in one place, running requests of its own instance go to where there is room, no more than it
takes to let the head in.
"""

from __future__ import annotations

import math

import numpy as np

from kvmig.controlplane.columns import Column
from kvmig.controlplane.ledger import Ledger, Takers


def unheld_blocks(ledger: Ledger) -> Column:
    """Blocks of each that nobody holds now."""
    free: Column = ledger.columns.total - ledger.columns.used
    return free


def missing_blocks(ledger: Ledger) -> Column:
    """Blocks that the head of each queue lacks; 0 or less: it can start."""
    columns = ledger.columns
    return np.where(columns.waiting > 0, columns.head - unheld_blocks(ledger), 0.0)


def move_queues(ledger: Ledger) -> None:
    """Pair instances whose head can't start with ones where it can, at once.

    A head that fits nowhere lets those behind it pass, as many as fit elsewhere.
    """
    columns = ledger.columns
    missing = missing_blocks(ledger)
    seated = (columns.waiting > 0) & (columns.running >= columns.seats)
    stuck = ledger.worst(ledger.serving & ((missing > 0) | seated), -missing)
    if not stuck:
        return
    takers = _takers(ledger)
    keepers = _keepers(ledger)
    blocked = [
        source
        for source in stuck
        if not _move_queue(ledger, source, takers, 0.0)
        and not _move_queue(ledger, source, keepers, 1.0)
    ]
    for source in blocked:
        _pass_head(ledger, source, takers)


def _move_queue(ledger: Ledger, source: int, takers: Takers, borrowed: float) -> bool:
    """To the first of `takers`, where so much of the headroom counts as room; whether it may."""
    columns = ledger.columns
    roomiest = takers.take(source)
    wanted = float(columns.head[source])
    room = -1.0
    if roomiest:
        destination = roomiest[0]
        room = ledger.room(destination) + borrowed * float(columns.kept[destination])
        if room >= wanted:
            queue = wanted + float(columns.behind[source])
            blocks = min(queue, room)
            requests = math.ceil(columns.waiting[source] * blocks / queue)
            ledger.pair(
                source, destination, requests, blocks, budget=blocks, room=room, why="queue"
            )
    takers.put_back(roomiest)
    return room >= wanted


def _pass_head(ledger: Ledger, source: int, takers: Takers) -> None:
    """Who waits behind its head goes to the first of `takers`, if anybody fits there."""
    columns = ledger.columns
    behind, count = float(columns.behind[source]), float(columns.waiting[source]) - 1
    if count < 1:
        return
    roomiest = takers.take(source)
    if roomiest:
        destination = roomiest[0]
        room = ledger.room(destination)
        if room >= 1:
            blocks = min(room, behind)
            requests = math.ceil(count * blocks / max(behind, 1.0))
            ledger.pair(
                source, destination, requests, blocks, budget=blocks, room=room, why="queue"
            )
    takers.put_back(roomiest)


def make_room(ledger: Ledger) -> None:
    """Pair instances whose head fits nowhere with those who can take enough of what runs."""
    columns = ledger.columns
    missing = missing_blocks(ledger)
    possible = (columns.total >= columns.head) & (columns.running > columns.out)
    stuck = ledger.worst(ledger.serving & (missing > 0) & possible, missing)
    if not stuck:
        return
    takers = _takers(ledger)
    for source in stuck:
        roomiest = takers.take(source)
        _let_in(ledger, source, float(missing[source]), roomiest)
        takers.put_back(roomiest)


def _let_in(ledger: Ledger, source: int, need: float, roomiest: list[int]) -> None:
    """Move `need` blocks, if there is room for so many: some but not enough helps nobody."""
    rooms = [max(ledger.room(row), 0.0) for row in roomiest]
    if sum(rooms) < need or ledger.gives(source):
        return
    columns = ledger.columns
    average = max(float(columns.used[source] / columns.running[source]), 1.0)
    out = float(columns.out[source]) * average
    for row, room in zip(roomiest, rooms, strict=True):
        share = min(room, need)
        if share < 1:
            return
        budget, out = max(share - out, 0.0), max(out - share, 0.0)
        need -= share
        ledger.pair(source, row, share / average, share, budget=budget, room=room, why="defragment")


def _missing(ledger: Ledger) -> Column:
    """Blocks that the head of each queue lacks; 0 or less: it can start."""
    columns = ledger.columns
    missing: Column = columns.head - (columns.total - columns.used)
    return np.where(columns.waiting > 0, missing, 0.0)


def _keepers(ledger: Ledger) -> Takers:
    """Those with a headroom and the most room with it, and no queue: better there than waiting."""
    kept = ledger.columns.kept
    free = ledger.serving & (ledger.columns.waiting == 0) & (kept > 0)
    free &= ledger.batch < ledger.columns.seats
    return Takers(ledger, free, ledger.rooms() + kept, lambda row: ledger.room(row) + kept[row])


def _takers(ledger: Ledger) -> Takers:
    """Those with the most room and no queue of their own."""
    free = ledger.serving & (ledger.columns.waiting == 0) & (ledger.batch < ledger.columns.seats)
    return Takers(ledger, free, ledger.rooms(), ledger.room)
