"""The destination's half of the handshake: pure, messages and results in, actions out.

It never runs a request before Commit and never gives one up after it. When it has ended it
stays as a tombstone: it answers late and repeated messages the same way, so a lost answer can
be asked for again, and a cancelled migration can't commit. `source_machine` has the theory of
operation of both halves.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import ClassVar

from kvmig.engines.base import RequestExport, RequestTail
from kvmig.kvtransfer.machine import StateMachine, Table
from kvmig.kvtransfer.messages import (
    Abort,
    Aborted,
    Chunk,
    ChunkDone,
    Commit,
    Committed,
    Refused,
    Reserve,
    Reserved,
)
from kvmig.rpc.messages import RpcMessage


@dataclass(frozen=True, slots=True)
class ReserveBlocks:
    """Ask the engine for blocks: for a new request (`export`), or more for it."""

    export: RequestExport | None
    num_tokens: int
    last: bool = False
    """The pause comes next: have the engine prepare, too."""


@dataclass(frozen=True, slots=True)
class ScatterChunk:
    """Copy the chunk into the request's blocks and compare checksums."""

    chunk: Chunk


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Commit in the engine; `last` are blocks that come along."""

    tail: RequestTail
    last: Chunk | None = None


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """Cancel the engine's reservation."""


@dataclass(frozen=True, slots=True)
class SendAnswer:
    """Send this to the source."""

    message: RpcMessage


Action = ReserveBlocks | ScatterChunk | RunRequest | FreeBlocks | SendAnswer
SourceMessage = Reserve | Chunk | Commit | Abort
"""Messages that the machine takes; others of the source aren't its business."""


class DestinationState(StrEnum):
    """States of the destination."""

    NEW = auto()
    RESERVING = auto()
    RECEIVING = auto()
    SCATTERING = auto()
    COMMITTING = auto()
    COMMITTED = auto()
    CANCELLED = auto()


class DestinationTransition(StrEnum):
    """Events at the destination."""

    RESERVE = auto()
    RESERVED = auto()
    CHUNK = auto()
    SCATTERED = auto()
    COMMIT = auto()
    COMMITTED = auto()
    FAILED = auto()
    """The engine refused, or what came in can't be used."""
    ABORT = auto()
    FENCE = auto()
    CANCEL = auto()
    """The lease ran out, the client left, or the instance stops."""


_LATE = (
    DestinationTransition.RESERVE,
    DestinationTransition.CHUNK,
    DestinationTransition.COMMIT,
    DestinationTransition.ABORT,
    DestinationTransition.FENCE,
    DestinationTransition.CANCEL,
)
"""Events that may still come when the machine has ended."""


