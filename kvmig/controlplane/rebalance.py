"""One round: which instances shall move requests where. Pure."""

from __future__ import annotations

from collections.abc import Collection

from kvmig.controlplane.ledger import Ledger, Pairing, Rounds
from kvmig.controlplane.view import ClusterView


def rebalance(view: ClusterView, last: Collection[Pairing], rounds: Rounds) -> list[Pairing]:
    """The pairs of this round.

    last: the pairs of the round before. A pair that isn't decided again is over (its
    source is back inside the thresholds, or it helps no more), and the reverse of one
    is never decided, whatever the estimates missed. A draining or stale instance
    takes nothing in; one that is stale, hangs or failed isn't asked to move anything either.
    """
    ledger = Ledger(view, last, rounds)
    for rule in rounds.rules:
        rule(ledger)
    return ledger.pairings
