"""What a call may give out: never more than was granted, in its order, nothing lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmig.accounts.allowances import LOW, Allowance


def allowance() -> Allowance[int]:
    return Allowance("k1", 1, 0.0)


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
