"""The timeline of one migration: measured by its source, and made into the report."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Literal

import msgspec

from kvmig.core.clock import TimeSource
from kvmig.kvtransfer.report import (
    ChunkTimes,
    DowntimeParts,
    MigrationReport,
    StageParts,
    StageReport,
)

Part = Literal["drain", "tail copy", "commit", "end"]
"""The parts of the pause, in order: the running step ends, the tail is copied, the destination
commits. A pause that is given up may end in any of them."""


class MigrationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One migration to attempt."""

    mid: str
    request_id: str
    epoch: int
    source: str
    destination: str
    gateway: str = ""
    output_tokens: int = 0
    urgent: bool = False
    """Whether the end is waited for: the pause isn't spread over the steps before it then."""
    inexact: bool = False
    """The request may go to an engine of another numerics class."""
    after_prompt: bool = False
    """The request's prompt is computed to its end before the request goes."""
    idle: bool = False
    """A session without a request: see `RequestExport.idle`."""


class MigrationTimeline:
    """Stages and the pause of one migration, on one clock."""

    def __init__(self, move: MigrationSpec, clock: TimeSource) -> None:
        self._move = move
        self._clock = clock
        self._began = clock()
        self._stages: list[StageReport] = []
        self._marks: list[tuple[Part, float]] = []
        self.transport = ""
        self.exact: bool | None = None
        self.hit_blocks = 0
        self.tail_blocks = 0
        self.output_tokens: int | None = None
        self.bytes = 0
        self.fused_chunks = 0
        self.commit_engine_ms: float | None = None

    def stage(
        self, blocks: int, nbytes: int, since: float, parts: StageParts, chunks: list[ChunkTimes]
    ) -> None:
        """A live stage of `blocks` ended; `parts` and `chunks` may still grow until the report."""
        ms = (self._clock() - since) * 1e3
        began_ms = (since - self._began) * 1e3
        self._stages.append(StageReport(blocks, nbytes, ms, parts, chunks, began_ms))

    @property
    def pausing(self) -> bool:
        """Whether a part of the pause has begun."""
        return bool(self._marks)

    def mark(self, part: Part) -> None:
        """A part of the pause begins."""
        self._marks.append((part, self._clock()))

    def resumed(self) -> None:
        """Note that the request was put back, or is gone: the pause ends in any part of it."""
        if self._marks:
            self.mark("end")

    def downtime(self, first_token: float | None = None) -> DowntimeParts | None:
        """The pause in parts; None when there was none."""
        if len(self._marks) < 2:
            return None
        ms = {part: (end - begin) * 1e3 for (part, begin), (_, end) in pairwise(self._marks)}
        began_ms = (self._marks[0][1] - self._began) * 1e3
        return DowntimeParts(
            ms["drain"], ms.get("tail copy", 0.0), ms.get("commit", 0.0), first_token, began_ms
        )

    def committed(self, first_token: float | None) -> MigrationReport:
        """The report of a migration that was committed."""
        return self._report("committed", first_token=first_token)

    def aborted(self, reason: str, detail: str) -> MigrationReport:
        """The report of a migration that was given up."""
        return self._report("aborted", reason, detail)

    def _report(
        self,
        state: Literal["committed", "aborted"],
        reason: str = "",
        detail: str = "",
        first_token: float | None = None,
    ) -> MigrationReport:
        move = self._move
        return MigrationReport(
            id=move.mid,
            request_id=move.request_id,
            source=move.source,
            destination=move.destination,
            state=state,
            epoch=move.epoch,
            reason=reason,
            detail=detail,
            exact=self.exact,
            transport=self.transport,
            hit_blocks=self.hit_blocks,
            stages=self._stages,
            fused_chunks=self.fused_chunks,
            tail_blocks=self.tail_blocks,
            output_tokens=self.output_tokens,
            bytes=self.bytes,
            total_ms=(self._clock() - self._began) * 1e3,
            downtime_ms=self.downtime(first_token),
            commit_engine_ms=self.commit_engine_ms,
            ended_at=time.time(),
        )
