"""Marks of prompts: kvmig.core.prefix_marks."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.core import prefix_marks
from kvmig.core.prefix_marks import MARK_TOKENS, MarkChain, MediaSpan
from kvmig.engines.held_marks import MARK_METHOD

TOKENS = st.lists(st.integers(0, 2**20), max_size=4 * MARK_TOKENS)


def marks(tokens: list[int], salt: str = "", adapter: str = "", *media: MediaSpan) -> list[int]:
    return MarkChain(salt, adapter, media).extend(tokens, len(tokens))


@given(TOKENS, TOKENS)
def test_prompts_share_the_marks_of_the_beginning_that_they_share(
    one: list[int], other: list[int]
) -> None:
    common = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    same = [a == b for a, b in zip(marks(one), marks(other), strict=False)]
    assert same == [(i + 1) * MARK_TOKENS <= common for i in range(len(same))]


@given(TOKENS, st.lists(st.integers(0, 600)))
def test_a_request_that_grows_has_the_marks_of_one_that_came_whole(
    tokens: list[int], ends: list[int]
) -> None:
    chain, found = MarkChain("", ""), list[int]()
    for end in [*sorted(min(end, len(tokens)) for end in ends), len(tokens)]:
        found += chain.extend(tokens, end)
    assert found == marks(tokens)


@given(TOKENS, st.integers(1, 3))
def test_a_prompt_of_more_marks_than_there_are_powers_kept_has_the_same(
    tokens: list[int], kept: int
) -> None:
    expected = marks(tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_marks, "POWERS", prefix_marks.POWERS[:kept])
        assert marks(tokens) == expected


def test_tokens_of_another_kind_than_a_list_have_the_same_marks() -> None:
    tokens = list(range(3 * MARK_TOKENS + 5))
    for kind in (tuple(tokens), array("I", tokens)):
        assert MarkChain("", "").extend(kind, len(kind)) == marks(tokens)


def test_nothing_is_found_under_another_salt_or_adapter() -> None:
    tokens = [1] * MARK_TOKENS
    found = {marks(tokens, *names)[0] for names in (("", ""), ("a", ""), ("", "a"), ("b", "a"))}
    assert len(found) == 4


def test_an_image_changes_the_marks_from_its_place_on() -> None:
    tokens = [1] * (3 * MARK_TOKENS)
    first = MediaSpan(MARK_TOKENS + 5, MARK_TOKENS + 9, "cat")
    other = first._replace(identifier="dog")
    with_first, with_other = marks(tokens, "", "", first), marks(tokens, "", "", other)
    assert with_first[0] == with_other[0] == marks(tokens)[0]
    assert not {*with_first[1:]} & {*with_other[1:], *marks(tokens)[1:]}


def test_the_same_image_at_another_place_makes_other_marks() -> None:
    tokens = [1] * (2 * MARK_TOKENS)
    spans = [MediaSpan(first, first + 9, "cat") for first in (5, 20, MARK_TOKENS - 4)]
    found = [marks(tokens, "", "", one) for one in spans]
    assert len({*map(tuple, found)}) == 3
    assert len({one[1] for one in found}) == 3, "also after it"


def test_the_marks_of_this_version_are_these() -> None:
    """Other marks need another `MARK_METHOD`: engines and front ends of two versions meet."""
    found = marks(list(range(300)), "salt", "adapter", MediaSpan(130, 140, "cat"))
    assert (MARK_METHOD, found) == (2, [18433354179185827344, 2557552303509541228])


def test_parts_in_another_order_make_other_marks() -> None:
    first, second = [5] * MARK_TOKENS, [7] * MARK_TOKENS
    assert marks(first + second)[1] != marks(second + first)[1]
    assert marks([1, 2, *first])[0] != marks([2, 1, *first])[0]
