"""What the source of a migration is told to do next: each is an action of `SourceMachine`."""

from __future__ import annotations

from dataclasses import dataclass

from kvmig.engines.base import Tail


@dataclass(frozen=True, slots=True)
class Export:
    """Ask the engine for the request's description."""


@dataclass(frozen=True, slots=True)
class SendReserve:
    """Send Reserve and wait for the answer; stage 0 brings the export."""

    stage: int
    num_tokens: int
    last: bool = False
    """The pause comes next."""


@dataclass(frozen=True, slots=True)
class Check:
    """Ask the engine whether the request still is as it was, and what is new after `sent`."""

    sent: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Gather and send these blocks while the request decodes; `first` were sent before."""

    stage: int
    first: int
    block_ids: tuple[int, ...]
    places: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Suspend:
    """Take the request out of the batch."""

    sent: int


@dataclass(frozen=True, slots=True)
class SendTail:
    """Gather and send the rest, and Commit right behind."""

    first: int
    tail: Tail


@dataclass(frozen=True, slots=True)
class SendCommit:
    """Send Commit once more."""


@dataclass(frozen=True, slots=True)
class AskArbiter:
    """Ask the front end who runs the request."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Leave the request to the engine again: back into the batch, if it was out."""


@dataclass(frozen=True, slots=True)
class Release:
    """Free the request here."""


@dataclass(frozen=True, slots=True)
class SendAbort:
    """Tell the destination to free what it holds."""

    reason: str


Action = (
    Export | SendReserve | Check | Copy | Suspend | SendTail | SendCommit
    | AskArbiter | Resume | Release | SendAbort
)  # fmt: skip
