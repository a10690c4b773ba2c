"""Migrations into one instance that have ended: their machines stay and answer. Pure.

A tombstone answers late and repeated messages, and fences, as the migration ended: so a
commit is never taken back and a cancelled one never happens.
"""

from __future__ import annotations

from collections import OrderedDict

from kvmig.kvtransfer.destination_actions import Action
from kvmig.kvtransfer.destination_machine import DestinationMachine
from kvmig.kvtransfer.messages import Abort, Commit, Message, Reserve

REMEMBERED = 4096
"""Tombstones: many times what can end while one message is late."""

Attempt = tuple[str, int]
"""(request_id, epoch): used once."""


class Tombstones:
    """Ended machines by migration, and by attempt."""

    def __init__(self) -> None:
        self._ended: OrderedDict[str, DestinationMachine] = OrderedDict()
        self._attempts: OrderedDict[Attempt, DestinationMachine] = OrderedDict()

    def used(self, attempt: Attempt) -> bool:
        """Whether it has ended here, or was fenced."""
        return attempt in self._attempts

    def knows(self, mid: str) -> bool:
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

    def answer(self, mid: str, message: Message) -> list[Action]:
        """To a message of a migration that has ended or was never heard of: Commit and Abort
        end that, too."""
        machine = self._ended.get(mid)
        if machine is not None:
            return _late(machine, message)
        machine = DestinationMachine(mid)
        actions = _late(machine, message)
        if machine.ended:
            attempt = (message.request_id, message.epoch) if isinstance(message, Commit) else None
            self.bury(machine, attempt)
        return actions

    def fence(self, attempt: Attempt) -> bool:
        """Whether it was committed; if not, it never will be."""
        machine = self._attempts.get(attempt)
        if machine is None:
            machine = DestinationMachine("fence of {} at {}".format(*attempt))
            self.bury(machine, attempt)
        machine.fence()
        return machine.committed_here


def _late(machine: DestinationMachine, message: Message) -> list[Action]:
    match message:
        case Reserve():
            return machine.reserve(message)
        case Commit():
            return machine.commit(message)
        case Abort():
            return machine.abort()
    return []  # it brings what isn't wanted any more
