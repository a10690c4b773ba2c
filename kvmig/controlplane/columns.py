"""The cluster as columns: one row an instance, so that a decision over all of them is quick.

A report changes one row; a policy computes over whole columns. With 10,000 instances a
column is 80 kB, and an operation on one takes some microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]
Mask = NDArray[np.bool_]

FIELDS = (
    "total",
    "free",
    "behind",
    "room",
    "share",
    "used",
    "head",
    "prompts",
    "running",
    "waiting",
    "requests",
    "out",
    "seats",
    "kept",
    "lower",
    "preempted",
    "movable",
    "weights",
    "numerics",
    "state",
    "fresh_until",
    "open_until",
)
SERVING, STARTING, DRAINING = 0.0, 1.0, 2.0


class Columns:
    """Rows in a fixed order; sizes in KV blocks, see `InstanceView`. Read-only outside.

    weights, numerics: numbers that are equal where requests can move, and where they do so exactly.
    """

    def __init__(self, rows: Iterable[tuple[float, ...]] = ()) -> None:
        table = np.array(list(rows), dtype=np.float64).reshape(-1, len(FIELDS))
        self._take(np.ascontiguousarray(table.T))

    def _take(self, table: Column) -> None:
        self._table = table
        (
            self.total,
            self.free,
            self.behind,
            self.room,
            self.share,
            self.used,
            self.head,
            self.prompts,
            self.running,
            self.waiting,
            self.requests,
            self.out,
            self.seats,
            self.kept,
            self.lower,
            self.preempted,
            self.movable,
            self.weights,
            self.numerics,
            self.state,
            self.fresh_until,
            self.open_until,
        ) = (_read_only(column) for column in self._table)

    def only(self, rows: Mask) -> Columns:
        """A copy of these rows."""
        some = Columns()
        some._take(np.ascontiguousarray(self._table[:, rows]))
        return some

    def __len__(self) -> int:
        return len(self.total)

    def set(self, row: int, values: tuple[float, ...]) -> None:
        """Replace a row."""
        self._table[:, row] = values


def _read_only(column: Column) -> Column:
    view = column.view()
    view.flags.writeable = False
    return view
