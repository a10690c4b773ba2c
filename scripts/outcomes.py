"""How a check and its tests went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One test as a JUnit report has it. how: passed, skipped or failed; why: of a skip."""

    name: str
    how: str
    seconds: float
    why: str = ""


@dataclass(frozen=True)
class Outcome:
    """How one check went. flaky: tests that passed only when run again.

    processor_s: of its processes and of those that they waited for.
    """

    name: str
    passed: bool
    seconds: float
    cases: Sequence[Case] = ()
    flaky: Sequence[str] = ()
    must_pass: bool = True
    processor_s: float = 0.0
    why: str = ""
    """How its process ended, if not as processes of its kind do."""
    stacks: str = ""
    """Where its threads were then, if Python has printed it."""
    taken_from: str = ""
    """The earlier run that it is of; empty: this one."""
