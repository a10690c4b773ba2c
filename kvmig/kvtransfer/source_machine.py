"""The source's half of the handshake: pure, events in, actions out.

Before each stage blocks are pre-allocated (Reserve), after each the request is checked again. What
is left then, the tail, is copied in the pause, while the request isn't decoded. A request that
waits and holds nothing is suspended at once, and sent without any of that. Until Commit is sent
every failure leaves the request running here. After it only the destination's word, or the
arbiter's, decides.
"""

# Theory of operation, of both halves
# ===================================
#
# A migration has two halves, this one and `destination_machine`. They have one form:
#
# - Everything that affects a half's decisions is in its machine, and all that changes a machine is
#   an event. Each method is an event. `hear` takes the other half's messages, and calls the method
#   of the event that each one is.
# - `table` says which events are legal in which state, and where they lead. `go` is the only way
#   from one state to another. An event without an arrow raises InvalidTransition and changes
#   nothing: it is a bug, never something that the network may cause. So a message that may come
#   late or twice is looked at before it becomes an event (`expects`), or has an arrow that leads
#   nowhere (the tombstones of the destination).
# - A method returns the actions that the session is to carry out (`session.Session`), in their
#   order. What an action results in is an event again: ExportRequest leads to `exported` or
#   `broken`, SendReserve to `hear`, or to a time-out. A machine never waits and never asks.
# - Two machines that hear the same events in the same order decide the same. That is what the model
#   checker (`kvmig_tools.check`) relies on: it runs these very machines, and replaces the sessions.
#
# The life of a migration, at the source:
#
#   EXPORTING        what is the request?
#   RESERVING        room at the destination; its prefix cache may have blocks already
#   CHECKING         is the request still there, and which full blocks are new?
#     RESERVING_STAGE, COPYING, and CHECKING again: while more than TAIL_BLOCKS are new, and no more
#                    than `max_stages` times. The request decodes meanwhile
#   RESERVING_TAIL   the last time that room is asked for; the destination gets ready
#   SUSPENDING       the pause begins: from here on nobody decodes the request
#   SENDING_TAIL     what no stage has copied
#   COMMITTING       the point of no return: Commit is sent, up to COMMIT_SENDS times
#   RESOLVING        no answer: the arbiter is asked, up to QUESTIONS times
#   COMMITTED, or ABORTED
#
# Until Commit is sent the request is the source's, and everything that goes wrong ends in ABORTED
# with Resume. After it (`beyond`) the source can't know by itself, so it neither resumes nor
# releases until the destination or the arbiter has said which. If nobody can say it, the request
# runs nowhere rather than twice: ORPHANED releases it, and its front end runs it again.
#
# A request that waits and holds nothing goes from CHECKING to SUSPENDING: nothing is copied.
#
# With `after_prompt` a request whose prompt waits or is computed stays until that is done. The
# first stage brings room for the whole prompt; then FollowPrompt, in CHECKING, returns each chunk's
# blocks, which are a stage, and in the end the tail: the engine takes the request out of the batch
# at the end of the step that computed the last chunk. So it goes on to SENDING_TAIL.
#
# A session that is idle moves like a request that decodes nothing. Nothing of it runs, so two whole
# copies do no harm: if the destination doesn't say whether it has committed, the source keeps its
# own, and no arbiter is asked.

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import ClassVar

from msgspec.structs import replace

from kvmig.engines.base import RequestTail, StagedBlocks
from kvmig.kvtransfer.machine import StateMachine, Table
from kvmig.kvtransfer.messages import Aborted, Committed, Refused, Reserved


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """Ask the engine for the request's description."""


@dataclass(frozen=True, slots=True)
class SendReserve:
    """Send Reserve and wait for the answer; stage 0 brings the export."""

    stage: int
    num_tokens: int
    last: bool = False
    """The pause comes next."""


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """Ask the engine whether the request still is as it was, and what is new after `sent`."""

    sent: int


