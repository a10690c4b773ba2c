"""The marks that a vLLM engine says it holds are those that its prefix cache finds, always."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from vllm import PoolingParams, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.engine import EngineCoreRequest

from kvmig.controlplane.prefix_index import PrefixIndex
from kvmig.core.prefix_marks import MARK_TOKENS, MarkChain
from kvmig.engines.vllm.held_prefixes import chain_of, marks_of_prompt
from kvmig.engines.vllm.lora import LoraAdapters, media_name
from tests.support import tiny_lora
from tests.support.vllm_pair import Engines, Pair, preempt
from tests.support.vllm_side import BY_PRIORITY, Configuration, Side

pytestmark = pytest.mark.engine

PROMPT = [40 + number * number % 90 for number in range(420)]
WHOLE = len(PROMPT) // MARK_TOKENS * MARK_TOKENS
"""Tokens that the largest of its marks stands for."""


def held(side: Side, prompt: Sequence[int], salt: str = "") -> int:
    """Tokens of the prompt that a front end would find there."""
    assert side.engine.held_marks is not None
    index = PrefixIndex()
    index.learn("i", side.engine.held_marks.whole())
    marks = MarkChain(salt, "").extend(prompt, len(prompt))
    return index.find_tokens(marks, 0.0).get("i", 0)


async def test_a_prompt_is_held_where_it_was_computed_under_its_salt(pair: Pair) -> None:
    assert held(pair.a, PROMPT) == 0
    await pair.run(pair.a, "r", PROMPT, until=2, salt="ours")
    assert held(pair.a, PROMPT, "ours") == WHOLE
    assert held(pair.a, [*PROMPT[:300], 1, *PROMPT[301:]], "ours") == 2 * MARK_TOKENS
    assert held(pair.a, PROMPT, "theirs") == held(pair.a, PROMPT) == held(pair.b, PROMPT) == 0
    await pair.finish("r")
    assert held(pair.a, PROMPT, "ours") == WHOLE


async def test_an_answer_is_held_too_for_the_turn_after_it(pair: Pair) -> None:
    await pair.run(pair.a, "r", PROMPT, until=1, max_tokens=200)
    output = await pair.finish("r")
    said = [*PROMPT, *output.tokens]
    # What the last step gave was never computed.
    assert held(pair.a, said) == (len(said) - 1) // MARK_TOKENS * MARK_TOKENS


async def test_a_moved_request_is_held_where_it_has_come(pair: Pair) -> None:
    await pair.run(pair.a, "r", PROMPT, until=3)
    await pair.move(pair.a, pair.b, "r")
    await pair.step(pair.b, until=("r", 8))
    assert held(pair.b, PROMPT) == WHOLE
    await pair.finish("r")


async def test_what_others_need_is_held_no_more(pair: Pair) -> None:
    await pair.run(pair.a, "r", PROMPT, until=1)
    await pair.finish("r")
    assert held(pair.a, PROMPT) == WHOLE
    for number in range(2):  # the cache has 39 blocks of 32
        await pair.run(pair.a, f"s{number}", [number + 7] * 900, until=1)
        await pair.finish(f"s{number}")
    assert held(pair.a, PROMPT) < WHOLE
    assert held(pair.a, [8] * 900) == 7 * MARK_TOKENS
    pair.a.scheduler.reset_prefix_cache()
    assert held(pair.a, [8] * 900) == 0
    assert len(pair.a.engine.held_marks or ()) == 0


async def test_a_request_that_was_preempted_is_held_when_it_runs_again(pair: Pair) -> None:
    await pair.run(pair.a, "r", PROMPT, until=2)
    preempt(pair.a, "r")
    pool = pair.a.scheduler.kv_cache_manager.block_pool
    pool.evict_blocks(set(range(1, pool.num_gpu_blocks)))
    assert held(pair.a, PROMPT) == 0
    await pair.step(pair.a, until=("r", 6))
    assert held(pair.a, PROMPT) == WHOLE
    await pair.finish("r")


def test_a_request_for_which_no_prefix_cache_is_read_has_no_marks() -> None:
    def asked(params: SamplingParams | PoolingParams) -> EngineCoreRequest:
        sampling, pooling = (params, None) if isinstance(params, SamplingParams) else (None, params)
        return EngineCoreRequest("r", PROMPT, None, sampling, pooling, 0.0, None, None, None)

    assert len(marks_of_prompt(asked(SamplingParams()))) == WHOLE // MARK_TOKENS
    assert len(marks_of_prompt(asked(PoolingParams()))) == WHOLE // MARK_TOKENS
    assert marks_of_prompt(asked(SamplingParams(prompt_logprobs=1))) == []
    assert marks_of_prompt(asked(PoolingParams(skip_reading_prefix_cache=True))) == []


def asked_with(lora: LoRARequest | None) -> EngineCoreRequest:
    """A call's request, as a front end has it."""
    return EngineCoreRequest("r", PROMPT, None, SamplingParams(), None, 0.0, lora, None, None)


def test_marks_of_an_adapter_are_those_of_the_name_that_clients_call_it(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("one")
    asked = asked_with(LoRARequest("one@home", 7, str(tmp_path)))
    assert asked.lora_request is not None
    here = asked_with(LoraAdapters().resolve_adapter(asked.lora_request))
    span = PlaceholderRange(offset=3, length=20)
    for request, identifier in ((asked, "p"), (here, media_name(here.lora_request, "p"))):
        request.mm_features = [MultiModalFeatureSpec(None, "image", identifier, span)]
    chain = chain_of(here, own=True)
    assert chain is not None
    assert chain.extend(PROMPT, len(PROMPT)) == marks_of_prompt(asked)
    assert chain.extend(PROMPT, len(PROMPT)) == []
    assert marks_of_prompt(asked_with(None)) != marks_of_prompt(asked)


@pytest.mark.long
async def test_a_prompt_with_an_adapter_is_held_for_calls_of_that_adapter_alone(
    engines: Engines, tmp_path: Path
) -> None:
    one, two = (
        LoRARequest(f"adapter {number}", number, str(tiny_lora.make(tmp_path, number)))
        for number in (1, 2)
    )
    flags = ("--enable-lora", "--max-loras=1", "--max-cpu-loras=4", "--max-lora-rank=8")
    async with engines.lent(Configuration(flags=flags), Configuration(flags=flags)) as pair:

        def found(side: Side, lora: LoRARequest | None) -> int:
            assert side.engine.held_marks is not None
            index = PrefixIndex()
            index.learn("i", side.engine.held_marks.whole())
            return index.find_tokens(marks_of_prompt(asked_with(lora)), 0.0).get("i", 0)

        await pair.run(pair.a, "r", PROMPT, until=3, lora=one)
        assert [found(pair.a, lora) for lora in (one, two, None)] == [WHOLE, 0, 0]
        await pair.move(pair.a, pair.b, "r")
        await pair.step(pair.b, until=("r", 8))
        assert [found(pair.b, lora) for lora in (one, two, None)] == [WHOLE, 0, 0]
        await pair.finish("r")


async def test_an_engine_without_a_prefix_cache_says_nothing(engines: Engines) -> None:
    async with engines.lent(BY_PRIORITY, BY_PRIORITY) as pair:
        assert pair.a.engine.held_marks is None
