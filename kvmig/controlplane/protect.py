"""Priority: those who run beside a protected request give way when its headroom is used. Pure."""

from __future__ import annotations

import math

from kvmig.controlplane.ledger import Ledger, Takers
from kvmig.controlplane.view import InstanceView


def protect(ledger: Ledger) -> None:
    """Pair instances that keep less free than their headroom with ones that keep none."""
    columns = ledger.columns
    if not columns.kept.any():
        return
    over = columns.used + columns.kept - columns.total
    crowded = ledger.serving & (columns.kept > 0) & (over > 0) & (columns.lower > 0)
    sources = ledger.worst(crowded & (columns.running > columns.out), -over)
    slacks = ledger.slacks()
    roomy = ledger.serving & (columns.kept == 0) & (slacks > ledger.rounds.destination_above)
    takers = Takers(ledger, roomy, slacks, ledger.slack)
    for source in sources:
        roomiest = takers.take(source)
        need = min(float(over[source]), float(columns.lower[source]))
        _clear(ledger, source, need, roomiest)
        takers.put_back(roomiest)


def _clear(ledger: Ledger, source: int, need: float, roomiest: list[int]) -> None:
    columns = ledger.columns
    average = max(float(columns.used[source] / columns.running[source]), 1.0)
    out = float(columns.out[source]) * average
    for row in roomiest:
        room = ledger.room(row)
        blocks = min(need, room)
        if blocks < 1:
            return
        ledger.pair(
            source,
            row,
            math.ceil(blocks / average),
            blocks,
            budget=max(blocks - out, 0.0),
            room=room,
            why="priority",
            priority=protected_priority(ledger.view.instances[source]),
        )
        out = max(out - blocks, 0.0)
        need -= blocks


def protected_priority(one: InstanceView) -> int | None:
    """The first priority with headroom that has a running request there."""
    running = [its.priority for its in one.load.classes if its.running] or [0]
    return min((priority for priority in running if one.headroom.get(priority)), default=None)