@dataclass(frozen=True, slots=True)
class CopyStage:
    """Gather and send these blocks while the request decodes; `first` were sent before."""

    stage: int
    first: int
    block_ids: tuple[int, ...]
    places: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FollowPrompt:
    """Ask the engine for the next chunk's blocks after `sent`, or for the tail."""

    sent: int
    most_tokens: int
    """Tokens that there is room for: a request with more has decoded on, and isn't suspended."""


@dataclass(frozen=True, slots=True)
class SuspendRequest:
    """Take the request out of the batch."""

    sent: int


@dataclass(frozen=True, slots=True)
class SendTail:
    """Gather and send the tail, and Commit right behind."""

    first: int
    tail: RequestTail


@dataclass(frozen=True, slots=True)
class SendCommit:
    """Send Commit once more."""


@dataclass(frozen=True, slots=True)
class AskArbiter:
    """Ask the front end who runs the request."""


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """Leave the request to the engine again: back into the batch, if it was out."""


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    """Free the request here."""


@dataclass(frozen=True, slots=True)
class SendAbort:
    """Order the destination to free what it holds."""

    reason: str


Action = (
    ExportRequest | SendReserve | CheckRequest | CopyStage | FollowPrompt | SuspendRequest
    | SendTail | SendCommit | AskArbiter | ResumeRequest | ReleaseRequest | SendAbort
)  # fmt: skip


DestinationMessage = Reserved | Refused | Aborted | Committed
"""Messages of the destination that are events of the machine."""

TAIL_BLOCKS = 1
"""Most full blocks that go with the tail: a stage of that few costs more than it saves."""
COMMIT_SENDS = 3
"""Times that Commit is sent before the arbiter is asked."""
QUESTIONS = 8
"""Questions to the arbiter that may stay unanswered, each for a reply's time-out."""


class SourceState(StrEnum):
    """States of the source."""

    EXPORTING = auto()
    RESERVING = auto()
    CHECKING = auto()
    RESERVING_STAGE = auto()
    COPYING = auto()
    RESERVING_TAIL = auto()
    SUSPENDING = auto()
    SENDING_TAIL = auto()
    COMMITTING = auto()
    RESOLVING = auto()
    COMMITTED = auto()
    ABORTED = auto()


class SourceTransition(StrEnum):
    """Events at the source."""

    EXPORTED = auto()
    RESERVED = auto()
    MORE = auto()
    """The request is fine and has blocks for another stage."""
    ENOUGH = auto()
    """The request is fine and what is left is small enough for the tail."""
    WAITS = auto()
    """The request waits and holds nothing: it needs no room, and there is nothing to copy."""
    COPIED = auto()
    COMPUTING = auto()
    """The prompt is being computed, and no stage's blocks are new."""
    COMPUTED = auto()
    """The prompt is computed, and the request is suspended."""
    SUSPENDED = auto()
    COMMIT_SENT = auto()
    COMMITTED = auto()
    REFUSED = auto()
    FAILED = auto()
    """Something went wrong at this side before Commit was sent."""
    CANCEL = auto()
    """The client left, or the instance stops."""
    TIMEOUT = auto()
    UNANSWERED = auto()
    """No answer to any Commit, or the connection is gone."""
    MOVED = auto()
    KEPT = auto()
    ORPHANED = auto()
    """The arbiter is gone, and the client with it, or it answers none of its questions."""


def _until_commit(event: SourceTransition, after: SourceState) -> dict[StrEnum, StrEnum]:
    return {
        event: after,
        SourceTransition.REFUSED: SourceState.ABORTED,
        SourceTransition.FAILED: SourceState.ABORTED,
        SourceTransition.CANCEL: SourceState.ABORTED,
    }