class DestinationMachine(StateMachine):
    """One attempt to move one request here. Each method is an event."""

    table: ClassVar[Table] = {
        DestinationState.NEW: {
            DestinationTransition.RESERVE: DestinationState.RESERVING,
            DestinationTransition.CHUNK: DestinationState.NEW,
            DestinationTransition.COMMIT: DestinationState.CANCELLED,
            DestinationTransition.FAILED: DestinationState.CANCELLED,
            DestinationTransition.ABORT: DestinationState.CANCELLED,
            DestinationTransition.FENCE: DestinationState.CANCELLED,
            DestinationTransition.CANCEL: DestinationState.CANCELLED,
        },
        DestinationState.RESERVING: {
            DestinationTransition.RESERVED: DestinationState.RECEIVING,
            DestinationTransition.FAILED: DestinationState.CANCELLED,
            DestinationTransition.CANCEL: DestinationState.CANCELLED,
        },
        DestinationState.RECEIVING: {
            DestinationTransition.RESERVE: DestinationState.RESERVING,
            DestinationTransition.CHUNK: DestinationState.SCATTERING,
            DestinationTransition.COMMIT: DestinationState.COMMITTING,
            DestinationTransition.FAILED: DestinationState.CANCELLED,
            DestinationTransition.ABORT: DestinationState.CANCELLED,
            DestinationTransition.FENCE: DestinationState.CANCELLED,
            DestinationTransition.CANCEL: DestinationState.CANCELLED,
        },
        DestinationState.SCATTERING: {
            DestinationTransition.SCATTERED: DestinationState.RECEIVING,
            DestinationTransition.FAILED: DestinationState.CANCELLED,
            DestinationTransition.CANCEL: DestinationState.CANCELLED,
        },
        DestinationState.COMMITTING: {
            DestinationTransition.COMMITTED: DestinationState.COMMITTED,
            DestinationTransition.FAILED: DestinationState.CANCELLED,
        },
        DestinationState.COMMITTED: dict.fromkeys(_LATE, DestinationState.COMMITTED),
        DestinationState.CANCELLED: dict.fromkeys(_LATE, DestinationState.CANCELLED),
    }

    def __init__(self, mid: str) -> None:
        super().__init__(mid, DestinationState.NEW)
        self._stage = 0
        self._hit = 0
        self._transport = ""
        self._opened = False
        self._answer: RpcMessage = Aborted(mid)
        """The answer to a repeated Reserve or Commit once the machine has ended."""
        self.received = 0
        """Blocks of the request, from the first on, that came: hits and scattered ones."""

    @property
    def committed_here(self) -> bool:
        """Whether the request was committed: the answer to Fence."""
        return self.state is DestinationState.COMMITTED

    # -- messages

    def receive_message(self, message: SourceMessage) -> list[Action]:
        """A message of the source, whichever it is."""
        match message:
            case Reserve():
                return self.reserve(message)
            case Chunk():
                return self.chunk(message)
            case Commit():
                return self.commit(message)
            case Abort():
                return self.abort()

    def reserve(self, message: Reserve) -> list[Action]:
        """The source asks for blocks before a stage. A repeated Reserve is answered again."""
        if self.state is DestinationState.NEW and message.export is None:
            return self.failed("error", "a later stage of a migration that isn't known")
        opening = self.state is DestinationState.NEW
        self.apply_event(DestinationTransition.RESERVE)
        if self.ended:
            return [SendAnswer(self._answer)]
        self._stage = message.stage
        export = message.export if opening else None
        return [ReserveBlocks(export, message.num_tokens, message.last)]

    def chunk(self, message: Chunk) -> list[Action]:
        """Blocks came in: in order, and never into those that the prefix cache shares."""
        if (
            self.state is DestinationState.RECEIVING
            and not self._hit <= message.first <= self.received
        ):
            return self.failed("error", f"block {message.first} came after {self.received}")
        self.apply_event(DestinationTransition.CHUNK)
        return [ScatterChunk(message)] if self.state is DestinationState.SCATTERING else []

    def commit(self, message: Commit) -> list[Action]:
        """Run the request, once: all blocks are here. A repeated Commit gets the same answer."""
        came = self._come_with(message)
        if self.state is DestinationState.RECEIVING and (came < 0 or message.blocks != came):
            return self.failed("error", f"{came} of {message.blocks} blocks came")
        unknown = self.state is DestinationState.NEW
        self.apply_event(DestinationTransition.COMMIT)
        if unknown:
            return self._refuse("superseded", "the migration isn't known")
        return (
            [SendAnswer(self._answer)] if self.ended else [RunRequest(message.tail, message.last)]
        )

    def abort(self) -> list[Action]:
        """The source gives up; too late after a commit."""
        was = self.state
        self.apply_event(DestinationTransition.ABORT)
        if self.committed_here:
            return [SendAnswer(self._answer)]
        self._answer = Refused(self.key, "superseded", "aborted before")
        return [*_free(was), SendAnswer(Aborted(self.key))]

    def fence(self) -> list[Action]:
        """The arbiter asks: committed or never. Afterwards `committed_here` is final."""
        was = self.state
        self.apply_event(DestinationTransition.FENCE)
        return [] if was is self.state else [*_free(was), *self._refuse("superseded", "fenced")]

    # -- results and what else happens here

    def reserved(self, hit_blocks: int = 0, transport: str = "") -> list[Action]:
        """The engine holds the blocks; the arguments count when it is the first stage."""
        self.apply_event(DestinationTransition.RESERVED)
        if not self._opened:
            self._opened = True
            self._hit = self.received = hit_blocks
            self._transport = transport
        return [SendAnswer(Reserved(self.key, self._stage, self._hit, self._transport))]

    def scattered(self, chunk: Chunk, ms: float, device_ms: float | None = None) -> list[Action]:
        """The chunk is in its blocks, and the checksums agree. device_ms: of `ms` on a device."""
        self.apply_event(DestinationTransition.SCATTERED)
        self.received = max(self.received, chunk.first + len(chunk.checksums))
        return [SendAnswer(ChunkDone(self.key, chunk.slot, ms, device_ms))]

    def committed(self, ms: float) -> list[Action]:
        """The engine has the request in its queue: this is never undone."""
        self.apply_event(DestinationTransition.COMMITTED)
        self._answer = Committed(self.key, ms)
        return [SendAnswer(self._answer)]

    def failed(self, reason: str, detail: str = "") -> list[Action]:
        """The engine can't, or what came in can't be used."""
        was = self.state
        self.apply_event(DestinationTransition.FAILED)
        return [*_free(was), *self._refuse(reason, detail)]

    def cancel(self, reason: str) -> list[Action]:
        """Something here gives the migration up, unless the request is committed already."""
        was = self.state
        self.apply_event(DestinationTransition.CANCEL)
        return [] if was is self.state else [*_free(was), *self._refuse(reason)]

    def _come_with(self, message: Commit) -> int:
        """Blocks that came, those of the message included; -1: its blocks are out of place."""
        last = message.last
        if last is None:
            return self.received
        if not self._hit <= last.first <= self.received:
            return -1
        return max(self.received, last.first + len(last.checksums))

    def _refuse(self, reason: str, detail: str = "") -> list[Action]:
        self._answer = Refused(self.key, reason, detail)
        return [SendAnswer(self._answer)]


