"""A state machine is a table: `state -> {event: next state}`.

An event without an arrow raises and changes nothing; the machines on top of this
are pure (no clock, no socket) and return actions for a session to carry out. The
pictures in docs/ are drawn from the tables. After h11's `_state.py` and dask's
`worker_state_machine.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar

from kvmig.core.errors import InvalidTransition

Table = Mapping[StrEnum, Mapping[StrEnum, StrEnum]]

HISTORY = 32
"""Transitions that a machine remembers for its errors."""


class StateMachine:
    """State, history, and the one way to change the state."""

    table: ClassVar[Table]

    def __init__(self, key: str, initial: StrEnum) -> None:
        """`key` names the machine in errors."""
        self.key = key
        self.state: StrEnum = initial
        self.history: deque[str] = deque(maxlen=HISTORY)

    @property
    def ended(self) -> bool:
        """Whether no event leads out of the state any more."""
        return all(after == self.state for after in self.table[self.state].values())

    def apply_event(self, event: StrEnum) -> None:
        """Follow the arrow. Raises InvalidTransition, unchanged, if there is none."""
        after = self.table[self.state].get(event)
        if after is None:
            raise InvalidTransition(self.key, self.state, event, tuple(self.history))
        self.history.append(f"{self.state} --{event}--> {after}")
        self.state = after