class SourceMachine(StateMachine):
    """One attempt to move one request away. Each method is an event."""

    table: ClassVar[Table] = {
        SourceState.EXPORTING: _until_commit(SourceTransition.EXPORTED, SourceState.RESERVING),
        SourceState.RESERVING: _until_commit(SourceTransition.RESERVED, SourceState.CHECKING),
        SourceState.CHECKING: _until_commit(SourceTransition.MORE, SourceState.RESERVING_STAGE)
        | {
            SourceTransition.ENOUGH: SourceState.RESERVING_TAIL,
            SourceTransition.WAITS: SourceState.SUSPENDING,
            SourceTransition.COMPUTING: SourceState.CHECKING,
            SourceTransition.COMPUTED: SourceState.SENDING_TAIL,
        },
        SourceState.RESERVING_STAGE: _until_commit(SourceTransition.RESERVED, SourceState.COPYING),
        SourceState.COPYING: _until_commit(SourceTransition.COPIED, SourceState.CHECKING),
        SourceState.RESERVING_TAIL: _until_commit(
            SourceTransition.RESERVED, SourceState.SUSPENDING
        ),
        SourceState.SUSPENDING: _until_commit(SourceTransition.SUSPENDED, SourceState.SENDING_TAIL),
        SourceState.SENDING_TAIL: _until_commit(
            SourceTransition.COMMIT_SENT, SourceState.COMMITTING
        ),
        SourceState.COMMITTING: {
            SourceTransition.COMMITTED: SourceState.COMMITTED,
            SourceTransition.REFUSED: SourceState.ABORTED,
            SourceTransition.TIMEOUT: SourceState.COMMITTING,
            SourceTransition.CANCEL: SourceState.COMMITTING,
            SourceTransition.UNANSWERED: SourceState.RESOLVING,
            SourceTransition.ORPHANED: SourceState.ABORTED,
        },
        SourceState.RESOLVING: {
            SourceTransition.COMMITTED: SourceState.COMMITTED,
            SourceTransition.MOVED: SourceState.COMMITTED,
            SourceTransition.REFUSED: SourceState.ABORTED,
            SourceTransition.KEPT: SourceState.ABORTED,
            SourceTransition.CANCEL: SourceState.RESOLVING,
            SourceTransition.UNANSWERED: SourceState.RESOLVING,
            SourceTransition.ORPHANED: SourceState.ABORTED,
        },
        SourceState.COMMITTED: {},
        SourceState.ABORTED: {},
    }

    def __init__(
        self,
        key: str,
        max_stages: int,
        questions: int = QUESTIONS,
        *,
        after_prompt: bool = False,
        idle: bool = False,
    ) -> None:
        """max_stages: live stages, then the tail is what is left; questions: see `QUESTIONS`;
        after_prompt: whether the prompt is computed here to its end; idle: see
        `RequestExport.idle`."""
        super().__init__(key, SourceState.EXPORTING)
        self._max_stages = max_stages
        self._after_prompt = after_prompt
        self._chunks = 0
        """Stages of a prompt's chunks, which `max_stages` doesn't count."""
        self._tokens = 0
        """The request's when it was exported."""
        self._questions = 0 if idle else questions
        self._idle = idle
        self._commits = 0
        self._plan = StagedBlocks([], 0)
        self.stage = 0
        """The stage of the last Reserve."""
        self.sent = 0
        """Blocks that the destination has or was sent."""
        self.cancelled = ""
        """Why the client's side gave up, if it did."""
        self.fenced = False
        """Whether the arbiter shut this attempt out."""
        self.reason = ""
        self.detail = ""

    def expects(self, stage: int) -> bool:
        """Whether a Reserved for `stage` is what the machine waits for."""
        return SourceTransition.RESERVED in self.table[self.state] and stage == self.stage

    @property
    def decoding(self) -> bool:
        """Whether the request decoded when it was last looked at: a token comes soon."""
        return self._plan.decoding

    @property
    def waits(self) -> bool:
        """Whether the request waited when it was last looked at: no room is reserved for it."""
        return not self._plan.num_tokens

    @property
    def beyond(self) -> bool:
        """Whether the point of no return is passed, and nothing is decided."""
        return self.state in (SourceState.COMMITTING, SourceState.RESOLVING)

    # -- messages, and what else comes from outside

    def receive_message(self, message: DestinationMessage) -> list[Action]:
        """A message of the destination, whichever it is."""
        match message:
            case Reserved(stage=stage, hit_blocks=hit_blocks):
                # Else the same was answered once more.
                return self.reserved(hit_blocks) if self.expects(stage) else []
            case Refused(reason=reason, detail=detail):
                return self.refused(reason, detail)
            case Aborted():
                return self.refused("superseded", "given up by the destination")
            case Committed():
                return self.committed()

    def lost(self, detail: str) -> list[Action]:
        """The connection to the destination is gone: it may answer no more."""
        if self.state is SourceState.RESOLVING:
            return []  # the arbiter is asked already
        return self.broken("peer_lost", detail)

    def broken(self, reason: str, detail: str = "") -> list[Action]:
        """Something went wrong, on whichever side of the point of no return."""
        return self.unreachable() if self.beyond else self.failed(reason, detail)

    # -- events

    def start(self) -> list[Action]:
        """The first action; not an event."""
        return [ExportRequest()]

    def exported(self, num_tokens: int) -> list[Action]:
        """The engine described the request."""
        self.apply_event(SourceTransition.EXPORTED)
        self._tokens = num_tokens
        return [SendReserve(0, num_tokens)]

    def reserved(self, hit_blocks: int) -> list[Action]:
        """The destination holds blocks for `self.stage`; `hit_blocks` counts for stage 0."""
        before = self.state
        self.apply_event(SourceTransition.RESERVED)
        if before is SourceState.RESERVING:
            self.sent = hit_blocks
            return [CheckRequest(self.sent)]
        if before is SourceState.RESERVING_STAGE:
            plan = self._plan
            return [CopyStage(self.stage, self.sent, tuple(plan.block_ids), tuple(plan.places))]
        return [SuspendRequest(self.sent)]

    def checked(self, plan: StagedBlocks) -> list[Action]:
        """The request is as it was; `plan` names the blocks that are new."""
        if self._after_prompt and not plan.decoding:
            return self._copy_chunk(plan)
        waits = not plan.num_tokens
        done = self.stage - self._chunks
        stop = enough(len(plan.block_ids), done, self._max_stages)
        self.apply_event(
            SourceTransition.WAITS
            if waits
            else SourceTransition.ENOUGH
            if stop
            else SourceTransition.MORE
        )
        self._plan = plan
        if waits:
            return [SuspendRequest(self.sent)]
        self.stage += 1
        return [SendReserve(self.stage, plan.num_tokens, stop)]

    def copied(self) -> list[Action]:
        """The blocks of the stage are gathered and sent."""
        self.apply_event(SourceTransition.COPIED)
        self.sent += len(self._plan.block_ids)
        if self._after_prompt and not self.decoding:
            return [self._follow()]
        return [CheckRequest(self.sent)]

    def followed(self, found: StagedBlocks | RequestTail) -> list[Action]:
        """The next chunk of the prompt is computed, or all of it: then the request is suspended."""
        if isinstance(found, RequestTail):
            self.apply_event(SourceTransition.COMPUTED)
            self._plan = replace(self._plan, decoding=True)
            return [SendTail(self.sent, found)]
        if found.decoding or len(found.block_ids) > TAIL_BLOCKS:
            return self.checked(found)  # it may have decoded on
        self.apply_event(SourceTransition.COMPUTING)
        return [self._follow()]

    def _copy_chunk(self, plan: StagedBlocks) -> list[Action]:
        """A stage of a prompt. There is room for all of it from the first one on."""
        self.apply_event(SourceTransition.MORE)
        self._plan = replace(plan, num_tokens=max(plan.num_tokens, self._tokens))
        self.stage += 1
        self._chunks += 1
        return [SendReserve(self.stage, self._plan.num_tokens)]

    def _follow(self) -> FollowPrompt:
        return FollowPrompt(self.sent, self._plan.num_tokens + 1)

    def suspended(self, tail: RequestTail) -> list[Action]:
        """The request runs nowhere from here on."""
        if self.waits and tail.block_ids:
            return self.failed("started", "it waited, and began to run before it was suspended")
        self.apply_event(SourceTransition.SUSPENDED)
        return [SendTail(self.sent, tail)]

    def commit_sent(self) -> list[Action]:
        """The tail and Commit are on their way: the point of no return."""
        self.apply_event(SourceTransition.COMMIT_SENT)
        self._commits = 1
        return []

    def committed(self) -> list[Action]:
        """The destination runs the request."""
        self.apply_event(SourceTransition.COMMITTED)
        return [ReleaseRequest()]

    def refused(self, reason: str, detail: str = "") -> list[Action]:
        """The destination holds nothing and never will: Refused or Aborted."""
        self.apply_event(SourceTransition.REFUSED)
        return self._kept(reason, detail)

    def failed(self, reason: str, detail: str = "") -> list[Action]:
        """Something went wrong at this side."""
        self.apply_event(SourceTransition.FAILED)
        return [*self._kept(reason, detail), SendAbort(reason)]

    def cancel(self, reason: str) -> list[Action]:
        """The client left, or the instance stops: give up, unless it is too late for that."""
        self.apply_event(SourceTransition.CANCEL)
        self.cancelled = self.cancelled or reason
        if self.state is not SourceState.ABORTED:
            return []
        return [*self._kept(reason), SendAbort(reason)]

    def unanswered(self) -> list[Action]:
        """No answer came in time to what was sent last after the point of no return."""
        if self.state is SourceState.COMMITTING and self._commits < COMMIT_SENDS:
            self.apply_event(SourceTransition.TIMEOUT)
            self._commits += 1
            return [SendCommit()]
        return self.unreachable()

    def unreachable(self) -> list[Action]:
        """No answer can come any more, or none came to a question."""
        if not self._questions:
            return self.orphaned()
        self.apply_event(SourceTransition.UNANSWERED)
        self._questions -= 1
        return [AskArbiter()]

    def resolved(self, moved: bool) -> list[Action]:
        """The arbiter's word is final."""
        self.apply_event(SourceTransition.MOVED if moved else SourceTransition.KEPT)
        if moved:
            return [ReleaseRequest()]
        self.fenced = True
        return [*self._kept("timeout", "kept by the front end"), SendAbort("timeout")]

    def orphaned(self) -> list[Action]:
        """The stream has no reader left: run the request nowhere rather than twice. An idle
        session, which runs nowhere, stays."""
        self.apply_event(SourceTransition.ORPHANED)
        if self._idle:
            return [*self._kept("timeout", "the destination does not answer"), SendAbort("timeout")]
        self.reason, self.detail = "orphaned", "neither destination nor front end answers"
        return [ReleaseRequest()]

    def _kept(self, reason: str, detail: str = "") -> list[Action]:
        self.reason, self.detail = reason, detail
        return [ResumeRequest()]


