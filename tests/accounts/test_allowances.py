"""What a call may give out: never more than was granted, in its order, nothing lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmig.accounts.allowances import FIRST, LOW, NEXT, TokenAllowance


def allowance() -> TokenAllowance[int]:
    one: TokenAllowance[int] = TokenAllowance("k1", 1, 0.0)
    one.expect(None)
    return one


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=80))
def test_what_goes_out_is_paid_for_and_in_order_and_the_rest_is_held(
    events: list[tuple[bool, int]],
) -> None:
    one, out, coming, granted, sizes = allowance(), [], 0, 0, []
    for comes, tokens in events:
        if comes:
            sizes.append(tokens)
            if one.admits(tokens):
                out.append(coming)
            else:
                one.hold(tokens, coming)
            coming += 1
        else:
            granted += tokens
            out += one.grow(tokens)
        assert sum(sizes[number] for number in out) <= granted
    assert out + one.give_up() == list(range(coming))


def test_more_is_asked_for_ahead_but_not_twice_nor_after_a_refusal() -> None:
    one = allowance()
    one.grow(4 * LOW)
    assert not one.low
    one.admits(3 * LOW)
    assert one.low
    one.asking = True
    assert not one.low
    one.asking, one.refused = False, "used up"
    assert not one.low


def test_no_more_is_asked_for_than_answers_can_use() -> None:
    one: TokenAllowance[int] = TokenAllowance("k1", 1, 0.0)
    one.expect(20)
    one.await_prompt(17)
    assert one.wanted() == 17 + 20
    one.grow(37)
    assert one.pay_prompt(16, 1)
    one.end_prompt(17)
    assert one.admits(12)
    assert not one.low


def test_prompts_that_wait_are_asked_for_together_with_a_first_part_of_their_answers() -> None:
    one: TokenAllowance[int] = TokenAllowance("k1", 1, 0.0)
    for _ in range(100):
        one.expect(1)
        one.await_prompt(6)
    assert one.wanted() == 100 * 6 + 100
    one.expect(None)
    assert one.wanted() == 100 * 6 + FIRST


def test_a_prompt_without_an_answer_is_asked_for_alone() -> None:
    one: TokenAllowance[int] = TokenAllowance("k1", 1, 0.0)
    one.expect(0)
    one.await_prompt(5)
    assert one.wanted() == 5
    one.grow(5)
    assert one.pay_prompt(5, 0)


def test_an_answer_of_unknown_length_asks_for_the_next_part() -> None:
    one = allowance()
    one.grow(LOW)
    assert one.wanted() == NEXT


def test_of_what_is_held_the_first_tokens_are_given_as_far_as_they_are_granted() -> None:
    one = allowance()
    one.grow(3)
    assert not one.admits(5)
    one.hold(5, 1)
    assert (one.give_part(), one.output, one.spare) == (3, 3, 0)
    assert one.give_up() == [1]
    assert one.give_part() == 0
