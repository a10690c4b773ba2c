"""The agent's part of the step gate: members' questions in, grants out, on its event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvmig.core.errors import PeerError, TransportError
from kvmig.engines.gate import ComputeShares, StepRequest
from kvmig.sharing.messages import GrantRecalled, MemberCount, StepDone, ToMember, encode, tag_of
from kvmig.sharing.step_scheduler import StepScheduler

log = logging.getLogger(__name__)

Send = Callable[[bytes], None]
"""Raises TransportError."""


class UnitTurns:
    """The order of the steps of a unit; make it inside a running event loop."""

    def __init__(self, turns: StepScheduler) -> None:
        self.turns = turns
        self._loop = asyncio.get_running_loop()
        self._sends: dict[str, Send] = {}
        self._due: asyncio.TimerHandle | None = None

    def handle(
        self, name: str, message: ComputeShares | StepRequest | StepDone, send: Send
    ) -> None:
        """send: on that member's connection. Raises ConfigError for shares that can't be, and
        PeerError for a question of one that isn't gated."""
        if isinstance(message, ComputeShares):
            self.turns.join(name, message)
            self._sends[name] = send
            self._tell_crowd()
        elif name not in self._sends:
            raise PeerError(f"{tag_of(message)} isn't expected before Gated")
        elif isinstance(message, StepRequest):
            self.turns.request_step(name, message)
        else:
            self.turns.finish_step(name, message.number, self._loop.time())
        self._grant()

    def remove_member(self, name: str) -> None:
        """Free what a member held whose connection is gone. Unknown ones are ignored."""
        if self._sends.pop(name, None) is not None:
            self.turns.remove_member(name)
            self._tell_crowd()
            self._grant()

    def close(self) -> None:
        """Wait for no member any more."""
        if self._due is not None:
            self._due.cancel()

    def _grant(self) -> None:
        now = self._loop.time()
        for member, grant in self.turns.grants(now).items():
            self._send(member, grant)
        for member, number in self.turns.recalls(now).items():
            self._send(member, GrantRecalled(number))
        self.close()
        due = self.turns.next_overdue()
        self._due = None if due is None else self._loop.call_at(due, self._grant)

    def _send(self, name: str, message: ToMember) -> None:
        try:
            self._sends[name](encode(message))
        except TransportError as error:  # its job ends when it is overdue, or its connection does
            log.info("%s: %s", name, error)

    def _tell_crowd(self) -> None:
        for name in list(self._sends):
            self._send(name, MemberCount(len(self._sends)))
