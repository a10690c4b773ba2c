"""Messages between the llumlets of one migration: tagged, versioned, typed.

A migration is one attempt to move one request, named by `mid`. `epoch` fences it:
the front end takes tokens only from the highest epoch it has switched to, and no
epoch is used twice for a request.
"""

from __future__ import annotations

import msgspec

from kvmig.engines.base import RequestExport, RequestTail, StepCadence
from kvmig.rpc.messages import Hello, RpcMessage


class TransportOffer(msgspec.Struct, frozen=True):
    """A transport that the source can use, with what the destination needs to try it."""

    transport: str
    token: str = ""


class Reserve(RpcMessage, frozen=True, tag=True):
    """Source: reserve blocks before stage `stage`. Stage 0 brings the offers and the request.

    `RequestExport.payload` is the message's payload, not in here.
    """

    mid: str
    request_id: str
    epoch: int
    stage: int
    num_tokens: int
    export: RequestExport | None = None
    gateway: str = ""
    """The front end that owns the stream."""
    output_tokens: int = 0
    model: str = ""
    """The source's layout fingerprint, block tokens and runs: must agree."""
    numerics: str = ""
    """The source's numerics class: must agree, too, unless `inexact`."""
    inexact: bool = False
    """The request may go on where logits round differently."""
    offers: list[TransportOffer] = msgspec.field(default_factory=list)
    last: bool = False
    """The pause comes next: be ready."""


class Reserved(RpcMessage, frozen=True, tag=True):
    """Destination: the blocks are there. `hit_blocks` needn't travel (stage 0 only)."""

    mid: str
    stage: int
    hit_blocks: int
    transport: str
    token: str = ""
    """What the source needs to push into the destination's buffers (stage 0 only)."""
    cadence: StepCadence = StepCadence(0.0, 0.0)
    """The steps of the destination's engine, when it answered."""
    can_hold: bool = False
    """Whether the destination takes Expect."""
    exact: bool = True
    """Whether both engines are of one numerics class (stage 0 only)."""


class Refused(RpcMessage, frozen=True, tag=True):
    """Destination: no. Nothing of the migration is left here."""

    mid: str
    reason: str
    detail: str = ""


class Chunk(RpcMessage, frozen=True, tag=True):
    """Source: fused blocks of the request, from block `first` on.

    The bytes are in buffer `slot` of the transport, or in the message's payload frame.
    """

    mid: str
    stage: int
    first: int
    slot: int
    nbytes: int
    checksums: list[int]
    number: int = 0
    """Which push of the transport brings the bytes, where it needs to know."""
    urgent: bool = False
    """Whether the request is in its pause: no engine decodes it meanwhile."""
    offset: int = 0
    """Offset of the bytes in the slot, behind other migrations' chunks (see Bundle)."""
    places: list[int] = msgspec.field(default_factory=list)
    """Positions of the blocks in the request; empty: from `first` on, one after the other."""


class Bundle(RpcMessage, frozen=True, tag=True):
    """Source: chunks of several migrations in one slot, or one after the other in one payload."""

    chunks: list[Chunk]


class ChunkDone(RpcMessage, frozen=True, tag=True):
    """Destination: the chunk is in its blocks; `slot` may be used again."""

    mid: str
    slot: int
    scatter_ms: float
    device_ms: float | None = None
    """Part of it on the destination's device, by its events; None: no device copied."""


class Expect(RpcMessage, frozen=True, tag=True):
    """Source: Commit comes in about `ms`. Advice: nothing follows if it doesn't."""

    mid: str
    ms: float


class Commit(RpcMessage, frozen=True, tag=True):
    """Source: all blocks are sent, the request is suspended here; run it there. Idempotent."""

    mid: str
    request_id: str
    epoch: int
    tail: RequestTail
    blocks: int
    """Blocks of the request that must have come, those of the prefix hit included."""
    last: Chunk | None = None
    """The last blocks, if they come along."""


class Committed(RpcMessage, frozen=True, tag=True):
    """Destination: the request runs here. Never undone."""

    mid: str
    commit_ms: float


class FirstToken(RpcMessage, frozen=True, tag=True):
    """Destination: the first step after the commit has ended."""

    mid: str
    ms: float
    """Milliseconds since the commit."""


class Abort(RpcMessage, frozen=True, tag=True):
    """Source: give the migration up and free its blocks. Answered by Aborted or Committed."""

    mid: str
    reason: str


class Aborted(RpcMessage, frozen=True, tag=True):
    """Destination: nothing of the migration is left here."""

    mid: str


PeerMessage = (
    Hello
    | Reserve
    | Reserved
    | Refused
    | Chunk
    | Bundle
    | ChunkDone
    | Expect
    | Commit
    | Committed
    | FirstToken
    | Abort
    | Aborted
)
"""Everything that two llumlets say to each other."""

PAYLOAD_SLOT = -1
"""`Chunk.slot` when the bytes travel in the message itself."""
