"""The paper's pairing (Llumnix, section 4.4.3), literally. Pure.

Sources have a freeness below one threshold, destinations above another; the lowest is
paired with the highest, the next lowest with the next highest, each once. No budget: a
source moves one request after the other until it isn't paired any more. In the artifact,
instances where preempted requests wait are sources, too.
"""

from __future__ import annotations

import math

import numpy as np

from kvmig.controlplane.ledger import Ledger
from kvmig.controlplane.messages import Why


def pair_extremes(ledger: Ledger) -> None:
    """Decide the pairs; draining instances are the lowest of all."""
    columns, rounds = ledger.columns, ledger.rounds
    idle = (ledger.batch == 0) & (ledger.free >= 0)
    freeness = np.where(idle, np.inf, ledger.free / np.maximum(ledger.batch, 1))
    movable = (ledger.serving | ledger.draining) & (columns.running > 0)
    short = columns.preempted > 0 if rounds.preempted_give else np.zeros(len(columns), bool)
    sources = ledger.worst(movable & (short | (freeness < rounds.source_below)), freeness)
    roomy = ledger.serving & ~short & (freeness > rounds.destination_above)
    destinations = ledger.best(roomy, freeness)
    for kind in dict.fromkeys(ledger.kinds[sources].tolist()):
        able = [row for row in destinations if ledger.kinds[row] == kind]
        give = [row for row in sources if ledger.kinds[row] == kind]
        for source, destination in zip(give, able, strict=False):
            if source != destination:
                why: Why = "drain" if ledger.draining[source] else "balance"
                ledger.pair(source, destination, 0, 0, budget=math.inf, room=math.inf, why=why)
