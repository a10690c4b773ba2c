"""What the sessions of a migration's two halves have in common.

A session runs a pure machine against an engine and a peer. Events come in at `deliver` and wait in
the mailbox. `_hear` gives an event to the machine, which answers with actions. `_follow` carries
them out, each by `_perform`, whose results are events of the machine, too. An action that fails
is an event as well (`_give_up`).
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from kvmig.core.errors import KvmigError, MigrationRefused
from kvmig.kvtransfer.machine import StateMachine
from kvmig.kvtransfer.mailbox import ActionInterrupted, EventMailbox

log = logging.getLogger(__name__)

E = TypeVar("E")
A = TypeVar("A")


class MigrationSession(ABC, Generic[E, A]):
    """One half of one migration, with events E and actions A."""

    machine: StateMachine

    def __init__(self, timeout_s: float) -> None:
        """timeout_s: that an engine's call or an answer may take."""
        self._timeout_s = timeout_s
        self._mailbox: EventMailbox[E, A] = EventMailbox(self._hear)
        self._undone: list[A] = []
        """The action under way, and those that come after it."""

    def deliver(self, event: E) -> None:
        """Take a message of this migration, or what happened here."""
        self._mailbox.put(event)

    @abstractmethod
    def _hear(self, event: E) -> list[A]:
        """Give the machine an event from the mailbox; what it wants then."""

    @abstractmethod
    async def _perform(self, action: A) -> list[A]:
        """One step of the migration; what the machine wants next."""

    @abstractmethod
    def _give_up(self, reason: str, detail: str) -> list[A]:
        """An action has failed, and the machine hasn't ended; what it wants then."""

    async def _follow(self, actions: list[A]) -> None:
        """Carry out the machine's actions, and those that they lead to."""
        while actions:
            following: list[A] = []
            for index, action in enumerate(actions):
                self._undone = actions[index:]
                try:
                    following += await self._perform(action)
                except ActionInterrupted as stop:
                    following += stop.actions
                except MemoryError:
                    raise  # it may have come between a state and its actions: see `Migrations`
                except Exception as error:  # noqa: BLE001 - logged there
                    following += self._failed(action, error)
            actions = following

    def _failed(self, action: A, error: Exception) -> list[A]:
        name = type(action).__name__
        reason, detail = self._reason(name, error)
        if self.machine.ended:
            # Cleaning up: the next action must still have its turn.
            log.warning("%s: %s: %s", self.machine.key, name, detail)
            return []
        return self._give_up(reason, detail)

    def _reason(self, name: str, error: Exception) -> tuple[str, str]:
        """Reason and detail for the report. name: of the action that failed."""
        match error:
            case MigrationRefused():
                return error.reason, error.detail
            case TimeoutError():
                return "timeout", f"{name} took too long"
            case KvmigError():
                return "error", str(error)
        log.error("%s: %s failed", self.machine.key, name, exc_info=error)
        return "error", repr(error)

    def _in_time(self) -> asyncio.Timeout:
        """Raises TimeoutError when a call takes longer than an answer may."""
        return asyncio.timeout(self._timeout_s)
