"""The source's half of the handshake: pure, events in, actions out.

Before each stage blocks are pre-allocated (Reserve), after each the request is
checked again. The rest of the request then goes one of three ways (`Way`): it is copied in the
pause, or left out and computed again there, or the destination follows: the rest is sent while
the request runs on, and its tokens as they come, until both ends are in step.
One that waits and holds nothing is suspended at once, and sent without any of that.
Until Commit is sent every failure leaves the request running here.
After it only the destination's word, or the arbiter's, decides.
"""

from __future__ import annotations

from enum import StrEnum, auto
from typing import ClassVar

from msgspec import structs

from kvmig.engines.base import Pace, Stage, Tail
from kvmig.ground.config import Way
from kvmig.kvtransfer.machine import Machine, Table
from kvmig.kvtransfer.source_actions import (
    Action,
    AskArbiter,
    Check,
    Copy,
    Export,
    Fork,
    Listen,
    Release,
    Resume,
    SendAbort,
    SendCommit,
    SendFork,
    SendReserve,
    SendTail,
    Suspend,
)
from kvmig.kvtransfer.stages import enough, in_step

COMMIT_SENDS = 3
"""Times that Commit is sent before the arbiter is asked."""


class S(StrEnum):
    """States of the source."""

    EXPORTING = auto()
    RESERVING = auto()
    CHECKING = auto()
    RESERVING_STAGE = auto()
    COPYING = auto()
    RESERVING_TAIL = auto()
    FORKING = auto()
    SENDING_FORK = auto()
    FOLLOWED = auto()
    SUSPENDING = auto()
    SENDING_TAIL = auto()
    COMMITTING = auto()
    RESOLVING = auto()
    COMMITTED = auto()
    ABORTED = auto()


class E(StrEnum):
    """Events at the source."""

    EXPORTED = auto()
    RESERVED = auto()
    MORE = auto()
    """The request is fine and has blocks for another stage."""
    ENOUGH = auto()
    """The request is fine and the rest is small enough for the tail."""
    WAITS = auto()
    """The request waits and holds nothing: it needs no room, and there is nothing to copy."""
    COPIED = auto()
    FORK = auto()
    """The destination holds blocks for the rest, and can follow."""
    FORKED = auto()
    FORK_SENT = auto()
    BEHIND = auto()
    """The destination follows, but not in step yet."""
    IN_STEP = auto()
    SUSPENDED = auto()
    COMMIT_SENT = auto()
    COMMITTED = auto()
    REFUSED = auto()
    FAILED = auto()
    """Anything that went wrong at this side before Commit was sent."""
    CANCEL = auto()
    """The client left, or the instance stops."""
    TIMEOUT = auto()
    UNANSWERED = auto()
    """No answer to any Commit, or the connection is gone."""
    MOVED = auto()
    KEPT = auto()
    ORPHANED = auto()
    """The arbiter is gone, and the client with it."""


def _until_commit(event: E, after: S) -> dict[StrEnum, StrEnum]:
    return {event: after, E.REFUSED: S.ABORTED, E.FAILED: S.ABORTED, E.CANCEL: S.ABORTED}


