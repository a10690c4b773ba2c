"""A request of an engine with an EAGLE head takes along what the head keeps of it."""

from __future__ import annotations

import json

import pytest

from tests.vllm_pair import Pair, assert_same
from tests.vllm_side import Configuration, Side
from tests.zoo import eagle, make

pytestmark = pytest.mark.engine

PROMPT = [40 + number * number % 97 for number in range(100)]


@pytest.fixture(scope="module")
def configurations(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Configuration, Configuration]:
    model = make("llama7b", tmp_path_factory.mktemp("zoo"))
    drafts = {"method": "eagle", "model": str(eagle(model)), "num_speculative_tokens": 3}
    wanted = Configuration(flags=(f"--speculative-config={json.dumps(drafts)}",), model=model)
    return wanted, wanted


async def proposals(pair: Pair, side: Side, name: str, until: int) -> list[tuple[int, list[int]]]:
    """(tokens so far, drafts for the next step) after each step."""
    seen: list[tuple[int, list[int]]] = []
    while len(pair.outputs[name].tokens) < until:
        side.step()
        await pair.settle()
        request = side.engine._scheduler.requests[name]
        seen.append((request.num_output_tokens, list(request.spec_token_ids)))
    return seen


async def test_the_head_proposes_after_a_move_what_it_would_have_proposed(pair: Pair) -> None:
    """Tokens alone can't tell: drafts that are wrong are thrown away."""
    await pair.run(pair.a, "unmoved", PROMPT, until=10)
    expected = await proposals(pair, pair.a, "unmoved", 40)
    unmoved = await pair.finish("unmoved")
    pair.a.engine._scheduler.reset_prefix_cache()
    await pair.run(pair.a, "moved", PROMPT, until=10)

    await pair.move(pair.a, pair.b, "moved", steps=0)

    assert await proposals(pair, pair.b, "moved", 40) == expected
    assert len({tuple(drafts) for _, drafts in expected}) > 10
    assert_same(await pair.finish("moved"), unmoved)
