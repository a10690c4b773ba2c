"""Drain: everything that a draining instance holds goes to several others. Pure."""

from __future__ import annotations

import math

from kvmig.controlplane.ledger import Ledger, Takers


def drain(ledger: Ledger) -> None:
    """Pair each draining instance with the roomiest, an equal share of its requests each."""
    columns = ledger.columns
    held = columns.running + columns.waiting
    sources = ledger.worst(ledger.draining & (held > columns.out), held)
    if not sources:
        return
    takers = Takers(ledger, ledger.serving, ledger.slacks(), ledger.slack)
    for source in sources:
        roomiest = takers.take(source)
        _empty(ledger, source, roomiest)
        takers.put_back(roomiest)


def _empty(ledger: Ledger, source: int, roomiest: list[int]) -> None:
    columns = ledger.columns
    held = float(columns.running[source] + columns.waiting[source])
    wanted = float(columns.used[source] + columns.head[source] + columns.behind[source])
    average = max(wanted / held, 1.0)
    left, out = math.ceil(held), float(columns.out[source])
    for place, destination in enumerate(roomiest):
        free = float(ledger.free[destination])
        share = math.ceil(left / (len(roomiest) - place))
        requests = min(share, math.floor(max(free, 0.0) / average))
        if requests < 1 and columns.waiting[source] == 0 and free < 1:
            continue
        # Those that wait take no room from anybody who runs: they go whatever the budget is.
        budget = max(requests - out, 0.0) * average
        out = max(out - requests, 0.0)
        left -= requests
        ledger.pair(
            source,
            destination,
            requests,
            requests * average,
            budget=budget,
            room=max(free, 0.0),
            why="drain",
        )
