"""What is kept for users between calls takes no more than its bound, and each user has its own."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from kvmig.asgi.call import HttpCall
from kvmig.frontend.stored_entries import OBJECT_BYTES, StoredEntries, rough_size
from tests.support.http_calls import in_call


def test_the_oldest_of_the_user_with_most_give_way() -> None:
    kept = StoredEntries[str](len, most=10)
    with in_call(HttpCall(tenant="anna")):
        kept["first"] = "aaaa"
    with in_call(HttpCall(tenant="bea")):
        kept["first"], kept["second"] = "bbb", "bbb"
        kept["third"] = "bb"
        assert sorted(kept) == ["second", "third"]
    with in_call(HttpCall(tenant="anna")):
        assert kept["first"] == "aaaa"


def test_one_that_is_too_large_alone_is_not_kept_and_costs_nobody_else() -> None:
    kept = StoredEntries[str](len, most=10)
    with in_call(HttpCall(tenant="anna")):
        kept["small"] = "a"
    with in_call(HttpCall(tenant="bea")):
        kept["large"] = "b" * 11
        assert list(kept) == []
    with in_call(HttpCall(tenant="anna")):
        assert list(kept) == ["small"]


def test_entries_that_have_grown_are_measured_again() -> None:
    kept = StoredEntries[list[int]](len, grows=True, most=10)
    grown = list[int]()
    kept["grows"] = grown
    grown.extend(range(10))
    kept["new"] = [1]
    assert list(kept) == ["new"]


def test_an_entry_that_is_written_again_is_the_newest() -> None:
    kept = StoredEntries[str](len, most=4)
    for key in ("a", "b", "a"):
        kept[key] = "xx"
    kept["c"] = "xx"
    assert list(kept) == ["a", "c"]


@given(st.lists(st.tuples(
    st.sampled_from("ab"), st.sampled_from("123"), st.booleans(), st.integers(0, 9)
)))  # fmt: skip
def test_all_entries_are_within_the_bound_whatever_is_written_and_deleted(
    steps: list[tuple[str, str, bool, int]],
) -> None:
    kept = StoredEntries[str](len, most=20)
    for user, key, written, size in steps:
        with in_call(HttpCall(tenant=user)):
            if written:
                kept[key] = "x" * size
                assert kept[key] == "x" * size
            else:
                kept.pop(key, None)
        total = 0
        for one in "ab":
            with in_call(HttpCall(tenant=one)):
                total += sum(map(len, kept.values()))
        assert total <= 20


def test_a_rough_size_counts_what_is_held_and_a_part_of_a_long_list() -> None:
    text = "x" * 1_000
    one = SimpleNamespace(text=text, parts=[{"text": text}])
    assert 2_000 < rough_size(one) < 2_000 + 10 * OBJECT_BYTES
    many = deque([{"text": text}] * 10_000)
    assert 0.9 < rough_size(many) / (10_000 * rough_size({"text": text})) < 1.1
