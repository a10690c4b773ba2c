"""The workers' nodes that a deployment's instances are on. Pure.

The fleet chooses them and names them in its orders; the deployment reports them. A server that has
just started knows the first instances' from the deployment's record until it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmig.core.api_records import InstanceRow
from kvmig.fleet.cluster_nodes import InstanceDemand, InstanceHold


@dataclass(eq=False)
class InstanceNodes:
    """The nodes of one deployment's instances."""

    by_instance: dict[str, str] = field(default_factory=dict)
    """Nodes' ids by instances' names; those of instances that are gone may be among them."""
    coming: tuple[str, ...] = ()
    """Nodes of instances that are being ordered."""

    def node_of(self, row: InstanceRow) -> str:
        """The node's id; empty: it is not known."""
        return row.node or self.by_instance.get(row.id, "")

    def rows(self, rows: Sequence[InstanceRow]) -> Sequence[InstanceRow]:
        """The rows that the deployment reports; before it does, those of its first instances."""
        ordered = [InstanceRow(id=name, state="starting") for name in self.by_instance]
        return rows or ordered

    def holds(
        self, rows: Sequence[InstanceRow], demand: InstanceDemand, model: str = ""
    ) -> list[InstanceHold]:
        """What instances take of nodes. rows: those that the deployment reports; demand: of each
        of them; model: its name."""
        found = [
            InstanceHold(self.node_of(one), demand, one.state in ("serving", "draining"), model)
            for one in self.rows(rows)
        ]
        return found + [InstanceHold(one, demand, serves=False, model=model) for one in self.coming]
