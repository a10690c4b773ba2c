"""Queues that can't start gather on some instances, so that prompts that come find others open.

An engine starts requests in order: one that needs more blocks than are free holds up all behind
it, and everybody who comes. When memory is short everywhere each instance has such a head, one
that was preempted and is large by then, and a short prompt waits behind it wherever it is
dispatched, though there are blocks for it. What waits holds nothing, so a queue can be moved at
once: half of the instances are kept open, and the others, to which nothing new is dispatched,
leave what becomes free there to their queues.

Only queues with a preempted request are stuck in this sense: long prompts that come in a burst
wait for each other's prefill, and would only wait longer behind more of them.
"""

from __future__ import annotations

import numpy as np

from kvmig.controlplane.columns import Mask
from kvmig.controlplane.defragment import missing_blocks, unheld_blocks
from kvmig.controlplane.ledger import Ledger

OPEN_SHARE = 0.5
"""Of the serving instances: those that shall be able to start a prompt at once."""
OPEN_BLOCKS = 20.0
"""Free blocks that make an instance without a queue open."""


def gather(ledger: Ledger) -> None:
    """Pair instances that give their queues with ones that have to keep theirs."""
    columns, serving = ledger.columns, ledger.serving
    free = unheld_blocks(ledger)
    roomy = serving & (free >= OPEN_BLOCKS)
    lacking = int(OPEN_SHARE * serving.sum()) - int((roomy & (columns.waiting == 0)).sum())
    stuck: Mask = serving & (missing_blocks(ledger) > 0) & (columns.preempted > 0)
    if lacking <= 0 or stuck.sum() < 2:
        return
    # The fewest requests to move; of equals where most is free. Not where room is being made.
    by = columns.waiting - free / np.maximum(columns.total, 1)
    givers = [row for row in ledger.worst(stuck & roomy, by) if not ledger.gives(row)][:lacking]
    queued = columns.head + columns.behind
    keepers = [row for row in ledger.best(stuck, free - queued) if row not in givers]
    length = {row: float(queued[row] - free[row]) for row in keepers}
    for source in givers:
        able = [row for row in keepers if ledger.may_pair(source, row)]
        if not able:
            continue
        destination = min(able, key=lambda row: length[row])
        blocks = float(queued[source])
        length[destination] += blocks
        requests = float(columns.waiting[source])
        ledger.pair(source, destination, requests, blocks, budget=blocks, room=blocks, why="queue")
