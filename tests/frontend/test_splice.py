"""One stream out of several owners' outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.controlplane.messages import OutputSpan
from kvmig.frontend import splice
from kvmig.frontend.ports import OutputItem
from kvmig.frontend.splice import (
    Action,
    OwnerSwitched,
    SplicedItems,
    StaleCopy,
    StreamGap,
    StreamSplicer,
)
from kvmig.kvtransfer.source_machine import LEAP


@dataclass
class Tokens:
    """An item of numbered tokens: token i is the number i."""

    request_id: str
    new_token_ids: Sequence[int]
    finished: bool = False


@pytest.fixture
def splicer() -> StreamSplicer:
    """Of a stream that instance a begins."""
    return StreamSplicer("a")


def item(start: int, count: int, last: bool = False) -> Tokens:
    return Tokens("r", range(start, start + count), last)


def feed(
    splicer: StreamSplicer, owner: str, epoch: int, start: int, count: int = 1, *,
    last: bool = False, now: float = 0.0,
) -> SplicedItems:  # fmt: skip
    return splicer.feed(owner, OutputSpan("r", epoch, start), item(start, count, last), now)


def tokens(delivered: Sequence[tuple[str, OutputItem]]) -> list[int]:
    return [token for _, piece in delivered for token in piece.new_token_ids]


def test_what_comes_next_advances_and_anything_else_does_not(splicer: StreamSplicer) -> None:
    assert splicer.advance(0, 0, 2, now=1.0)
    assert not splicer.advance(0, 3, 1, now=1.0)
    assert not splicer.advance(0, 1, 1, now=1.0)
    assert not splicer.advance(1, 2, 1, now=1.0)
    assert splicer.next == 2


def test_the_new_owner_waits_for_the_old_ones_tokens_and_then_takes_over(
    splicer: StreamSplicer,
) -> None:
    splicer.advance(0, 0, 3, now=1.0)
    assert feed(splicer, "b", 1, 4, now=2.0) == SplicedItems([], [])
    fed = feed(splicer, "a", 0, 3, now=2.5)
    assert tokens(fed.deliver) == [3, 4]
    assert [owner for owner, _ in fed.deliver] == ["a", "b"]
    assert fed.actions == [OwnerSwitched("a", "b", 1, 0.0)]
    assert (splicer.owner, splicer.epoch, splicer.next) == ("b", 1, 5)
    assert splicer.advance(1, 5, 1, now=3.0)


def test_the_gap_is_the_time_from_the_last_old_token_to_the_first_new_one(
    splicer: StreamSplicer,
) -> None:
    splicer.advance(0, 0, 3, now=1.0)
    fed = feed(splicer, "b", 1, 3, now=1.25)
    assert fed.actions == [OwnerSwitched("a", "b", 1, 0.25)]


def test_a_request_moved_before_its_first_token_has_no_gap() -> None:
    assert feed(StreamSplicer("a"), "b", 1, 0).actions == [OwnerSwitched("a", "b", 1, None)]


def test_a_stale_owner_is_told_once_and_never_heard(splicer: StreamSplicer) -> None:
    feed(splicer, "b", 1, 0)
    for position in (1, 2):  # until it could be told
        assert feed(splicer, "a", 0, position) == SplicedItems([], [StaleCopy("a", 0)])
    splicer.mark_discarded(StaleCopy("a", 0))
    assert feed(splicer, "a", 0, 3) == SplicedItems([], [])
    assert splicer.next == 1


def test_a_stale_owner_that_is_at_its_end_needs_no_telling(splicer: StreamSplicer) -> None:
    feed(splicer, "b", 1, 0)
    assert feed(splicer, "a", 0, 1, last=True) == SplicedItems([], [])


def test_a_fenced_epoch_is_never_heard_though_it_is_higher(splicer: StreamSplicer) -> None:
    assert splicer.fence(1)
    assert feed(splicer, "b", 1, 0) == SplicedItems([], [StaleCopy("b", 1)])
    assert splicer.advance(0, 0, 1, now=0.0)
    assert tokens(feed(splicer, "b", 1 + LEAP, 1).deliver) == [1]


def test_where_a_fenced_epoch_may_have_gone_on_to_is_fenced_too(splicer: StreamSplicer) -> None:
    assert splicer.fence(1)
    assert feed(splicer, "c", 2, 0) == SplicedItems([], [StaleCopy("c", 2)])


@pytest.mark.parametrize("how", ["switched", "held", "granted"])
def test_an_epoch_that_runs_the_request_cannot_be_fenced(splicer: StreamSplicer, how: str) -> None:
    if how == "granted":
        splicer.grant(1)
    else:
        feed(splicer, "b", 1, 0 if how == "switched" else 5)
    assert splicer.reached(1)
    assert not splicer.fence(1)
    assert not splicer.fenced(1)


def test_a_duplicate_is_dropped(splicer: StreamSplicer) -> None:
    splicer.advance(0, 0, 3, now=0.0)
    assert feed(splicer, "a", 0, 1, 2) == SplicedItems([], [])
    assert feed(splicer, "b", 1, 2, 1) == SplicedItems([], [])
    assert splicer.owner == "a"


@pytest.mark.parametrize(
    ("start", "count", "words"),
    [(4, 1, "tokens 3 to 3 of a were lost"), (2, 2, "outputs of a overlap at token 3")],
)
def test_what_cannot_be_spliced_breaks_the_stream(
    splicer: StreamSplicer, start: int, count: int, words: str
) -> None:
    splicer.advance(0, 0, 3, now=0.0)
    assert feed(splicer, "a", 0, start, count) == SplicedItems([], [StreamGap(words)])
    assert splicer.closed
    assert feed(splicer, "a", 0, 3) == SplicedItems([], [StaleCopy("a", 0)])


def test_held_outputs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splice, "HOLD_LIMIT", 2)
    splicer = StreamSplicer("a")
    assert feed(splicer, "b", 1, 1).actions == []
    assert feed(splicer, "b", 1, 2).actions == []
    assert feed(splicer, "b", 1, 3).actions == [StreamGap("2 outputs wait for token 0 of a")]


def test_it_knows_since_when_it_waits(splicer: StreamSplicer) -> None:
    assert not splicer.waits_since(100.0)
    feed(splicer, "b", 1, 1, now=5.0)
    assert not splicer.waits_since(5.0)
    assert splicer.waits_since(5.5)


def test_a_finish_closes_and_whoever_still_runs_it_is_told(splicer: StreamSplicer) -> None:
    feed(splicer, "b", 1, 7)
    fed = feed(splicer, "a", 0, 0, last=True)
    assert (tokens(fed.deliver), fed.actions) == ([0], [StaleCopy("b", 1)])
    assert splicer.closed
    assert not splicer.advance(0, 1, 1, now=0.0)


def test_a_finish_without_tokens_comes_after_all_tokens(splicer: StreamSplicer) -> None:
    feed(splicer, "b", 1, 1, 0, last=True)
    fed = feed(splicer, "a", 0, 0)
    assert [owner for owner, _ in fed.deliver] == ["a", "b"]
    assert splicer.closed


@dataclass(frozen=True)
class Sent:
    """One output of an owner."""

    owner: str
    epoch: int
    start: int
    count: int
    last: bool


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[int, list[Sent]]:
    """A request that runs on two to four owners (the first may run it again) and all
    outputs in an order that respects each instance's own. Some steps give no token."""
    owners = draw(st.sampled_from(["ab", "aba", "abc", "abac", "abab"]))
    queues: dict[str, list[Sent]] = {owner: [] for owner in owners}
    position = 0
    for epoch, owner in enumerate(owners):
        steps = draw(st.lists(st.integers(0, 3), max_size=4))
        for at, count in enumerate(steps):
            ends = epoch == len(owners) - 1 and at == len(steps) - 1
            queues[owner].append(Sent(owner, epoch, position, count, ends))
            position += count
    order: list[Sent] = []
    while left := sorted(owner for owner, queue in queues.items() if queue):
        order.append(queues[draw(st.sampled_from(left))].pop(0))
    return position, order


