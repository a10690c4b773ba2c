"""The destination's side of one migration: what `DestinationSession` does, without waiting.

A session looks at its next message when the engine is done with the one before: so an
engine's call belongs to the message that led to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvmig.core.config import MigrationConfig
from kvmig.kvtransfer import destination_machine as there
from kvmig.kvtransfer.destination_machine import DestinationMachine, SourceMessage
from kvmig.kvtransfer.messages import Aborted, Committed, Refused, Reserve
from kvmig.rpc.messages import RpcMessage
from kvmig_tools.check.part import Letter, Move, Violation

if TYPE_CHECKING:
    from kvmig_tools.check.engine import Slot
    from kvmig_tools.check.site import Site

LEASE_S = MigrationConfig().lease_ms / 1e3


@dataclass
class Arrival:
    """One migration that comes in."""

    opening: Reserve
    machine: DestinationMachine

    @property
    def attempt(self) -> tuple[str, int]:
        """(run, epoch)."""
        return self.opening.request_id, self.opening.epoch

    def moves(self) -> list[Move]:
        """What it may do by itself."""
        mid = self.machine.key
        return [Move(f"'s lease of {mid} ends", ("lease_ends", mid), "lease", LEASE_S)]

    def hear(self, site: Site, message: object) -> None:
        """A message of the source."""
        if isinstance(message, SourceMessage):
            self.follow(site, self.machine.receive_message(message))

    def follow(self, site: Site, actions: list[there.Action]) -> None:
        """Perform them, and what they lead to."""
        while actions:
            following: list[there.Action] = []
            for action in actions:
                following += self._perform(site, action)
            actions = following
        if self.machine.ended:
            site.arrived(self)

    def _perform(self, site: Site, action: there.Action) -> list[there.Action]:
        machine, run = self.machine, self.opening.request_id
        match action:
            case there.SendAnswer(message):
                site.answer(machine.key, message)
            case there.FreeBlocks():
                site.engine.cancel(run)
            case there.ReserveBlocks(export) if export is not None:
                return self._open(site, run, export.num_tokens > 0)
            case _ if site.fails():
                return machine.failed("error")
            case there.ReserveBlocks():
                self._slot(site).room = True
                return machine.reserved()
            case there.ScatterChunk(chunk):
                self._slot(site).write(chunk)
                return machine.scattered(chunk, 0.0)
            case there.RunRequest(tail, last):
                if not site.front_known:
                    return machine.failed("incompatible")
                if self.attempt in site.committed:
                    raise Violation("a commit is carried out twice")
                site.committed[self.attempt] = machine.key
                site.tracking.begin(run, self.opening.epoch, tail.num_output_tokens, "F")
                site.engine.commit(run, tail, last)
                return machine.committed(0.0)
        return []

    def _open(self, site: Site, run: str, room: bool) -> list[there.Action]:
        if run in site.engine.slots:
            return self.machine.failed("error")
        if site.oracle.choose(("", 0), ("has no room", 0)):
            return self.machine.failed("no_blocks")
        site.engine.slots[run] = site.reservation(room)
        return self.machine.reserved(0, "tcp")

    def _slot(self, site: Site) -> Slot:
        return site.engine.slots[self.opening.request_id]


def answered(site: Site, mid: str, message: RpcMessage) -> Letter:
    """An answer to the source, after a look at what was answered before."""
    if isinstance(message, Refused | Aborted) and mid in site.committed.values():
        raise Violation("a commit is undone: the source is told that nothing is here")
    if isinstance(message, Committed) and mid not in site.committed.values():
        raise Violation("a commit is confirmed that never was")
    return Letter(f"{site.name}>{mid[0]}:{mid}", message)
