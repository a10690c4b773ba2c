"""The report of one migration: for the admin API, metrics and benchmarks."""

from __future__ import annotations

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
    """Epoch of this attempt: the destination runs the request under it, if it does."""
    reason: str = ""
    detail: str = ""
    why: str = ""
    """Why the request was moved: the scheduler's word (`Pair.why`), or by-hand."""
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
