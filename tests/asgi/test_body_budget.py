"""All bodies that are in have one room, of which an account takes a part."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvmig.asgi.body_budget import BodyBudget, BodyShare


def test_one_account_alone_takes_half_and_others_are_still_served() -> None:
    budget = BodyBudget(100)
    assert [budget.enter("a").count_bytes(10) for _ in range(6)] == [""] * 5 + ["account"]
    assert budget.enter("b").count_bytes(20) == ""
    assert budget.enter("a").count_bytes(1) == "account"
    assert budget.used == 70


def test_all_have_the_whole_room_where_nobody_is_known() -> None:
    budget = BodyBudget(100)
    assert [budget.enter().count_bytes(50) for _ in range(3)] == ["", "", "all"]


def test_what_is_given_back_twice_counts_once() -> None:
    budget = BodyBudget(100)
    share = budget.enter("a")
    share.count_bytes(30)
    share.give_back()
    share.give_back()
    assert (budget.used, budget.used_by("a")) == (0, 0)


@given(
    st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(0, 40), st.booleans())),
    st.integers(0, 100),
)
def test_no_more_is_taken_than_there_is_and_an_account_leaves_as_much_as_it_has(
    moves: list[tuple[str, int, bool]], most: int
) -> None:
    budget, inside = BodyBudget(most), list[tuple[str, int, BodyShare]]()
    for account, size, leaves in moves:
        if leaves and inside:
            inside.pop()[2].give_back()
            continue
        share = budget.enter(account)
        if not share.count_bytes(size):
            inside.append((account, size, share))
            if account:
                assert budget.used_by(account) <= most - budget.used
    sums = Counter[str]()
    for account, size, _ in inside:
        sums[account] += size
    assert budget.used == sums.total() <= most
    assert all(budget.used_by(one) == sums[one] for one in ("", "a", "b"))
    for _, _, share in inside:
        share.give_back()
    assert budget.used == 0