def _free(was: StrEnum) -> list[Action]:
    """Free what the engine may hold; it ignores a request that it doesn't know."""
    return (
        []
        if was in (DestinationState.NEW, DestinationState.COMMITTED, DestinationState.CANCELLED)
        else [FreeBlocks()]
    )


REMEMBERED = 4096
"""Tombstones that are kept: many times what can end while one message is late."""

Attempt = tuple[str, int]
"""(request_id, epoch): used once."""


class MachineTombstones:
    """Ended machines of one instance, by migration and by attempt.

    A tombstone answers late and repeated messages, and fences, as the migration ended: so a
    commit is never taken back and a cancelled one never happens.
    """

    def __init__(self) -> None:
        self._ended: OrderedDict[str, DestinationMachine] = OrderedDict()
        self._attempts: OrderedDict[Attempt, DestinationMachine] = OrderedDict()

    def used(self, attempt: Attempt) -> bool:
        """Whether this attempt has ended here, or was fenced."""
        return attempt in self._attempts

    def has_ended(self, mid: str) -> bool:
        """Whether this migration has ended here."""
        return mid in self._ended

    def bury(self, machine: DestinationMachine, attempt: Attempt | None) -> None:
        """Keep an ended machine; None: of an attempt that isn't known."""
        machine.history.clear()
        self._ended[machine.key] = machine
        if attempt is not None:
            self._attempts[attempt] = machine
        for remembered in (self._ended, self._attempts):
            while len(remembered) > REMEMBERED:
                remembered.popitem(last=False)

    def answer(self, mid: str, message: SourceMessage) -> list[Action]:
        """Answer a message of a migration that has ended, or is unknown: Commit and Abort
        end that, too. A late Chunk brings what isn't wanted any more.
        """
        if isinstance(message, Chunk):
            return []
        machine = self._ended.get(mid)
        if machine is not None:
            return machine.receive_message(message)
        machine = DestinationMachine(mid)
        actions = machine.receive_message(message)
        if machine.ended:
            attempt = (message.request_id, message.epoch) if isinstance(message, Commit) else None
            self.bury(machine, attempt)
        return actions

    def fence(self, attempt: Attempt) -> bool:
        """Whether this attempt was committed; if not, it never will be."""
        machine = self._attempts.get(attempt)
        if machine is None:
            machine = DestinationMachine("fence of {} at {}".format(*attempt))
            self.bury(machine, attempt)
        machine.fence()
        return machine.committed_here
