"""Visits every state of a request, breadth first, and says what is wrong with the first bad one."""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvmig_tools.check.arrival import LEASE_S
from kvmig_tools.check.cluster import Step
from kvmig_tools.check.departure import REPLY_S
from kvmig_tools.check.request import Request

Node = tuple[int, int]
"""Faults that are left, and the number of the request's state."""


def bound_s(faults: int) -> float:
    """How long nobody may decode: a lease, and a reply's time-out for each further fault."""
    return LEASE_S + max(0, faults - 1) * REPLY_S


@contextmanager
def all_kept() -> Iterator[None]:
    """What is made inside the block stays to its end: to look for garbage among it is a quarter of
    the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass
class Result:
    """violation: empty if every invariant holds; then trace says how it came.

    gap_s: longest time for which no side decodes; gap: what passes meanwhile. pairs: states of
    two such requests, see `pairs.count`; shared: of what both have at one process, compared.
    """

    states: int = 0
    events: int = 0
    ends: int = 0
    seconds: float = 0.0
    violation: str = ""
    trace: list[str] = field(default_factory=list)
    gap_s: float = 0.0
    gap: list[str] = field(default_factory=list)
    pairs: int = 0
    shared: int = 0


class Explorer:
    """Of one request, with so many faults at most."""

    def __init__(self, request: Request, faults: int) -> None:
        self._request = request
        self._bound_s = bound_s(faults)
        start: Node = (faults, 0)
        self._nodes = [start]
        self._at = {start: 0}
        self._from: list[tuple[int, str]] = [(-1, "")]
        self._targets = array("i")
        self._seconds = array("d")
        self._ends = array("i")
        """Where the edges of each node end in `_targets`."""
        self._result = Result()

    def run(self) -> Result:
        """Until all is visited, or something is wrong."""
        began = time.process_time()
        result, at = self._result, 0
        while at < len(self._nodes) and not result.violation:
            self._visit(at)
            at += 1
        result.states, result.events = len(self._nodes), len(self._targets)
        if not result.violation:
            self._measure()
        result.seconds = time.process_time() - began
        return result

    def _visit(self, at: int) -> None:
        left, state = self._nodes[at]
        if wrong := self._request.broken(state):
            self._wrong(at, wrong)
            return
        free = self._request.free(state)
        for step in free:
            self._take(at, left, step)
        if left:
            for step in self._request.faults(state):
                if step.cost <= left:
                    self._take(at, left - step.cost, step)
        self._ends.append(len(self._targets))
        if not free:
            self._end(at, state)

    def _take(self, at: int, left: int, step: Step) -> None:
        node = (left, step.target)
        known = self._at.get(node)
        if known is None:
            known = self._at[node] = len(self._nodes)
            self._nodes.append(node)
            self._from.append((at, step.label))
        self._targets.append(known)
        self._seconds.append(step.seconds)
        if step.violation:
            self._wrong(at, step.violation, step.label)

    def _end(self, at: int, state: int) -> None:
        """Nothing more can happen."""
        self._result.ends += 1
        if held := self._request.held(state):
            self._wrong(at, f"at the end {', '.join(held)}")
        elif self._request.waits(state):
            self._wrong(at, "the client waits for ever")

    def _wrong(self, at: int, violation: str, last: str = "") -> None:
        """last: what happened at `at` that led to it."""
        if self._result.violation:
            return
        self._result.violation = violation
        trace = [last] if last else []
        while at > 0:
            at, label = self._from[at]
            trace.append(label)
        self._result.trace = trace[::-1]

    # -- how long

    def _measure(self) -> None:
        """The longest way through states in which nobody decodes; a circle has no end."""
        order = self._sorted()
        if len(order) < len(self._nodes):
            circle = self._circle(order)
            self._wrong(circle[0], "it may go on in a circle for ever")
            around = zip(circle, [*circle[1:], circle[0]], strict=True)
            self._result.trace += [f"again: {self._leads(at, after)}" for at, after in around]
            return
        self._longest(order)

    def _longest(self, order: list[int]) -> None:
        gaps = array("d", bytes(8 * len(order)))
        nexts = array("i", [-1]) * len(order)
        worst = -1
        for at in reversed(order):
            state = self._nodes[at][1]
            if not self._request.waits(state) or self._request.decoding(state):
                continue
            for edge in self._edges(at):
                after = self._seconds[edge] + gaps[self._targets[edge]]
                if after > gaps[at]:
                    gaps[at], nexts[at] = after, edge
            if worst < 0 or gaps[at] > gaps[worst]:
                worst = at
        if worst < 0:
            return
        self._result.gap_s, at = gaps[worst], worst
        while nexts[at] >= 0:
            if self._seconds[nexts[at]]:
                self._result.gap.append(self._label(at, nexts[at]))
            at = self._targets[nexts[at]]
        if self._result.gap_s > self._bound_s:
            self._wrong(worst, f"nobody decodes for {self._result.gap_s:g} s")
            self._result.trace += self._result.gap

    def _label(self, at: int, edge: int) -> str:
        state, target = self._nodes[at][1], self._nodes[self._targets[edge]][1]
        seconds = self._seconds[edge]
        for one in (*self._request.free(state), *self._request.faults(state)):
            if one.target == target and one.seconds == seconds:
                return f"{one.label} ({seconds:g} s)" if seconds else one.label
        return f"{seconds:g} s"

    def _edges(self, at: int) -> range:
        return range(self._ends[at - 1] if at else 0, self._ends[at])

    def _sorted(self) -> list[int]:
        """Each before all that it leads to; what is in circles is left out."""
        inward = array("i", bytes(4 * len(self._nodes)))
        for target in self._targets:
            inward[target] += 1
        order = [at for at in range(len(inward)) if not inward[at]]
        for at in order:
            for edge in self._edges(at):
                target = self._targets[edge]
                inward[target] -= 1
                if not inward[target]:
                    order.append(target)
        return order

    def _circle(self, order: list[int]) -> list[int]:
        """The nodes of one, each before the next."""
        left = set(range(len(self._nodes))) - set(order)
        before = {self._targets[edge]: at for at in left for edge in self._edges(at)}
        at, seen = min(left), list[int]()
        while at not in seen:
            seen.append(at)
            at = before[at]
        return seen[seen.index(at) :][::-1]

    def _leads(self, at: int, target: int) -> str:
        """What happens between two nodes."""
        edge = next(edge for edge in self._edges(at) if self._targets[edge] == target)
        return self._label(at, edge)
