"""Both machines, the messages on their way, and what each engine does with the request.

`World.moves` names everything that can happen next, losses and time-outs included; the
tests walk through all of it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvmig.engines import base
from kvmig.engines.base import Pace, Stage, Tail
from kvmig.kvtransfer import destination_machine as there
from kvmig.kvtransfer import source_machine as here
from kvmig.kvtransfer.destination_machine import DestinationMachine
from kvmig.kvtransfer.messages import (
    Abort,
    Aborted,
    Chunk,
    Commit,
    Committed,
    Follow,
    Following,
    Message,
    Refused,
    Reserve,
    Reserved,
    Tokens,
)
from kvmig.kvtransfer.source_machine import SourceMachine

EXPORT = base.Export("r", 8, [])
TAIL = Tail([13], 11, 1, b"")
COMMIT = Commit("m", "r", 1, TAIL, 3)
WITH_TAIL = Commit("m", "r", 1, TAIL, 3, Chunk("m", 9, 2, 0, 0, [0]))
SAID = 2
"""Tokens messages that a source sends at most."""


@dataclass
class World:
    """faults: messages that may still be lost or doubled."""

    faults: int
    can_follow: bool = False
    together: bool = False
    """The tail's blocks go with the commit."""
    said: int = 0
    source: SourceMachine = field(default_factory=lambda: SourceMachine("m", max_stages=8))
    destination: DestinationMachine = field(default_factory=lambda: DestinationMachine("m"))
    to_destination: list[Message] = field(default_factory=list)
    to_source: list[Message] = field(default_factory=list)
    at_source: str = "running"
    at_destination: str = "nothing"
    doing_here: here.Action | None = None
    doing_there: there.Action | None = None
    connected: bool = True
    may_cancel: bool = True
    fenced: bool = False
    """The front end takes no token of the new epoch any more."""
    orphaned: bool = False
    """The front end is gone."""
    extending: int = 0
    """Tokens on their way into the destination's engine."""

    def __post_init__(self) -> None:
        self._here(self.source.start())

    def copy(self) -> World:
        """Another world, the same."""
        world: World = pickle.loads(self.key())
        return world

    def key(self) -> bytes:
        """Equal for equal worlds."""
        self.source.history.clear()
        self.destination.history.clear()
        return pickle.dumps(self)

    def decodes(self) -> int:
        """Sides whose tokens reach the client."""
        there_too = self.at_destination == "running" and not self.fenced
        return (self.at_source == "running") + there_too

    def check(self) -> None:
        """What holds in every world."""
        assert self.decodes() <= 1
        assert (self.at_destination == "running") == self.destination.committed_here
        if self.destination.ended:
            assert self.at_destination != "reserved"

    def check_end(self) -> None:
        """What holds when nothing can happen any more."""
        assert self.source.ended
        assert self.at_source != "suspended"
        assert self.at_destination != "reserved"
        assert self.decodes() == 1 or self.orphaned

    # -- what can happen

    def moves(self) -> list[Callable[[], None]]:
        """Everything that can happen next, besides faults the ends of what is under way."""
        return [*self._moves_here(), *self._moves_there(), *self._faults()]

    def progress(self) -> bool:
        """Whether anything but a fault can happen."""
        return bool(self._moves_here() or self._moves_there())

    def _moves_here(self) -> list[Callable[[], None]]:
        if self.source.ended:
            return []
        moves: list[Callable[[], None]] = []
        asking = isinstance(self.doing_here, here.AskArbiter)
        if self.doing_here is None:
            moves.append(self._time_out)
        elif asking:
            moves += [self._fence_from_afar, self._lose_front_end]
            if self.doing_there is None:
                moves.append(self._ask_destination)
        else:
            moves += [self._succeed_here, partial(self._here_failed, "error")]
        if (
            self.doing_here is None
            or asking
            or isinstance(self.doing_here, here.Copy | here.SendFork)
        ):
            if self.to_source:
                moves.append(self._hear_here)
            if self.may_cancel:
                moves.append(self._cancel_here)
        return moves

    def _moves_there(self) -> list[Callable[[], None]]:
        if self.doing_there is not None:
            return [self._succeed_there, self._fail_there]
        moves: list[Callable[[], None]] = [self._extended] if self.extending else []
        if self.to_destination:
            moves.append(self._hear_there)
        if self.destination.state is not there.S.NEW and not self.destination.ended:
            moves.append(self._lease_ends)
        return moves

    def _faults(self) -> list[Callable[[], None]]:
        if not self.faults:
            return []
        queues = [queue for queue in (self.to_destination, self.to_source) if queue]
        faults: list[Callable[[], None]] = [
            partial(fault, queue) for queue in queues for fault in (self._lose, self._double)
        ]
        return [*faults, self._disconnect] if self.connected else faults

    def _lose(self, queue: list[Message]) -> None:
        self.faults -= 1
        queue.pop(0)

    def _double(self, queue: list[Message]) -> None:
        self.faults -= 1
        queue.append(queue[0])

    def _disconnect(self) -> None:
        self.faults -= 1
        self.connected = False
        self.to_destination.clear()
        self.to_source.clear()
        if self.source.beyond and self.doing_here is None:
            self._here(self.source.unreachable())
        elif self.doing_here is None and not self.source.ended:
            self._here_failed("peer_lost")

    # -- the source

    def _time_out(self) -> None:
        if self.source.beyond:
            self._here(self.source.unanswered())
        else:
            self._here_failed("timeout")

    def _cancel_here(self) -> None:
        self.may_cancel = False
        self._go_on(self.source.cancel("shutdown"))

    def _here_failed(self, reason: str) -> None:
        self._here(self.source.failed(reason))

    def _hear_here(self) -> None:
        machine = self.source
        match self.to_source.pop(0):
            case Reserved(stage=stage, hit_blocks=hit, can_follow=can) if machine.expects(stage):
                self._here(machine.reserved(hit, can))
            case Following(pace=pace):
                self._go_on(machine.followed(pace, 0.0, 1.0))
            case Refused(reason=reason):
                self._here(machine.refused(reason))
            case Aborted():
                self._here(machine.refused("superseded"))
            case Committed():
                self._here(machine.committed())

    def _ask_destination(self) -> None:
        self._there(self.destination.fence())
        self._here(self.source.resolved(self.destination.committed_here))

    def _fence_from_afar(self) -> None:
        self.fenced = True
        self._here(self.source.resolved(moved=False))

    def _lose_front_end(self) -> None:
        self.orphaned = True
        self._here(self.source.orphaned())

    def _succeed_here(self) -> None:
        machine = self.source
        match self.doing_here:
            case here.Export():
                self._here(machine.exported(8))
            case here.Check(sent):
                self._here(machine.checked(Stage([11, 12][sent:], 9, decoding=True)))
            case here.Copy(stage, first, ids):
                self._say(Chunk("m", stage, first, 0, 0, [0] * len(ids)))
                self._here(machine.copied())
            case here.Fork():
                self._here(machine.forked(TAIL))
            case here.SendFork(first):
                self._say(Chunk("m", 9, first, 0, 0, [0]))
                self._say(Follow("m", TAIL, first + 1))
                self._here(machine.fork_sent(1))
            case here.Suspend():
                self.at_source = "suspended"
                self._here(machine.suspended(TAIL))
            case here.SendTail(first, tail):
                if tail.block_ids and not self.together:
                    self._say(Chunk("m", 9, first, 0, 0, [0]))
                self._say(self._commit())
                self._here(machine.commit_sent())

    def _commit(self) -> Commit:
        return WITH_TAIL if self.together and not self.source.forked_there else COMMIT

    def _go_on(self, actions: list[here.Action]) -> None:
        if actions:
            self._here(actions)

    def _here(self, actions: list[here.Action]) -> None:
        self.doing_here = None
        for action in actions:
            match action:
                case here.SendReserve(stage, tokens):
                    export = None if stage else EXPORT
                    self._say(Reserve("m", "r", 1, stage, tokens, export=export))
                case here.SendCommit():
                    self._say(self._commit())
                case here.SendAbort(reason):
                    self._say(Abort("m", reason))
                case here.Listen():
                    if self.said < SAID:
                        self.said += 1
                        self._say(Tokens("m", self.said, [7]))
                case here.Resume():
                    assert self.at_source != "gone"
                    self.at_source = "running"
                case here.Release():
                    assert self.at_source == "suspended"
                    self.at_source = "gone"
                case _:
                    self.doing_here = action

    def _say(self, message: Message) -> None:
        if self.connected:
            self.to_destination.append(message)

    # -- the destination

    def _hear_there(self) -> None:
        machine = self.destination
        match self.to_destination.pop(0):
            case Reserve() as message:
                self._there(machine.reserve(message))
            case Chunk() as message:
                self._there(machine.chunk(message))
            case Follow() as message:
                self._there(machine.follow(message))
            case Tokens() as message:
                self._there(machine.tokens(message))
            case Commit() as message:
                self._there(machine.commit(message))
            case Abort():
                self._there(machine.abort())

    def _lease_ends(self) -> None:
        self._there(self.destination.cancel("timeout"))

    def _succeed_there(self) -> None:
        machine = self.destination
        match self.doing_there:
            case there.ReserveBlocks():
                self.at_destination = "reserved"
                self._there(machine.reserved(0, "tcp", self.can_follow))
            case there.Scatter(chunk):
                self._there(machine.scattered(chunk, 0.0))
            case there.RunBehind():
                self._there(machine.joined(Pace(0, 0), 0.0))
            case there.RunRequest():
                self.at_destination = "running"
                self._there(machine.committed(0.0))

    def _extended(self) -> None:
        self.extending -= 1
        self._there(self.destination.extended(Pace(0, 0), 0.0))

    def _fail_there(self) -> None:
        self._there(self.destination.failed("error"))

    def _there(self, actions: list[there.Action]) -> None:
        self.doing_there = None
        for action in actions:
            match action:
                case there.Answer(message):
                    if self.connected:
                        self.to_source.append(message)
                case there.Extend():
                    self.extending += 1
                case there.FreeBlocks():
                    assert self.at_destination != "running"
                    self.at_destination = "nothing"
                case _:
                    self.doing_there = action
