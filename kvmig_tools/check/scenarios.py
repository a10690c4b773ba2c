"""What is explored: who moves where, how, and how much may go wrong."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from kvmig_tools.check.explore import Explorer, Result, all_kept
from kvmig_tools.check.request import Request
from kvmig_tools.check.session import SessionMove
from kvmig_tools.check.site import Shape
from kvmig_tools.check.two import Two

NAMES = ("r", "q")
"""Of requests."""
LIFE = "a model's life"
"""The scenario beside these, which has machines of its own (`life.py`)."""


@dataclass(frozen=True)
class Scenario:
    """names: of the instances, a letter each, by request: it starts at the first.

    orders: the scheduler's for each request, as "ab" for a move from a to b; of a session the
    front end's, as "Fba" for a move to b and one to a. session: whether it is one, idle. faults:
    how many at most. cuts: whether a fault may break a connection of the front end. compared: of
    two requests, how many faults each may have had while they are compared with each alone. long:
    takes minutes.
    """

    name: str
    shape: Shape
    names: tuple[str, ...] = ("ab",)
    orders: tuple[tuple[str, ...], ...] = (("ab",),)
    faults: int = 1
    cuts: bool = True
    compared: int = 1
    long: bool = False
    session: bool = False

    def with_faults(self, faults: int) -> Scenario:
        """The same with more or fewer."""
        return replace(self, faults=faults, compared=min(faults, self.compared))

    def whole(self) -> Scenario:
        """The same, compared with all its faults."""
        return replace(self, compared=self.faults)

    def requests(self) -> list[Request]:
        """Its requests, not explored yet."""
        kind = SessionMove if self.session else Request
        return [
            kind(at, self.shape, {one[0]: one[1:] for one in orders}, None, self.cuts, name)
            for at, orders, name in zip(self.names, self.orders, NAMES, strict=False)
        ]


SHORT = Shape(tokens=1, stages=0)
"""The request is suspended, copied and committed; one token."""
LONG = Shape(tokens=2, stages=3)

SCENARIOS = (
    Scenario("three stages", LONG),
    Scenario("tail in Commit", Shape(tokens=2, stages=1, together=True)),
    Scenario("one that waits", Shape(tokens=1, stages=1, waits=True)),
    Scenario("a prompt's handover", Shape(tokens=3, stages=1, chunks=2)),
    Scenario("an idle session", Shape(tokens=1, stages=1), orders=(("Fb",),), session=True),
    Scenario("idle, there and back", SHORT, orders=(("Fba",),), session=True, long=True),
    Scenario("two faults", SHORT, faults=2),
    Scenario("a single question", replace(SHORT, questions=1), faults=2, long=True),
    Scenario("on to a third", SHORT, ("abc",), (("ab", "bc"),)),
    Scenario("there and back", SHORT, ("ab",), (("ab", "ba"),)),
    Scenario("two, one way", SHORT, ("ab", "ab"), (("ab",), ("ab",)), long=True),
    Scenario("two, both ways", SHORT, ("ab", "ba"), (("ab",), ("ba",)), long=True),
    Scenario("two long, one way", LONG, ("ab", "ab"), (("ab",), ("ab",)), compared=0, long=True),
    Scenario("two long, both ways", LONG, ("ab", "ba"), (("ab",), ("ba",)), compared=0, long=True),
)


@all_kept()
def explore(scenario: Scenario) -> Result:
    """Visit all of it. What the parts log is of no interest here."""
    logging.disable(logging.CRITICAL)
    try:
        requests = scenario.requests()
        if len(requests) == 1:
            return Explorer(requests[0], scenario.faults).run()
        compared = requests
        if scenario.compared != scenario.faults:
            compared = scenario.requests()
            for request in compared:
                Explorer(request, scenario.compared).run()
        first, second = requests
        return Two((first, second), (compared[0], compared[1]), scenario.faults).run()
    finally:
        logging.disable(logging.NOTSET)
