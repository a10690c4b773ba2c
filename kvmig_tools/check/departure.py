"""The source's side of one migration: what `SourceSession` does, without waiting.

Export and check end before anything else of the session happens, so they belong to
the message that led to them. Copies and the suspension take time: messages are heard
meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvmig.controlplane.messages import Resolve, Resolved
from kvmig.core.config import MigrationConfig
from kvmig.engines import base
from kvmig.engines.base import RequestTail, StagedBlocks
from kvmig.kvtransfer import source_machine as here
from kvmig.kvtransfer.messages import (
    Abort,
    Aborted,
    Chunk,
    Commit,
    Committed,
    Refused,
    Reserve,
    Reserved,
)
from kvmig.kvtransfer.source_machine import SourceMachine, SourceState
from kvmig.rpc.messages import RpcMessage
from kvmig_tools.check.part import Letter, Lost, Move

if TYPE_CHECKING:
    from kvmig_tools.check.site import Site

REPLY_S = MigrationConfig().reply_timeout_ms / 1e3

_TAKES_TIME = (
    here.CopyStage, here.FollowPrompt, here.SuspendRequest, here.SendTail, here.AskArbiter,
)  # fmt: skip


@dataclass
class Departure:
    """doing: what goes on now. cancelled: a Cancel that is in the mailbox."""

    mid: str
    run: str
    epoch: int
    before: int
    source: str
    destination: str
    machine: SourceMachine
    doing: here.Action | None = None
    cancelled: str = ""
    commit: Commit | None = None
    heard: bool = True
    """Whether the destination can be reached over the present connection."""

    @property
    def replies(self) -> str:
        """The channel of the destination's answers."""
        return f"{self.destination}>{self.source}:{self.mid}"

    @property
    def listens(self) -> bool:
        """Whether it looks into its mailbox now."""
        return self.doing is None or isinstance(self.doing, _TAKES_TIME)

    def moves(self) -> list[Move]:
        """What it may do by itself."""
        moves = []
        if self.doing is None:
            moves.append(Move("hears no answer in time", ("time_out",), "timer", REPLY_S))
        elif isinstance(self.doing, here.AskArbiter):
            moves.append(Move("hears no verdict in time", ("time_out",), "verdict", REPLY_S))
        else:
            moves.append(Move(_LABELS[type(self.doing)], ("push",)))
        if self.cancelled and self.listens:
            moves.append(Move(f"gives up ({self.cancelled})", ("give_up",)))
        return moves

    # -- events

    def start(self, site: Site) -> None:
        """The first actions."""
        self.follow(site, self.machine.start())

    def push(self, site: Site) -> None:
        """What goes on is done, or fails."""
        doing, self.doing = self.doing, None
        if site.fails():
            self.follow(site, self._failed("error"))
            return
        self.follow(site, self._done(site, doing))

    def give_up(self, site: Site) -> None:
        """The Cancel in the mailbox is read."""
        reason, self.cancelled = self.cancelled, ""
        self.hears(site, self.machine.cancel(reason))

    def time_out(self, site: Site) -> None:
        """Nothing came."""
        machine = self.machine
        if isinstance(self.doing, here.AskArbiter):
            self.follow(site, machine.unreachable())
        elif machine.beyond:
            self.follow(site, machine.unanswered())
        else:
            self.follow(site, machine.failed("timeout"))

    def hear(self, site: Site, message: object) -> None:
        """As `SourceSession._hear`."""
        machine = self.machine
        match message:
            case Reserved() | Refused() | Aborted() | Committed():
                self.hears(site, machine.receive_message(message))
            case Resolved(moved=moved):
                self.hears(site, machine.resolved(moved))
            case Lost():
                self.hears(site, machine.lost(""))

    # -- actions

    def hears(self, site: Site, actions: list[here.Action]) -> None:
        """What it was doing goes on unless the machine wants something else."""
        if actions:
            self.follow(site, actions)

    def follow(self, site: Site, actions: list[here.Action]) -> None:
        """Perform them, and what they lead to."""
        self.doing = None
        while actions:
            following: list[here.Action] = []
            for action in actions:
                following += self._perform(site, action)
            actions = following
        if self.machine.ended:
            site.departed(self)

    def _failed(self, reason: str) -> list[here.Action]:
        return [] if self.machine.ended else self.machine.broken(reason)

    def _perform(self, site: Site, action: here.Action) -> list[here.Action]:
        machine = self.machine
        match action:
            case here.SendReserve(stage, tokens, last):
                export = None if stage else base.RequestExport(self.run, tokens, [])
                self._say(site, Reserve(self.mid, self.run, self.epoch, stage, tokens, export,
                                        last=last))  # fmt: skip
            case here.SendCommit() if self.commit is not None:
                self._say(site, self.commit)
            case here.SendAbort(reason):
                self._say(site, Abort(self.mid, reason))
            case here.ResumeRequest():
                site.engine.resume(self.run)
            case here.ReleaseRequest():
                if machine.state is SourceState.COMMITTED:
                    site.tracking.left(self.run, self.destination)
                site.engine.abort(self.run)
            case here.AskArbiter():
                if not site.hears_front(self.run):
                    return machine.orphaned()
                question = Resolve(self.mid, self.run, self.epoch, self.destination)
                site.tell_front(question)
                self.doing = action
            case here.CopyStage() | here.FollowPrompt() | here.SuspendRequest() | here.SendTail():
                self.doing = action
            case here.ExportRequest() | here.CheckRequest():
                return self._look(site, action)
        return []

    def _look(
        self, site: Site, action: here.ExportRequest | here.CheckRequest
    ) -> list[here.Action]:
        slot = site.engine.active(self.run)
        if slot is None:
            return self._failed("finished")
        match action:
            case here.ExportRequest():
                return self.machine.exported(max(slot.length, 0))
            case here.CheckRequest() if slot.full < 0:
                return self.machine.checked(StagedBlocks([], 0))
            case here.CheckRequest(sent) if slot.chunks:
                return self.machine.checked(StagedBlocks(list(range(sent, slot.full)), slot.length))
            case here.CheckRequest(sent):
                if self.machine.stage and site.oracle.choose(("", 0), ("2 blocks more", 0)):
                    slot.full += 2
                blocks = list(range(sent, slot.full))
                return self.machine.checked(StagedBlocks(blocks, slot.full, decoding=True))

    def _done(self, site: Site, doing: here.Action | None) -> list[here.Action]:
        machine = self.machine
        match doing:
            case here.CopyStage(stage, first, block_ids):
                self._say(site, _chunk(self.mid, stage, first, len(block_ids)))
                return machine.copied()
            case here.FollowPrompt(sent):
                return self._follow_prompt(site, sent)
            case here.SuspendRequest(sent):
                slot = site.engine.active(self.run)
                if slot is None:
                    return self._failed("finished")
                slot.state = "suspended"
                return machine.suspended(slot.rest(sent))
            case here.SendTail(first, tail):
                self._send_tail(site, first, tail)
                machine.commit_sent()
        return []

    def _follow_prompt(self, site: Site, sent: int) -> list[here.Action]:
        """The step that is waited for computes a chunk, if none is new; or it decodes."""
        slot = site.engine.active(self.run)
        if slot is not None and slot.chunks and slot.full == sent:
            site.compute(self.run)
            slot = site.engine.active(self.run)
        if slot is None:
            return self._failed("finished")
        blocks = list(range(sent, slot.full))
        if slot.chunks or slot.tokens > 1:
            return self.machine.followed(StagedBlocks(blocks, slot.length, not slot.chunks))
        slot.state = "suspended"
        return self.machine.followed(slot.rest(sent))

    def _send_tail(self, site: Site, first: int, tail: RequestTail) -> None:
        count = len(tail.block_ids)
        last = _chunk(self.mid, self.machine.stage, first, count) if count else None
        if last is not None and not site.shape.together:
            self._say(site, last)
            last = None
        self.commit = Commit(
            self.mid, self.run, self.epoch, replace(tail, checksums=[]), first + count, last
        )
        self._say(site, self.commit)

    def _say(self, site: Site, message: RpcMessage) -> None:
        channel = f"{self.source}>{self.destination}:{self.mid}"
        site.outbox.append(Letter(channel, message))


_LABELS: dict[type, str] = {
    here.CopyStage: "copies a stage",
    here.FollowPrompt: "follows the prompt",
    here.SuspendRequest: "suspends the request",
    here.SendTail: "sends the tail and Commit",
}


def _chunk(mid: str, stage: int, first: int, count: int) -> Chunk:
    return Chunk(mid, stage, first, 0, count, [0] * count)
