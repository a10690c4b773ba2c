"""What a call's media take is counted by their headers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.frontend.image_costs import ImageLook, image_cost, scale_of
from kvmig.frontend.media_budget import MediaBudget, MediaCost, MediaTooLarge

MEGA = 1_000_000


def test_what_is_too_much_is_named_with_what_is_allowed() -> None:
    budget = MediaBudget(100 * MEGA, kept=8 * MEGA)
    budget.count_media("an image", MediaCost(50 * MEGA))
    with pytest.raises(MediaTooLarge) as refused:
        budget.count_media("PNG of 2000 x 2000 pixels", MediaCost(28 * MEGA, 20 * MEGA))
    assert "take 106.0 MB" in str(refused.value)
    assert "PNG of 2000 x 2000 pixels" in str(refused.value)
    assert "allowed are 100.0 MB a call (--max-media)" in str(refused.value)
    assert refused.value.size == 106 * MEGA


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60))), st.integers(0, 100))
def test_a_call_never_has_more_than_is_allowed(costs: list[tuple[int, int]], most: int) -> None:
    budget = MediaBudget(most)
    for kept, extra in costs:
        before = budget.kept
        try:
            budget.count_media("one", MediaCost(kept, extra))
        except MediaTooLarge:
            assert budget.kept == before
            assert before + kept + extra > most
        else:
            assert before + kept + extra <= most
    assert budget.left == most - budget.kept


def test_what_is_extra_counts_only_while_it_is_decoded() -> None:
    budget = MediaBudget(100)
    for _ in range(4):
        budget.count_media("one", MediaCost(20, 30 if budget.kept < 60 else 20))
    assert budget.left == 20


@pytest.mark.parametrize(
    ("look", "pixel"),
    [
        (ImageLook("JPEG", "RGB", 1000, 1000), 11),
        (ImageLook("JPEG", "RGB", 1000, 1000, progressive=True), 12),
        (ImageLook("PNG", "RGBA", 1000, 1000, transparent=True), 12),
        (ImageLook("PNG", "LA", 1000, 1000, transparent=True), 16),
    ],
)
def test_a_pixel_costs_what_its_kind_takes(look: ImageLook, pixel: int) -> None:
    assert sum(image_cost(look)) == pixel * MEGA


@given(st.integers(1, 4096), st.integers(1, 4096), st.booleans())
def test_a_jpeg_that_takes_much_is_decoded_smaller_and_no_smaller_than_needed(
    width: int, height: int, progressive: bool
) -> None:
    look = ImageLook("JPEG", "RGB", width, height, progressive=progressive)
    scale = scale_of(look, 100 * MEGA)
    if scale > 1:
        assert sum(image_cost(look, scale)) <= 75 * MEGA < sum(image_cost(look, scale // 2))
    else:
        assert sum(image_cost(look)) <= 75 * MEGA or progressive


@pytest.mark.parametrize(
    ("kind", "size", "scale"),
    [("JPEG", (4032, 3024), 2), ("JPEG", (2592, 1944), 1), ("PNG", (4032, 3024), 1)],
)
def test_only_a_jpeg_may_be_decoded_smaller(kind: str, size: tuple[int, int], scale: int) -> None:
    assert scale_of(ImageLook(kind, "RGB", *size), 100 * MEGA) == scale


def test_what_stands_beside_the_pixels_counts() -> None:
    plain, more = (ImageLook("PNG", "RGB", 10, 10, aside=size) for size in (0, 5000))
    assert image_cost(more).kept - image_cost(plain).kept == 5000
