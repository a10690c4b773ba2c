"""Where prompts' beginnings are: kvmig.controlplane.prefix_index, kvmig.engines.held_marks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvmig.controlplane import prefix_index
from kvmig.controlplane.prefix_index import SOON_S, PrefixIndex
from kvmig.core.prefix_marks import MARK_TOKENS
from kvmig.engines.held_marks import MARK_METHOD, HeldMarks, PrefixNews, pack_marks, unpack_marks

NAMES = st.sampled_from(("i0", "i1", "i2"))
MARKS = st.integers(1, 8)


def whole(number: int, *marks: int) -> PrefixNews:
    return PrefixNews(number, True, pack_marks(marks), method=MARK_METHOD)


def more(number: int, added: Sequence[int], removed: Sequence[int] = ()) -> PrefixNews:
    return PrefixNews(number, False, pack_marks(added), pack_marks(removed), MARK_METHOD)


def tokens(count: int) -> int:
    return count * MARK_TOKENS


def test_each_instance_counts_for_as_much_of_the_beginning_as_it_holds() -> None:
    index = PrefixIndex()
    index.learn("i0", whole(1, 1, 2, 3))
    index.learn("i1", whole(1, 1))
    index.learn("i2", whole(1, 2, 3))
    assert index.find_tokens([1, 2, 3, 4], 0.0) == {"i0": tokens(3), "i1": tokens(1)}
    assert index.find_tokens([9], 0.0) == index.find_tokens([], 0.0) == {}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6))
def test_the_ends_of_all_are_found(held: list[tuple[int, int]]) -> None:
    index = PrefixIndex()
    marks = list(range(100, 109))
    for number, (reported, sent) in enumerate(held):
        index.learn(f"i{number}", whole(1, *marks[:reported]))
        index.expect(f"i{number}", marks[:sent], 0.0)
    ends = {f"i{number}": tokens(max(one)) for number, one in enumerate(held) if max(one)}
    assert index.find_tokens(marks, 0.0) == ends
    assert index.find_tokens([*marks, 7], 0.0) == ends


CHAIN = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(
    lambda turns: [int("1" + "".join(map(str, turns[: at + 1])), 2) for at in range(len(turns))]
)
"""Marks of a prompt: each stands for all turns so far."""


@given(st.lists(st.tuples(NAMES, CHAIN), max_size=12), CHAIN)
def test_prompts_that_share_beginnings_are_found_wherever_they_were_sent(
    sends: list[tuple[str, list[int]]], asked: list[int]
) -> None:
    index = PrefixIndex()
    sent: dict[str, set[int]] = {}
    for name, chain in sends:
        index.learn(name, whole(1))
        index.expect(name, chain, 0.0)
        sent.setdefault(name, set()).update(chain)
    for chain in (asked, *(chain for _, chain in sends)):
        counts = {name: sum(mark in marks for mark in chain) for name, marks in sent.items()}
        found = index.find_tokens(chain, 0.0)
        assert found == {name: tokens(count) for name, count in counts.items() if count}
        blocks = index.find_blocks(chain, 0.0, 48)
        assert blocks == {name: held / 48 for name, held in found.items()}


class CountedMarks(list[int]):
    """Counts the looks at them."""

    looks = 0

    def __getitem__(self, place: SupportsIndex) -> int:  # type: ignore[override]
        self.looks += 1
        return super().__getitem__(place)


def test_a_long_prompt_takes_few_looks() -> None:
    index = PrefixIndex()
    marks = CountedMarks(range(1000))
    for number in range(64):
        index.learn(f"i{number}", whole(1, *range(8)))
    index.learn("i3", whole(2, *range(900)))
    found = index.find_tokens(marks, 0.0)
    assert (found["i3"], found["i4"], len(found)) == (tokens(900), tokens(8), 64)
    assert marks.looks <= 2 * 11


def test_marks_that_another_version_makes_otherwise_count_for_nothing() -> None:
    index = PrefixIndex()
    index.learn("i0", PrefixNews(1, True, pack_marks([1])))
    assert (PrefixNews(1, True, b"").method, MARK_METHOD) == (1, 2)
    assert not index.has_report_of("i0"), "so that a session's hint counts"
    assert index.find_tokens([1], 0.0) == {}
    assert {one.method for one in (HeldMarks().whole(), news_of(5))} == {MARK_METHOD}


def news_of(mark: int) -> PrefixNews:
    held = HeldMarks()
    held.hold(1, mark)
    news = held.news()
    assert news is not None
    return news


def test_where_news_are_missing_nothing_is_known_until_all_is_said() -> None:
    index = PrefixIndex()
    index.learn("i0", more(1, [1]))
    assert index.find_tokens([1], 0.0) == {}
    index.learn("i0", whole(2, 1))
    index.learn("i0", more(4, [2]))
    assert index.find_tokens([1, 2], 0.0) == {}
    index.learn("i0", whole(5, 1, 2))
    index.learn("i0", whole(3))
    assert index.find_tokens([1, 2], 0.0) == {"i0": tokens(2)}, "one that comes late is ignored"


def test_what_was_sent_counts_for_a_while_unless_its_instance_is_gone() -> None:
    index = PrefixIndex()
    for name in ("i0", "i1"):
        index.learn(name, whole(1))
    index.expect("i0", [1, 2], 10.0)
    index.expect("i1", [1], 10.0)
    assert index.find_tokens([1, 2], 10.0 + SOON_S - 1) == {"i0": tokens(2), "i1": tokens(1)}
    index.forget("i1")
    index.learn("new", whole(1, 7))
    assert index.find_tokens([1, 2], 10.0) == {"i0": tokens(2)}, "nobody has inherited it"
    assert index.find_tokens([1, 2], 10.0 + SOON_S) == {"i0": tokens(2)}
    assert index.find_tokens([1, 2], 10.0 + 2 * SOON_S) == {}


def test_what_was_sent_counts_also_where_nothing_else_is_known() -> None:
    index = PrefixIndex()
    index.learn("i0", more(7, [3]))
    index.expect("i0", [1, 2], 10.0)
    assert not index.has_report_of("i0")
    assert index.find_tokens([1, 2], 10.0) == {"i0": tokens(2)}
    index.learn("i0", more(9, [3]))
    assert index.find_tokens([1, 2], 10.0) == {"i0": tokens(2)}


def test_nothing_is_expected_of_an_instance_that_reports_no_marks() -> None:
    """Its engine has no prefix cache, or one that marks don't describe."""
    index = PrefixIndex()
    index.learn("i1", whole(1, 7))
    index.forget("i1")
    for name in ("i0", "i1"):
        index.expect(name, [1, 2], 10.0)
    assert index.find_tokens([1, 2], 10.0) == {}


