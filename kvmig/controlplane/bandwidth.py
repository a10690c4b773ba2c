"""How fast migrations out of an instance have lately sent KV blocks. Pure."""

from __future__ import annotations

from kvmig.kvtransfer.report import MigrationReport

_NEWEST = 0.3
"""Weight of the newest migration."""


class Bandwidth:
    """An average of what live stages measured, newer ones weighing more."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._blocks_s = 0.0

    @property
    def blocks_s(self) -> float:
        """KV blocks a second; 0: none was measured."""
        return self._blocks_s

    def take(self, report: MigrationReport) -> None:
        """A migration has ended, well or not; what it copied live counts."""
        ms = sum(stage.ms for stage in report.stages)
        nbytes = sum(stage.bytes for stage in report.stages)
        if ms <= 0 or nbytes <= 0:
            return
        rate = nbytes / self._block_bytes / (ms / 1000)
        weight = _NEWEST if self._blocks_s else 1.0
        self._blocks_s += weight * (rate - self._blocks_s)
