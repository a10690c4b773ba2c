"""What is explored: who moves where, how, and how much may go wrong."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from kvmig.check.explore import Explorer, Result
from kvmig.check.part import Library
from kvmig.check.request import Request
from kvmig.check.site import Shape


@dataclass(frozen=True)
class Scenario:
    """names: of the instances, a letter each, by request: it starts at the first.

    orders: the scheduler's for each request, as "ab" for a move from a to b. faults: how many at
    most. Of several requests only faults that hit all at once are taken: what befalls the
    messages of one touches nothing of another, and the scenarios of one request have that.
    cuts: whether a fault may break a connection of the front end.
    """

    name: str
    shape: Shape
    names: tuple[str, ...] = ("ab",)
    orders: tuple[tuple[str, ...], ...] = (("ab",),)
    faults: int = 1
    cuts: bool = True

    def with_faults(self, faults: int) -> Scenario:
        """The same with more or fewer."""
        return replace(self, faults=faults)


SHORT = Shape(tokens=1, stages=0)
"""The request is suspended, copied and committed; one token."""

SCENARIOS = (
    Scenario("three stages", Shape(tokens=2, stages=3)),
    Scenario("tail in Commit", Shape(tokens=2, stages=1, together=True)),
    Scenario("rest is computed", Shape(tokens=2, stages=1, way="recompute")),
    Scenario("destination follows", Shape(tokens=3, stages=1, way="follow"), cuts=False),
    Scenario("two faults", SHORT, faults=2),
    Scenario("on to a third", SHORT, ("abc",), (("ab", "bc"),)),
    Scenario("there and back", SHORT, ("ab",), (("ab", "ba"),)),
    Scenario("two, one way", SHORT, ("ab", "ab"), (("ab",), ("ab",)), cuts=False),
    Scenario("two, both ways", SHORT, ("ab", "ba"), (("ab",), ("ba",)), cuts=False),
)


def explore(scenario: Scenario) -> Result:
    """Visit all of it. What the parts log is of no interest here."""
    logging.disable(logging.CRITICAL)
    try:
        library = Library()
        requests = [
            Request(
                names, scenario.shape, {one[0]: one[1] for one in orders}, library, scenario.cuts
            )
            for names, orders in zip(scenario.names, scenario.orders, strict=True)
        ]
        alike = len(requests) > 1 and len(set(scenario.names)) == 1
        if alike:
            requests = requests[:1] * len(requests)
        return Explorer(requests, scenario.faults, alike).run()
    finally:
        logging.disable(logging.NOTSET)
