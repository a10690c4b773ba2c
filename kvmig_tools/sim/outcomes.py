"""What came of a run: a row a request, totals, and their summary."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvmig_tools.sim.engine import SimEngine
from kvmig_tools.sim.migration import Outcome
from kvmig_tools.sim.request import SimRequest

COLUMNS = (
    "arrival_s",
    "e2e_s",
    "ttft_s",
    "tpot_s",
    "loss_s",
    "input_tokens",
    "output_tokens",
    "priority",
    "preemptions",
    "migrations",
    "paused_s",
)
"""tpot_s: seconds a token after the first (0 with a single one); loss_s: queueing and
recompute after preemptions."""


class _Instance(Protocol):
    engine: SimEngine


class Outcomes:
    """8 bytes a column and request, nothing else grows."""

    def __init__(self) -> None:
        self._rows = array("d")
        self.refused = 0
        self.migrations: Counter[str] = Counter()
        """By end: committed, or why it was aborted."""
        self.migration_s = 0.0
        self.end_s = 0.0
        self.instance_s = 0.0
        """Seconds that instances were there, each from its start's decision."""
        self.busy_s = 0.0
        self.copied_bytes = 0.0

    def refuse(self, request: SimRequest) -> None:
        """It is larger than an instance."""
        self.refused += 1

    def finish(self, request: SimRequest) -> None:
        """Its last token is out."""
        output = request.generated
        decoding = request.finished_at - request.first_token_at
        self._rows.extend(
            (
                request.arrival,
                request.finished_at - request.arrival,
                request.first_token_at - request.arrival,
                decoding / (output - 1) if output > 1 else 0.0,
                request.lost_s,
                request.input_tokens,
                output,
                request.priority,
                request.preemptions,
                request.migrations,
                request.paused_s,
            )
        )

    def migrated(self, outcome: Outcome) -> None:
        """A migration ended."""
        committed = outcome.state == "committed"
        self.migrations["committed" if committed else outcome.reason] += 1
        if committed:
            self.migration_s += outcome.ended_at - outcome.began_at

    def close(self, now: float, instances: Iterable[_Instance], copied_bytes: float) -> None:
        """The run is over."""
        self.end_s = now
        self.busy_s = sum(one.engine.busy_s for one in instances)
        self.copied_bytes = copied_bytes

    def table(self) -> NDArray[np.float64]:
        """[requests, len(COLUMNS)], in the order in which they finished."""
        return np.frombuffer(self._rows, dtype=np.float64).reshape(-1, len(COLUMNS))

    def column(self, name: str, priority: int | None = None) -> NDArray[np.float64]:
        """One column, of the requests of one priority if that is given."""
        table = self.table()
        if priority is not None:
            table = table[table[:, COLUMNS.index("priority")] == priority]
        values: NDArray[np.float64] = table[:, COLUMNS.index(name)]
        return values

    def summary(self, priority: int | None = None) -> dict[str, float]:
        """Figures by name, times in seconds."""
        figures: dict[str, float] = {}
        for name in ("e2e_s", "ttft_s", "tpot_s", "loss_s"):
            values = self.column(name, priority)
            if name == "tpot_s":
                values = values[self.column("output_tokens", priority) > 1]
            if not len(values):
                values = np.zeros(1)
            stem = name.removesuffix("_s")
            figures[f"{stem}_mean_s"] = float(values.mean())
            figures[f"{stem}_p50_s"] = float(np.percentile(values, 50))
            figures[f"{stem}_p99_s"] = float(np.percentile(values, 99))
        figures["loss_share_p99"] = self._loss_share(priority)
        figures["requests"] = float(len(self.column("e2e_s", priority)))
        figures["preempted_share"] = float((self.column("preemptions", priority) > 0).mean())
        figures["preemptions"] = float(self.column("preemptions", priority).sum())
        if priority is None:
            figures["refused"] = float(self.refused)
            figures["migrations"] = float(self.migrations["committed"])
            figures["migrations_aborted"] = float(
                self.migrations.total() - self.migrations["committed"]
            )
            figures["migrating_share"] = float(
                self.migration_s / max(self.column("e2e_s").sum(), 1e-9)
            )
            figures["copied_bytes"] = self.copied_bytes
            figures["busy_share"] = self.busy_s / self.instance_s if self.instance_s else 0.0
            figures["end_s"] = self.end_s
            figures["instances_mean"] = self.instance_s / self.end_s if self.end_s else 0.0
            figures["instance_hours"] = self.instance_s / 3600
        return figures

    def _loss_share(self, priority: int | None) -> float:
        """Of the decoding time of the slowest hundredth (by time a token): lost by preemption."""
        tpot, output = self.column("tpot_s", priority), self.column("output_tokens", priority)
        if not len(tpot):
            return 0.0
        slowest = tpot >= np.percentile(tpot, 99)
        decoding = (tpot * (output - 1))[slowest].sum()
        lost = self.column("loss_s", priority)[slowest].sum()
        return float(lost / decoding) if decoding else 0.0
