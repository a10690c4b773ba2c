"""What one migration did: the one report type, for the admin API, metrics and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

Reason = Literal[
    "",
    "finished",
    "aborted_by_client",
    "preempted",
    "started",
    "unknown_request",
    "already_migrating",
    "no_blocks",
    "no_batch_slot",
    "busy",
    "unsupported",
    "incompatible",
    "corrupt",
    "timeout",
    "peer_lost",
    "orphaned",
    "superseded",
    "shutdown",
    "error",
]
"""Why a migration ended as it did; empty when it committed."""


class StageParts(msgspec.Struct):
    """Where a stage's time went, milliseconds summed over its chunks, which may overlap.

    wait: for a free staging slot and for bandwidth; gather: out of the source's cache;
    push: to the destination, as far as the source's side of it; scatter: into its cache.
    """

    wait: float = 0.0
    gather: float = 0.0
    push: float = 0.0
    scatter: float = 0.0


class StageReport(msgspec.Struct, frozen=True):
    """One live copy stage."""

    blocks: int
    bytes: int
    ms: float
    parts: StageParts = msgspec.field(default_factory=StageParts)


class Downtime(msgspec.Struct, frozen=True):
    """The pause in named parts, milliseconds, one after the other.

    drain: asking for the suspension until no step of the source holds the request;
    tail_copy: gathering and sending the last blocks; commit: until the destination
    has it in its queue; first_token: until the destination's first step ended
    (None when the request ended before, or didn't decode yet).
    """

    drain: float
    tail_copy: float
    commit: float
    first_token: float | None = None


class MigrationReport(msgspec.Struct, frozen=True, kw_only=True):
    """One migration, from request to end."""

    id: str
    request_id: str
    source: str
    destination: str
    state: Literal["committed", "aborted"]
    epoch: int = 0
    """Of this attempt: under which the destination runs the request, if it does."""
    reason: str = ""
    detail: str = ""
    why: str = ""
    """What it was for: the scheduler's word (`Pair.why`), or by-hand."""
    exact: bool | None = None
    """Whether both engines are of one numerics class; None: the destination wasn't asked."""
    transport: str = ""
    hit_blocks: int = 0
    """Blocks that the destination's prefix cache held: not sent."""
    stages: list[StageReport] = []
    fused_chunks: int = 0
    """Chunks that shared a transfer with those of other migrations."""
    tail_blocks: int = 0
    output_tokens: int | None = None
    """Tokens that the source put out; the next one is the destination's. None: never suspended."""
    bytes: int = 0
    total_ms: float = 0.0
    downtime_ms: Downtime | None = None
    """None when the request was never suspended."""
    ended_at: float = 0.0
    """Seconds since the epoch."""


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """One migration to attempt."""

    mid: str
    request_id: str
    epoch: int
    source: str
    destination: str
    gateway: str = ""
    output_tokens: int = 0
    urgent: bool = False
    """Somebody waits for its end: its pause isn't spread over the steps before it."""
    inexact: bool = False
    """It may go to an engine of another numerics class."""


class Timeline:
    """Stages and the pause of one migration, on one clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._stages: list[StageReport] = []
        self._pause: list[float] = []
        self.transport = ""
        self.exact: bool | None = None
        self.hit_blocks = 0
        self.tail_blocks = 0
        self.output_tokens: int | None = None
        self.bytes = 0
        self.fused_chunks = 0

    def now(self) -> float:
        """Seconds."""
        return self._clock()

    def stage(self, blocks: int, nbytes: int, since: float, parts: StageParts) -> None:
        """A live stage of `blocks` ended; `parts` may still grow until the report."""
        self._stages.append(StageReport(blocks, nbytes, (self._clock() - since) * 1e3, parts))

    def pause(self) -> None:
        """The pause begins, goes over to its next part, or (the fourth time) ends."""
        self._pause.append(self._clock())

    def resumed(self) -> None:
        """The request was put back: the pause ends in whatever part it was."""
        if self._pause:
            self._pause.append(self._clock())

    def downtime(self, first_token: float | None) -> Downtime | None:
        """The pause in parts; None when there was none."""
        if len(self._pause) < 2:
            return None
        parts = [(b - a) * 1e3 for a, b in zip(self._pause, self._pause[1:], strict=False)]
        drain, tail_copy, commit = [*parts, 0.0, 0.0][:3]
        return Downtime(drain, tail_copy, commit, first_token)

    def report(
        self,
        move: Move,
        state: Literal["committed", "aborted"],
        why: Sequence[str] = ("", ""),
        first_token: float | None = None,
        ended_at: float = 0.0,
    ) -> MigrationReport:
        """Everything, at the end. `why`: reason and detail; ended_at: seconds since the epoch."""
        return MigrationReport(
            id=move.mid,
            request_id=move.request_id,
            source=move.source,
            destination=move.destination,
            state=state,
            epoch=move.epoch,
            reason=why[0],
            detail=why[1],
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
            ended_at=ended_at,
        )


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
