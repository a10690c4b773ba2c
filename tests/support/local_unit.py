"""A unit whose members' gates are in this process: the agent's decisions, without an agent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from kvmig.engines.gate import ComputeShares, StepGrant, StepRequest
from kvmig.sharing.step_gate import UnitGate
from kvmig.sharing.step_scheduler import StepScheduler


class LocalUnit:
    """Answers at once, on the thread that asks, but while it is told to be silent."""

    def __init__(self, policy: str = "adbs") -> None:
        self.turns = StepScheduler(policy, 60.0)
        self.silent = False
        self.gates: dict[str, UnitGate] = {}
        self.told: list[tuple[str, StepGrant]] = []
        """Every grant and its member, in order."""
        self._lock = threading.RLock()

    def join(self, member: str, shares: ComputeShares, limit_s: float = 10.0) -> UnitGate:
        """The gate of a new member."""
        with self._lock:
            self.turns.join(member, shares)
            gate = UnitGate(partial(self._ask, member), partial(self._done, member), limit_s)
            self.gates[member] = gate
            for one in self.gates.values():
                one.crowd(alone=len(self.gates) == 1)
        return gate

    def leave(self, member: str) -> None:
        """It has gone."""
        with self._lock:
            self.turns.remove_member(member)
            self.gates.pop(member).crowd(alone=True)
            for one in self.gates.values():
                one.crowd(alone=len(self.gates) == 1)
        self._act(lambda: None)

    def _ask(self, member: str, request: StepRequest) -> None:
        self._act(lambda: self.turns.request_step(member, request))

    def _done(self, member: str, number: int) -> None:
        self._act(lambda: self.turns.finish_step(member, number, time.monotonic()))

    def _act(self, what: Callable[[], None]) -> None:
        with self._lock:
            what()
            grants = {} if self.silent else self.turns.grants(time.monotonic())
            recalls = {} if self.silent else self.turns.recalls(time.monotonic())
            self.told += grants.items()
            for name, grant in grants.items():
                self.gates[name].receive_grant(grant)
            for name, number in recalls.items():
                self.gates[name].recall_grant(number)