@given(arrivals())
def test_any_interleaving_gives_each_token_once_and_in_order(
    sent: tuple[int, list[Sent]],
) -> None:
    total, order = sent
    splicer = StreamSplicer("a")
    delivered: list[tuple[str, OutputItem]] = []
    actions: list[Action] = []
    for one in order:
        piece = item(one.start, one.count, one.last)
        if splicer.advance(one.epoch, one.start, one.count, 0.0):
            delivered.append((one.owner, piece))
            continue
        fed = splicer.feed(one.owner, OutputSpan("r", one.epoch, one.start), piece, 0.0)
        delivered += fed.deliver
        actions += fed.actions
    assert tokens(delivered) == list(range(total))
    assert not any(isinstance(action, StreamGap) for action in actions)
    assert not splicer.waits_since(1.0)


@given(arrivals(), st.data())
def test_outputs_that_come_twice_are_delivered_once(
    sent: tuple[int, list[Sent]], data: st.DataObject
) -> None:
    total, order = sent
    splicer = StreamSplicer("a")
    delivered: list[tuple[str, OutputItem]] = []
    for at, one in enumerate(order):
        again = [one for one in order[:at] if one.count and data.draw(st.booleans())]
        for piece in [one, *again]:
            fed = feed(splicer, piece.owner, piece.epoch, piece.start, piece.count, last=piece.last)
            delivered += fed.deliver
    assert tokens(delivered) == list(range(total))


def test_a_new_run_starts_where_the_stream_is_and_remembers_nothing_of_the_one_before(
    splicer: StreamSplicer,
) -> None:
    splicer.advance(0, 0, 3, now=1.0)
    splicer.fence(1)
    splicer.grant(2)
    feed(splicer, "b", 3, 9)
    feed(splicer, "a", 0, 3, 0, last=True)

    splicer.restart("c")

    assert (splicer.owner, splicer.epoch, splicer.next, splicer.closed) == ("c", 0, 3, False)
    assert not splicer.waits_since(100.0)
    assert not splicer.reached(1)
    assert not splicer.fenced(1)
    assert splicer.advance(0, 3, 1, now=2.0)
    assert tokens(feed(splicer, "d", 1, 4).deliver) == [4]
