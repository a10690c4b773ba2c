"""The model checker, two requests: they leave each other be, and all their states are counted."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmig.controlplane.fronts import OwnershipTable
from kvmig.frontend.requests import RequestTable
from kvmig.kvtransfer.destination_machine import Attempt, MachineTombstones
from kvmig.kvtransfer.messages import Reserve
from kvmig.kvtransfer.source_machine import EpochCounter
from kvmig_tools.check.cluster import Step
from kvmig_tools.check.pairs import count
from kvmig_tools.check.scenarios import Scenario, explore
from kvmig_tools.check.site import Shape, Site

PLANT = pytest.MonkeyPatch
SHAPE = Shape(tokens=1, stages=1)
ALONE = Scenario("alone", SHAPE, faults=0)


def two(*names: str) -> Scenario:
    orders = tuple((one,) for one in names)
    return Scenario("two", SHAPE, names, orders, faults=0, compared=0)


@pytest.mark.parametrize("names", [("ab", "ab"), ("ab", "ba")])
def test_two_requests_of_several_stages_leave_each_other_be(names: tuple[str, ...]) -> None:
    result = explore(two(*names))
    assert (result.violation, result.trace) == ("", [])
    assert result.pairs == explore(ALONE).states ** 2
    assert result.shared > result.states


def _an_attempt_is_known_by_its_epoch_alone(plant: PLANT) -> None:
    def used(self: MachineTombstones, attempt: Attempt) -> bool:
        return attempt[1] in {epoch for _, epoch in self._attempts}

    plant.setattr(MachineTombstones, "used", used)


def _requests_have_their_epochs_in_common(plant: PLANT) -> None:
    after = EpochCounter.after
    plant.setattr(EpochCounter, "after", lambda self, request_id, epoch: after(self, "all", epoch))


def _one_that_leaves_takes_the_others_along(plant: PLANT) -> None:
    left = OwnershipTable.left

    def all_leave(self: OwnershipTable, request_id: str, endpoint: str) -> None:
        left(self, request_id, endpoint)
        self._here.clear()

    plant.setattr(OwnershipTable, "left", all_leave)


def _the_next_stage_goes_to_any_migration(plant: PLANT) -> None:
    receive = Site._receive

    def careless(self: Site, mid: str, message: object) -> None:
        later = isinstance(message, Reserve) and message.stage > 0
        receive(self, max(self.arrivals, default=mid) if later else mid, message)

    plant.setattr(Site, "_receive", careless)


def _the_front_end_forgets_all_when_one_ends(plant: PLANT) -> None:
    remove = RequestTable.remove

    def forgetful(self: RequestTable, request_id: str) -> object:
        removed = remove(self, request_id)
        self.live.clear()
        return removed

    plant.setattr(RequestTable, "remove", forgetful)


@pytest.mark.parametrize(
    "bug",
    [
        _an_attempt_is_known_by_its_epoch_alone,
        _requests_have_their_epochs_in_common,
        _one_that_leaves_takes_the_others_along,
        _the_next_stage_goes_to_any_migration,
        _the_front_end_forgets_all_when_one_ends,
    ],
    ids=lambda one: one.__name__.strip("_"),
)
def test_a_bug_that_needs_two_requests_is_found(
    monkeypatch: pytest.MonkeyPatch, bug: Callable[[PLANT], None]
) -> None:
    bug(monkeypatch)
    assert explore(ALONE).violation == ""
    found = explore(two("ab", "ab"))
    assert "another request" in found.violation


class Made:
    """A made-up automaton: its steps by state."""

    def __init__(self, free: list[list[int]], faults: list[list[tuple[int, int, str]]]) -> None:
        self._free = [[Step("", to, 0, 0.0, "", "") for to in one] for one in free]
        self._faults = [[Step("", to, cost, 0.0, by, "") for to, cost, by in one] for one in faults]

    def free(self, number: int) -> list[Step]:
        return self._free[number]

    def faults(self, number: int) -> list[Step]:
        return self._faults[number]


def visited(first: Made, second: Made, faults: int) -> int:
    """By visiting them."""
    seen = {(faults, 0, 0)}
    todo = list(seen)
    while todo:
        left, a, b = todo.pop()
        found = [(left, one.target, b) for one in first.free(a)]
        found += [(left, a, one.target) for one in second.free(b)]
        hits: list[dict[str, list[int]]] = [{}, {}]
        for which, request, state in ((0, first, a), (1, second, b)):
            for one in request.faults(state):
                if one.shared:
                    hits[which].setdefault(one.shared.partition(",")[0], []).append(one.target)
                elif one.cost <= left:
                    after = (one.target, b) if which == 0 else (a, one.target)
                    found.append((left - one.cost, *after))
        if left:
            for kind in {*hits[0], *hits[1]}:
                ways = product(hits[0].get(kind, [a]), hits[1].get(kind, [b]))
                found += [(left - 1, *after) for after in ways]
        todo += {*found} - seen
        seen |= {*found}
    return len(seen)


STATES = 5
NUMBERS = st.integers(0, STATES - 1)
FAULT = st.tuples(NUMBERS, st.integers(1, 2), st.just("")) | st.tuples(
    NUMBERS, st.just(1), st.sampled_from(["a-", "a-, later", "F-"])
)
MADE = st.builds(
    Made,
    st.lists(st.lists(NUMBERS, max_size=2), min_size=STATES, max_size=STATES),
    st.lists(st.lists(FAULT, max_size=3), min_size=STATES, max_size=STATES),
)


@settings(deadline=None)
@given(MADE, MADE, st.integers(0, 3))
def test_as_many_states_are_counted_as_can_be_visited(
    first: Made, second: Made, faults: int
) -> None:
    assert count(first, second, faults) == visited(first, second, faults)
