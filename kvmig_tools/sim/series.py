"""The cluster over time: one row a sample."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvmig_tools.sim.engine import SimEngine

FIELDS = ("time_s", "instances", "total_blocks", "free_blocks", "queued_blocks", "head_blocks",
          "requests")  # fmt: skip
"""queued_blocks: what all that wait need to start; head_blocks: the heads of the queues only."""


class _Instance(Protocol):
    engine: SimEngine


class Series:
    """Samples at equal distances of virtual time."""

    def __init__(self) -> None:
        self._rows = array("d")

    def sample(self, now: float, instances: Iterable[_Instance]) -> None:
        """Take one."""
        count = total = free = queued = heads = requests = 0
        for one in instances:
            engine = one.engine
            count += 1
            total += engine.total
            free += engine.total - engine.used_now()
            queued += engine.waiting.blocks
            if engine.waiting:
                heads += engine.waiting.demand(engine.waiting.head)
            requests += engine.running + len(engine.waiting)
        self._rows.extend((now, count, total, free, queued, heads, requests))

    def column(self, name: str) -> NDArray[np.float64]:
        """[samples] values of one field."""
        rows = np.frombuffer(self._rows, dtype=np.float64).reshape(-1, len(FIELDS))
        values: NDArray[np.float64] = rows[:, FIELDS.index(name)]
        return values

    def summary(self) -> dict[str, float]:
        """Figures by name; none without samples."""
        total = self.column("total_blocks").sum()
        if not total:
            return {}
        used = total - self.column("free_blocks").sum()
        return {
            "memory_share": float(used / total),
            "fragmented_share": self.fragmented_share(),
        }

    def fragmented_share(self) -> float:
        """Of the cluster's memory: free, wanted by a queue's head, and not to be had in one piece.

        The paper's figure 5: where the heads that wait would fit into the free memory of all
        instances together, what they want is fragmented.
        """
        wanted = np.minimum(self.column("head_blocks"), self.column("free_blocks"))
        total = self.column("total_blocks").sum()
        return float(wanted.sum() / total) if total else 0.0
