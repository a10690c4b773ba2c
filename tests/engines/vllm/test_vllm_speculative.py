"""Requests move between engines that decode speculatively, and take the next drafts along.

Greedy ones: with drafts vLLM 0.32 gives a seeded request other tokens each time, moved or not.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvmig.models import BUNDLED
from tests.support.vllm_pair import SEEDED, TOKENS, Engines, Pair, assert_same
from tests.support.vllm_side import Configuration

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings(r"ignore:[\s\S]*Encountered the use of a type"),  # numba about vLLM
]

NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4}
DRAFT_MODEL = {"method": "draft_model", "model": str(BUNDLED)}
PROMPT = list(b"Count on from 0017: " + b" ".join(b"%04d" % number for number in range(18)))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(NGRAM, id="ngram", marks=pytest.mark.long),  # found in the tokens: no state
        pytest.param(DRAFT_MODEL, id="draft model"),
    ],
)
def configurations(request: pytest.FixtureRequest) -> tuple[Configuration, Configuration]:
    config = json.dumps({**request.param, "num_speculative_tokens": 3})
    wanted = Configuration(flags=(f"--speculative-config={config}",))
    return wanted, wanted


@pytest.mark.parametrize(
    "params", [{}, {"repetition_penalty": 1.1}, {"min_tokens": 40, "stop_token_ids": [51, 52]}]
)
async def test_a_request_moved_there_and_back_equals_one_left_alone(
    pair: Pair, params: dict[str, Any]
) -> None:
    unmoved = await pair.unmoved(PROMPT, **params)
    assert_same(await pair.there_and_back(PROMPT, **params), unmoved)


async def test_drafts_are_taken_with_their_own_requests_parameters(pair: Pair) -> None:
    """Of one token there is one choice, whatever the temperature."""
    greedy = await pair.unmoved(PROMPT)
    pair.submit(pair.a, "sampled", PROMPT, temperature=0.9, top_k=1)
    pair.submit(pair.a, "beside", PROMPT, temperature=1.5)
    assert (await pair.finish("sampled")).tokens == greedy.tokens
    await pair.finish("beside")


async def test_drafts_are_accepted_in_the_first_step_after_a_move(pair: Pair) -> None:
    await pair.run(pair.a, "moved", PROMPT, until=10)
    await pair.move(pair.a, pair.b, "moved", steps=0)
    before = len(pair.outputs["moved"].tokens)

    pair.b.step()
    await pair.settle()

    assert len(pair.outputs["moved"].tokens) > before + 1
    await pair.finish("moved")


async def test_a_suspended_request_that_is_resumed_goes_on_as_if_nothing_was(pair: Pair) -> None:
    unmoved = await pair.unmoved(PROMPT)
    await pair.exported("kept", PROMPT, until=10)
    await pair.suspend(pair.a, "kept", 0)
    for _ in range(3):
        pair.a.step()

    await pair.done(pair.a.engine.resume("kept"))

    assert (await pair.finish("kept")).tokens == unmoved.tokens


async def test_a_sampled_request_moves(pair: Pair) -> None:
    await pair.run(pair.a, "moved", PROMPT, **SEEDED, until=10)

    await pair.move(pair.a, pair.b, "moved")

    assert len((await pair.finish("moved")).tokens) == TOKENS


async def test_an_engine_without_drafts_takes_the_request_and_leaves_them(
    pair: Pair, engines: Engines
) -> None:
    without_drafts = engines.side(Configuration())
    if pair.a.core.vllm_config.speculative_config.uses_draft_model():
        # The draft model's KV is in the blocks, too: such an engine is refused by its layout.
        assert not pair.a.engine.layout.matches(without_drafts.engine.layout)
        return
    elsewhere = pair.towards(without_drafts)
    unmoved = await pair.unmoved(PROMPT)
    await pair.run(pair.a, "moved", PROMPT, until=10)

    await elsewhere.move(pair.a, without_drafts, "moved")

    assert (await elsewhere.finish("moved")).tokens == unmoved.tokens
    await elsewhere.assert_empty()


async def test_a_request_moves_in_the_middle_of_its_prefill(pair: Pair) -> None:
    prompt = PROMPT * 3
    unmoved = await pair.unmoved(prompt)
    assert (await pair.moved_in_prefill(prompt)).tokens == unmoved.tokens