def test_of_an_instance_that_names_marks_without_end_so_many_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_index, "MOST_MARKS", 3)
    index = PrefixIndex()
    index.learn("i0", whole(1, 1, 2))
    index.learn("i0", more(2, [3, 4, 5]))
    assert sum(bool(index.find_tokens([mark], 0.0)) for mark in range(1, 6)) == 3
    index.learn("i0", more(3, [6], [1]))
    assert index.find_tokens([6], 0.0) == {"i0": tokens(1)}


def test_one_that_was_told_all_takes_what_was_on_its_way_before_in_twice() -> None:
    held = HeldMarks()
    held.hold(1, 10)
    held.hold(2, 20)
    held.drop(1)
    index = PrefixIndex()
    index.learn("i0", held.whole())
    assert index.find_tokens([20], 0.0) == {"i0": tokens(1)}
    news = held.news()
    assert news is not None
    index.learn("i0", news)
    assert index.find_tokens([20], 0.0) == {"i0": tokens(1)}
    assert index.find_tokens([10], 0.0) == {}


class Reporting(RuleBasedStateMachine):
    """Engines hold and drop marks in blocks, and report, sometimes in vain."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.engines = {name: HeldMarks() for name in ("i0", "i1", "i2")}
        self.blocks: dict[tuple[str, int], set[int]] = {}
        self.said: dict[str, set[int] | None] = dict.fromkeys(self.engines)

    def marks(self, name: str) -> set[int]:
        some = (marks for (where, _), marks in self.blocks.items() if where == name)
        return set().union(*some)

    @rule(name=NAMES, block=st.integers(0, 3), mark=MARKS)
    def hold(self, name: str, block: int, mark: int) -> None:
        self.engines[name].hold(block, mark)
        self.blocks.setdefault((name, block), set()).add(mark)

    @rule(name=NAMES, block=st.integers(0, 3))
    def drop(self, name: str, block: int) -> None:
        self.engines[name].drop(block)
        self.blocks.pop((name, block), None)

    @rule(name=NAMES)
    def clear(self, name: str) -> None:
        self.engines[name].clear()
        self.blocks = {key: marks for key, marks in self.blocks.items() if key[0] != name}

    @rule(name=NAMES, all_of_it=st.booleans(), lost=st.booleans())
    def report(self, name: str, all_of_it: bool, lost: bool) -> None:
        engine = self.engines[name]
        if (news := engine.news()) is not None and not all_of_it:
            if lost:
                self.said[name] = None
                return
            self.index.learn(name, news)
        if all_of_it:  # the front end has just connected
            self.index.forget(name)
            self.index.learn(name, engine.whole())
        if all_of_it or (news is not None and self.said[name] is not None):
            self.said[name] = self.marks(name)

    @rule(name=NAMES)
    def begin_again(self, name: str) -> None:
        self.index.forget(name)
        self.said[name] = None

    @invariant()
    def what_was_said_is_found(self) -> None:
        for mark in range(1, 9):
            found = self.index.find_tokens([mark], 0.0)
            for name, said in self.said.items():
                if said is not None:
                    assert (name in found) == (mark in said)

    @invariant()
    def an_engine_knows_its_marks(self) -> None:
        for name, held in self.engines.items():
            assert len(held) == len(self.marks(name))


TestReporting = Reporting.TestCase


def test_bytes_that_are_no_marks_are_left_out() -> None:
    assert unpack_marks(pack_marks([1, 2**64 - 1]) + b"abc") == (1, 2**64 - 1)
