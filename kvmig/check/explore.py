"""Visits every state of a scenario, breadth first, and says what is wrong with the first bad one.

Requests of one scenario have nothing in common but their instances: so its states are those
of its requests beside each other, and only faults of instances, front end and scheduler
happen to all of them at once.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

from kvmig.check.cluster import Step
from kvmig.check.request import Request

Node = tuple[int, ...]
"""Faults that are left, and the number of each request's state."""


@dataclass
class Result:
    """violation: empty if every invariant holds; then trace says how it came.

    gap_s: longest time for which no side decodes; gap: what passes meanwhile.
    """

    states: int = 0
    events: int = 0
    ends: int = 0
    seconds: float = 0.0
    violation: str = ""
    trace: list[str] = field(default_factory=list)
    gap_s: float = 0.0
    gap: list[str] = field(default_factory=list)


class Explorer:
    """Of one scenario. alike: its requests may change places."""

    def __init__(self, requests: list[Request], faults: int, alike: bool = False) -> None:
        self._requests = requests
        self._alike = alike
        start: Node = (faults, *(0 for _ in requests))
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
        left, *states = self._nodes[at]
        for request, state in zip(self._requests, states, strict=True):
            decoding = request.decoding(state)
            if len(decoding) > 1:
                self._wrong(at, f"{' and '.join(decoding)} decode the request at once")
                return
        quiet = True
        for index, request in enumerate(self._requests):
            free = request.free(states[index])
            quiet = quiet and not free
            for step in free:
                self._take(at, left, index, step)
            if left and len(states) == 1:
                for step in request.faults(states[index]):
                    if step.cost <= left and not step.shared:
                        self._take(at, left - step.cost, index, step)
        if left:
            self._take_shared(at, left - 1, states)
        self._ends.append(len(self._targets))
        if quiet:
            self._end(at)

    def _take(self, at: int, left: int, index: int, step: Step) -> None:
        _, *states = self._nodes[at]
        label = step.label if len(states) == 1 else f"request {index + 1}: {step.label}"
        states[index] = step.target
        self._add(at, (left, *states), label, step.seconds)
        if step.violation:
            self._wrong(at, step.violation, label)

    def _take_shared(self, at: int, left: int, states: list[int]) -> None:
        """Faults that hit every request that can be hit by them."""
        hits: dict[str, list[list[Step]]] = {}
        for index, request in enumerate(self._requests):
            for step in request.faults(states[index]):
                if step.shared:
                    kind = step.shared.partition(",")[0]
                    ways = hits.setdefault(kind, [[] for _ in states])
                    ways[index].append(step)
        for ways in hits.values():
            untouched = [
                found or [Step("", state, 0, 0.0, "", "")]
                for found, state in zip(ways, states, strict=True)
            ]
            for taken in product(*untouched):
                label = next(step.label for step in taken if step.label)
                self._add(at, (left, *(step.target for step in taken)), label, 0.0)

    def _add(self, at: int, node: Node, label: str, seconds: float) -> None:
        if self._alike:
            node = (node[0], *sorted(node[1:]))
        known = self._at.get(node)
        if known is None:
            known = self._at[node] = len(self._nodes)
            self._nodes.append(node)
            self._from.append((at, label))
        self._targets.append(known)
        self._seconds.append(seconds)

    def _end(self, at: int) -> None:
        """Nothing more can happen."""
        self._result.ends += 1
        for request, state in zip(self._requests, self._nodes[at][1:], strict=True):
            if held := request.held(state):
                self._wrong(at, f"at the end {', '.join(held)}")
            elif request.waits(state):
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
        for index, request in enumerate(self._requests):
            self._longest(order, index, request.waits, request.decoding)

    def _longest(
        self,
        order: list[int],
        index: int,
        waits: Callable[[int], bool],
        decoding: Callable[[int], list[str]],
    ) -> None:
        gaps = array("d", bytes(8 * len(order)))
        nexts = array("i", [-1]) * len(order)
        worst = -1
        for at in reversed(order):
            state = self._nodes[at][1 + index]
            if not waits(state) or decoding(state):
                continue
            for edge in self._edges(at):
                after = self._seconds[edge] + gaps[self._targets[edge]]
                if after > gaps[at]:
                    gaps[at], nexts[at] = after, edge
            if worst < 0 or gaps[at] > gaps[worst]:
                worst = at
        if worst < 0 or gaps[worst] <= self._result.gap_s:
            return
        self._result.gap_s, self._result.gap = gaps[worst], []
        at = worst
        while nexts[at] >= 0:
            if self._seconds[nexts[at]]:
                self._result.gap.append(self._label(at, nexts[at]))
            at = self._targets[nexts[at]]

    def _label(self, at: int, edge: int) -> str:
        target, seconds = self._nodes[self._targets[edge]], self._seconds[edge]
        for index, request in enumerate(self._requests):
            state = self._nodes[at][1 + index]
            for one in (*request.free(state), *request.faults(state)):
                if one.target == target[1 + index] and one.seconds == seconds:
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
