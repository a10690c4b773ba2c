"""Priority: those who run beside a protected request give way when its headroom is used. Pure."""

from __future__ import annotations

import math

from kvmig.controlplane.ledger import MAX_DESTINATIONS, Ledger
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
    takers = ledger.best(roomy, slacks)
    for source in sources:
        _clear(ledger, source, min(float(over[source]), float(columns.lower[source])), takers)


def _clear(ledger: Ledger, source: int, need: float, takers: list[int]) -> None:
    columns = ledger.columns
    average = max(float(columns.used[source] / columns.running[source]), 1.0)
    out = float(columns.out[source]) * average
    floor = max(ledger.rounds.destination_above, 0.0)
    pairs = 0
    for row in takers:
        room = float(ledger.free[row] - floor * (ledger.batch[row] + 1))
        blocks = min(need, room)
        if need <= 0 or pairs == MAX_DESTINATIONS:
            return
        if blocks < 1 or not ledger.may_pair(source, row):
            continue
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
        pairs += 1


def protected_priority(one: InstanceView) -> int | None:
    """The first priority with headroom that has a running request there."""
    running = [its.priority for its in one.load.classes if its.running] or [0]
    return min((priority for priority in running if one.headroom.get(priority)), default=None)