def enough(full_blocks: int, stage: int, max_stages: int) -> bool:
    """Whether to suspend now instead of copying `full_blocks` more in live stage `stage`.

    Example: stages of 100, 4 and 1 new full blocks: the first two are copied live, the
    last block goes with the tail. With `max_stages` 0 all blocks go with it.
    """
    return full_blocks <= TAIL_BLOCKS or stage >= max_stages


LEAP = 1 << 20
"""Epochs that a fence shuts out: the attempt's, and those under which the request may have been
moved on from where it went. More moves than this in one run are not expected."""
EPOCHS_REMEMBERED = 65536
"""Requests whose last tried epoch is remembered."""


class EpochCounter:
    """Numbers the attempts to move requests out of one instance: none is used twice."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, int] = OrderedDict()

    def after(self, request_id: str, epoch: int) -> int:
        """The epoch of the next attempt to move a request that runs under `epoch`."""
        last = self._last[request_id] = max(epoch, self._last.pop(request_id, 0)) + 1
        while len(self._last) > EPOCHS_REMEMBERED:
            self._last.popitem(last=False)
        return last

    def fenced(self, request_id: str, epoch: int) -> None:
        """The attempt was fenced, and all that may have followed it."""
        self._last[request_id] = max(epoch + LEAP - 1, self._last.pop(request_id, 0))
