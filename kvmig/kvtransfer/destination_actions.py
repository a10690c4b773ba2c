"""What the destination of a migration is told to do next: each is an action of
`DestinationMachine`."""

from __future__ import annotations

from dataclasses import dataclass

from kvmig.engines.base import Export, Tail
from kvmig.kvtransfer.messages import Chunk, Message


@dataclass(frozen=True, slots=True)
class ReserveBlocks:
    """Ask the engine for blocks: for a new request (`export`), or more for it."""

    export: Export | None
    num_tokens: int
    last: bool = False
    """The pause comes next: have the engine prepare, too."""


@dataclass(frozen=True, slots=True)
class Scatter:
    """Copy the chunk into the request's blocks and compare checksums."""

    chunk: Chunk


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Commit in the engine; `last` are blocks that come along."""

    tail: Tail
    last: Chunk | None = None


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """Cancel the engine's reservation."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Send this to the source."""

    message: Message


Action = ReserveBlocks | Scatter | RunRequest | FreeBlocks | Answer
