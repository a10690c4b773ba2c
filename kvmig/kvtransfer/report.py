"""The report of one migration: for the admin API, metrics and benchmarks."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

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
    """Parts of a stage's time, in milliseconds summed over its chunks, which may overlap."""

    wait: Annotated[
        float,
        Meta(
            description="For a free staging slot, for bandwidth and for others' copies, while none "
            "of the stage's chunks was gathered."
        ),
    ] = 0.0
    gather: Annotated[float, Meta(description="Out of the source's cache.")] = 0.0
    push: Annotated[
        float, Meta(description="To the destination, as far as the source's side of it.")
    ] = 0.0
    scatter: Annotated[float, Meta(description="Into the destination's cache.")] = 0.0
    gather_device: Annotated[
        float | None,
        Meta(description="Of gather on the source's GPU, by its events; null: no GPU gathered."),
    ] = None
    scatter_device: Annotated[
        float | None,
        Meta(description="Of scatter on the destination's GPU; null: no GPU scattered."),
    ] = None


class ChunkTimes(msgspec.Struct):
    """One chunk of a stage: milliseconds since the stage began, by the source's clock."""

    bytes: int
    turn: Annotated[float, Meta(description="The chunk two before it was on its way.")]
    gather: Annotated[
        float, Meta(description="It had its slot, and the gather before it was over.")
    ] = 0.0
    push: Annotated[float, Meta(description="It was gathered.")] = 0.0
    sent: Annotated[
        float, Meta(description="The source's side of the push was over; pushes keep the order.")
    ] = 0.0
    answered: Annotated[
        float | None,
        Meta(description="The destination had scattered it; null: no answer has come."),
    ] = None
    scatter: Annotated[float, Meta(description="How long the scatter took there.")] = 0.0
    gather_device: Annotated[
        float | None,
        Meta(description="How long the source's GPU took to gather, by its events."),
    ] = None
    scatter_device: Annotated[
        float | None,
        Meta(description="How long the destination's GPU took to scatter, by its events."),
    ] = None


class StageReport(msgspec.Struct, frozen=True):
    """One live copy stage."""

    blocks: int
    bytes: int
    ms: float
    parts: StageParts = msgspec.field(default_factory=StageParts)
    chunks: Annotated[
        list[ChunkTimes], Meta(description="The first 64 chunks, in the order in which they went.")
    ] = msgspec.field(default_factory=list)
    began_ms: Annotated[
        float | None, Meta(description="Since the migration began; null: it isn't known.")
    ] = None


class DowntimeParts(msgspec.Struct, frozen=True):
    """The pause in named parts, milliseconds, one after the other."""

    drain: Annotated[
        float,
        Meta(
            description="From asking for the suspension until no step of the source holds the "
            "request."
        ),
    ]
    tail_copy: Annotated[float, Meta(description="Gathering and sending the last blocks.")]
    commit: Annotated[float, Meta(description="Until the destination has it in its queue.")]
    first_token: Annotated[
        float | None,
        Meta(
            description="Until the destination's first step ended; null when the request ended "
            "before, or didn't decode yet."
        ),
    ] = None
    began_ms: Annotated[
        float | None, Meta(description="Since the migration began; null: it isn't known.")
    ] = None

    @property
    def whole_ms(self) -> float:
        """The pause with all its parts."""
        return self.drain + self.tail_copy + self.commit + (self.first_token or 0.0)


class MigrationReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of one migration."""

    id: str
    request_id: str
    source: str
    destination: str
    state: Literal["committed", "aborted"]
    epoch: int = 0
    """Epoch of this attempt: the destination runs the request under it, if it does."""
    reason: Annotated[str, Meta(description="One word; empty when it committed.")] = ""
    detail: str = ""
    why: Annotated[str, Meta(description="What it was for: the scheduler's word, or by-hand.")] = ""
    exact: Annotated[
        bool | None,
        Meta(
            description="Whether both instances are of one numerics class, so that the move "
            "changed no token; null when the destination wasn't asked."
        ),
    ] = None
    transport: str = ""
    hit_blocks: Annotated[
        int, Meta(description="Found in the destination's prefix cache, not sent.")
    ] = 0
    stages: list[StageReport] = []
    fused_chunks: Annotated[
        int, Meta(description="Chunks that shared a transfer with those of other migrations.")
    ] = 0
    tail_blocks: int = 0
    output_tokens: Annotated[
        int | None,
        Meta(
            description="Tokens that the source put out; the next one is the destination's. "
            "null when the request was never suspended."
        ),
    ] = None
    bytes: int = 0
    total_ms: float = 0.0
    downtime_ms: Annotated[
        DowntimeParts | None, Meta(description="null when the request was never suspended.")
    ] = None
    commit_engine_ms: Annotated[
        float | None,
        Meta(
            description="Of the pause's commit: in the destination's engine; null when the "
            "destination answered none."
        ),
    ] = None
    ended_at: Annotated[float, Meta(description="Unix time.")] = 0.0