class SourceMachine(Machine):
    """One attempt to move one request away. Each method is an event."""

    table: ClassVar[Table] = {
        S.EXPORTING: _until_commit(E.EXPORTED, S.RESERVING),
        S.RESERVING: _until_commit(E.RESERVED, S.CHECKING),
        S.CHECKING: _until_commit(E.MORE, S.RESERVING_STAGE)
        | {
            E.ENOUGH: S.RESERVING_TAIL,
            E.WAITS: S.SUSPENDING,
        },
        S.RESERVING_STAGE: _until_commit(E.RESERVED, S.COPYING),
        S.COPYING: _until_commit(E.COPIED, S.CHECKING),
        S.RESERVING_TAIL: _until_commit(E.RESERVED, S.SUSPENDING) | {E.FORK: S.FORKING},
        S.FORKING: _until_commit(E.FORKED, S.SENDING_FORK),
        S.SENDING_FORK: _until_commit(E.FORK_SENT, S.FOLLOWED),
        S.FOLLOWED: _until_commit(E.IN_STEP, S.SUSPENDING) | {E.BEHIND: S.FOLLOWED},
        S.SUSPENDING: _until_commit(E.SUSPENDED, S.SENDING_TAIL),
        S.SENDING_TAIL: _until_commit(E.COMMIT_SENT, S.COMMITTING),
        S.COMMITTING: {
            E.COMMITTED: S.COMMITTED,
            E.REFUSED: S.ABORTED,
            E.TIMEOUT: S.COMMITTING,
            E.CANCEL: S.COMMITTING,
            E.UNANSWERED: S.RESOLVING,
            E.ORPHANED: S.ABORTED,
        },
        S.RESOLVING: {
            E.COMMITTED: S.COMMITTED,
            E.MOVED: S.COMMITTED,
            E.REFUSED: S.ABORTED,
            E.KEPT: S.ABORTED,
            E.CANCEL: S.RESOLVING,
            E.UNANSWERED: S.RESOLVING,
            E.ORPHANED: S.ABORTED,
        },
        S.COMMITTED: {},
        S.ABORTED: {},
    }

    def __init__(self, key: str, max_stages: int) -> None:
        """`max_stages`: live stages before the rest is forced."""
        super().__init__(key, S.EXPORTING)
        self._max_stages = max_stages
        self._answers = 0
        self._commits = 0
        self._plan = Stage([], 0)
        self.way: Way = "copy"
        """What becomes of the rest."""
        self.stage = 0
        """The stage of the last Reserve."""
        self.sent = 0
        """Blocks that the destination has or was sent."""
        self.forked_there = False
        """Whether the destination was told to follow."""
        self.cancelled = ""
        """Why the client's side gave up, if it did."""
        self.fenced = False
        """Whether the arbiter shut this attempt out."""
        self.reason = ""
        self.detail = ""

    def expects(self, stage: int) -> bool:
        """Whether a Reserved for `stage` is what the machine waits for."""
        return E.RESERVED in self.table[self.state] and stage == self.stage

    @property
    def decoding(self) -> bool:
        """Whether the request decoded when it was last looked at: a token comes soon."""
        return self._plan.decoding

    @property
    def waits(self) -> bool:
        """Whether the request waited when it was last looked at: nobody reserves room for it."""
        return not self._plan.num_tokens

    @property
    def beyond(self) -> bool:
        """Past the point of no return, and not decided."""
        return self.state in (S.COMMITTING, S.RESOLVING)

    def start(self) -> list[Action]:
        """The first action; not an event."""
        return [Export()]

    def exported(self, num_tokens: int) -> list[Action]:
        """The engine described the request."""
        self.go(E.EXPORTED)
        return [SendReserve(0, num_tokens)]

    def reserved(self, hit_blocks: int) -> list[Action]:
        """The destination holds blocks for `self.stage`; `hit_blocks` counts for stage 0."""
        before = self.state
        if before is S.RESERVING_TAIL and self.way == "follow":
            self.go(E.FORK)
            return [Fork(self.sent)]
        self.go(E.RESERVED)
        if before is S.RESERVING:
            self.sent = hit_blocks
            return [Check(self.sent)]
        if before is S.RESERVING_STAGE:
            plan = self._plan
            return [Copy(self.stage, self.sent, tuple(plan.block_ids), tuple(plan.places))]
        return [Suspend(self.sent)]

    def checked(self, plan: Stage, way: Way = "copy") -> list[Action]:
        """The request is as it was; `plan` names the blocks that are new.

        way: what becomes of them, if they are the rest.
        """
        stop = enough(len(plan.block_ids), self.stage, self._max_stages)
        waits = not plan.num_tokens
        self.go(E.WAITS if waits else E.ENOUGH if stop else E.MORE)
        self._plan, self.way = plan, way
        if waits:
            return [Suspend(self.sent)]
        self.stage += 1
        return [SendReserve(self.stage, plan.num_tokens, stop and way != "follow")]

    def copied(self) -> list[Action]:
        """All blocks of the stage are gathered and sent."""
        self.go(E.COPIED)
        self.sent += len(self._plan.block_ids)
        return [Check(self.sent)]

    def forked(self, fork: Tail) -> list[Action]:
        """The rest of the request, as it was just now."""
        self.go(E.FORKED)
        return [SendFork(self.sent, fork)]

    def fork_sent(self, blocks: int) -> list[Action]:
        """The rest and Follow are on their way."""
        self.go(E.FORK_SENT)
        self.sent += blocks
        self.forked_there = True
        return [Listen()]

    def followed(self, pace: Pace, wait_ms: float, step_ms: float) -> list[Action]:
        """The destination took tokens, see `stages.in_step`."""
        if self.state is not S.FOLLOWED:
            return []  # decided already
        self._answers += 1
        if in_step(self._answers, pace, wait_ms, step_ms):
            self.go(E.IN_STEP)
            return [Suspend(self.sent)]
        self.go(E.BEHIND)
        return [Listen()]

    def suspended(self, tail: Tail) -> list[Action]:
        """The request runs nowhere from here on. What is computed there needn't be sent."""
        if self.waits and tail.block_ids:
            return self.failed("started", "it waited, and began to run before it was suspended")
        self.go(E.SUSPENDED)
        if self.way == "recompute":
            tail = structs.replace(tail, block_ids=[], places=[], missing=len(tail.block_ids))
        elif self.way == "follow":
            tail = structs.replace(tail, block_ids=[], places=[])
        return [SendTail(self.sent, tail)]

    def commit_sent(self) -> list[Action]:
        """Tail and Commit are on their way: the point of no return."""
        self.go(E.COMMIT_SENT)
        self._commits = 1
        return []

    def committed(self) -> list[Action]:
        """The destination runs the request."""
        self.go(E.COMMITTED)
        return [Release()]

    def refused(self, reason: str, detail: str = "") -> list[Action]:
        """The destination holds nothing and never will: Refused or Aborted."""
        self.go(E.REFUSED)
        return self._kept(reason, detail)

    def failed(self, reason: str, detail: str = "") -> list[Action]:
        """Something went wrong at this side."""
        self.go(E.FAILED)
        return [*self._kept(reason, detail), SendAbort(reason)]

    def cancel(self, reason: str) -> list[Action]:
        """Give up, if it isn't too late for that."""
        self.go(E.CANCEL)
        self.cancelled = self.cancelled or reason
        if self.state is not S.ABORTED:
            return []
        return [*self._kept(reason), SendAbort(reason)]

    def unanswered(self) -> list[Action]:
        """No answer came in time to what was sent last after the point of no return."""
        if self.state is S.COMMITTING and self._commits < COMMIT_SENDS:
            self.go(E.TIMEOUT)
            self._commits += 1
            return [SendCommit()]
        return self.unreachable()

    def unreachable(self) -> list[Action]:
        """No answer can come any more."""
        self.go(E.UNANSWERED)
        return [AskArbiter()]

    def resolved(self, moved: bool) -> list[Action]:
        """The arbiter's word is final."""
        self.go(E.MOVED if moved else E.KEPT)
        if moved:
            return [Release()]
        self.fenced = True
        return [*self._kept("timeout", "kept by the front end"), SendAbort("timeout")]

    def orphaned(self) -> list[Action]:
        """Nobody is left who reads the stream: run it nowhere rather than twice."""
        self.go(E.ORPHANED)
        self.reason, self.detail = "orphaned", "neither destination nor front end answers"
        return [Release()]

    def _kept(self, reason: str, detail: str = "") -> list[Action]:
        self.reason, self.detail = reason, detail
        return [Resume()]
