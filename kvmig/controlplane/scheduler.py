"""The scheduler: runs the pure rules once a round. No sockets, no clock of its own."""

from __future__ import annotations

from kvmig.controlplane.ledger import Pairing
from kvmig.controlplane.messages import Pair, Pairs
from kvmig.controlplane.policy import Policy
from kvmig.controlplane.rebalance import rebalance
from kvmig.controlplane.view import ClusterView

UNPAIR = Pairs()


class Scheduler:
    """Same views in the same order, same orders out."""

    def __init__(self, policy: Policy) -> None:
        self._rounds = policy.rounds
        self._pairings: list[Pairing] = []

    @property
    def rebalances(self) -> bool:
        """Whether rounds do anything: some policies only dispatch."""
        return self._rounds is not None

    def round(self, view: ClusterView) -> list[tuple[str, Pairs]]:
        """What to tell which source now: its pairs, renewed every round, or to stop."""
        if self._rounds is None:
            return []
        last, self._pairings = (
            self._pairings,
            rebalance(view, self._pairings, self._rounds),
        )
        paired: dict[str, Pairs] = {}
        for pairing in self._pairings:
            pair = Pair(
                pairing.destination,
                pairing.endpoint,
                pairing.budget_blocks,
                pairing.room_blocks,
                pairing.why,
                pairing.priority,
            )
            before = paired.get(pairing.source, UNPAIR).pairs
            paired[pairing.source] = Pairs((*before, pair))
        over = {one.source: UNPAIR for one in last if one.source not in paired}
        if over:
            here = {one.instance for one in view.instances}
            over = {source: stop for source, stop in over.items() if source in here}
        return [*over.items(), *paired.items()]
