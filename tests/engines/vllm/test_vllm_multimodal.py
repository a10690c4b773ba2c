"""Requests with images move between two real engines of a tiny BLIP-2."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.tiny_blip2 import IMAGE_TOKEN, IMAGE_TOKENS, PIXELS, make
from tests.support.vllm_pair import LONG, Pair, assert_same, preempt
from tests.support.vllm_side import Configuration

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:The given buffer is not writable"),  # vLLM's decoder
]

PROMPT = LONG[:300]
CHUNK = 128
"""Tokens of a prompt that one step computes."""


@pytest.fixture(scope="module")
def configurations(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Configuration, Configuration]:
    wanted = Configuration(model=make(tmp_path_factory.mktemp("blip2")))
    return wanted, wanted


def with_image(offset: int, seed: int = 1) -> dict[str, Any]:
    """The prompt with a random image after so many tokens."""
    import torch
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        PlaceholderRange,
    )

    pixels = torch.rand(3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(seed))
    image = MultiModalFeatureSpec(
        data=MultiModalKwargsItem(
            {"pixel_values": MultiModalFieldElem(pixels, MultiModalBatchedField())}
        ),
        modality="image",
        identifier=f"image {seed}",
        mm_position=PlaceholderRange(offset=offset, length=IMAGE_TOKENS),
        mm_hash=f"image {seed}",
    )
    prompt = [*PROMPT[:offset], *[IMAGE_TOKEN] * IMAGE_TOKENS, *PROMPT[offset:]]
    return {"prompt": prompt, "images": [image]}


async def test_a_request_with_an_image_moved_there_and_back_equals_one_left_alone(
    pair: Pair,
) -> None:
    other = await pair.unmoved(**with_image(20, seed=2))
    unmoved = await pair.unmoved(**with_image(20))
    moved = await pair.there_and_back(**with_image(20))
    assert_same(moved, unmoved)
    assert moved.logprobs != other.logprobs


@pytest.mark.parametrize("offset", [20, CHUNK - 2, CHUNK + 20])
async def test_in_prefill_it_moves_before_in_and_after_its_image(pair: Pair, offset: int) -> None:
    unmoved = await pair.unmoved(**with_image(offset))
    assert_same(await pair.moved_in_prefill(**with_image(offset), steps=0), unmoved)


async def test_after_a_preemption_at_the_destination_it_sees_the_image_again(pair: Pair) -> None:
    unmoved = await pair.unmoved(**with_image(20))
    await pair.run(pair.a, "moved", **with_image(20), until=10)
    await pair.move(pair.a, pair.b, "moved")
    await pair.step(pair.b, until=("moved", 20))

    preempt(pair.b, "moved")
    pair.b.scheduler.reset_prefix_cache()

    assert (await pair.finish("moved")).tokens == unmoved.tokens
