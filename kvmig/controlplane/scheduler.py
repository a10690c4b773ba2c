"""The scheduler: runs the pure rules once a round. No sockets, no clock of its own."""

from __future__ import annotations

from kvmig.controlplane.freeness import Queued
from kvmig.controlplane.messages import Pair
from kvmig.controlplane.rebalance import Pairing, rebalance
from kvmig.controlplane.view import ClusterView
from kvmig.ground.config import SchedulerConfig

UNPAIR = Pair("", "")


class Scheduler:
    """Same views in the same order, same orders out."""

    def __init__(self, config: SchedulerConfig, queued: Queued = "all") -> None:
        self._config = config
        self._queued: Queued = queued
        self._pairings: list[Pairing] = []

    @property
    def rebalances(self) -> bool:
        """Whether rounds do anything: the other policies only dispatch."""
        return self._config.migration and self._config.policy == "freeness"

    def round(self, view: ClusterView) -> list[tuple[str, Pair]]:
        """What to tell which source now: its pair, renewed every round, or to stop."""
        if not self.rebalances:
            return []
        last, self._pairings = (
            self._pairings,
            rebalance(view, self._pairings, self._config, self._queued),
        )
        endpoints = {one.instance: one.endpoint for one in view.instances}
        paired = {
            pairing.source: Pair(
                pairing.destination,
                endpoints[pairing.destination],
                pairing.budget_blocks,
                pairing.room_blocks,
            )
            for pairing in self._pairings
        }
        over = (one.source for one in last if one.source not in paired)
        orders = {source: UNPAIR for source in over if source in endpoints}
        return [*orders.items(), *paired.items()]
