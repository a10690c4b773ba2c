"""Kinds of requests, on two real engines: those that move unchanged, and those that stay."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from kvmig.core.errors import MigrationRefused
from tests.support.vllm_pair import LONG, PROMPT, SEEDED, Engines, Pair, assert_same
from tests.support.vllm_side import BY_PRIORITY, Output, Side

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning"),  # vLLM's call
]


def completed(pair: Pair, **params: Any) -> dict[str, Any]:
    """Sampling parameters as the front end completes them."""
    from vllm import SamplingParams
    from vllm.tokenizers import cached_tokenizer_from_config

    config = pair.a.core.vllm_config
    tokenizer = cached_tokenizer_from_config(config.model_config)
    made = SamplingParams(**params)
    made.verify(config.model_config, None, config.structured_outputs_config, tokenizer)
    made.update_from_tokenizer(tokenizer)
    return {
        **params,
        "structured_outputs": made.structured_outputs,
        "_bad_words_token_ids": made._bad_words_token_ids,
    }


async def moved_in_the_middle(pair: Pair, tokens: int = 10, **params: Any) -> tuple[Output, Output]:
    """(the same request left alone, one that was moved after so many tokens)."""
    unmoved = await pair.unmoved(PROMPT, **params)
    await pair.run(pair.a, "moved", PROMPT, **params, until=tokens)
    await pair.move(pair.a, pair.b, "moved")
    return unmoved, await pair.finish("moved")


async def test_an_engine_keeps_grammars_by_salt(pair: Pair) -> None:
    from kvmig.engines.vllm.grammar_caches import SaltedGrammars

    assert isinstance(pair.a.core.structured_output_manager, SaltedGrammars)


@pytest.mark.parametrize(
    "what",
    [
        {"regex": r"[0-9a-f]{40,50}"},
        {"choice": ["the first of two long choices to take", "the second of two long choices"]},
        {"json": json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 30})},
        {"grammar": 'root ::= ("ab" | "cd")+'},
    ],
    ids=lambda what: next(iter(what)),
)
async def test_guided_decoding_goes_on_where_it_was(pair: Pair, what: dict[str, Any]) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    wanted = StructuredOutputsParams(**what)
    params = completed(pair, structured_outputs=wanted, ignore_eos=False, **SEEDED)
    unmoved, moved = await moved_in_the_middle(pair, **params)

    assert_same(moved, unmoved)


async def test_a_request_that_begins_meanwhile_moves_once_its_grammar_is_compiled(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that samples without it would end the engine."""
    from vllm.sampling_params import StructuredOutputsParams

    wanted = StructuredOutputsParams(regex=r"[0-9a-f]{41,51}")
    params = completed(pair, structured_outputs=wanted, ignore_eos=False, **SEEDED)
    unmoved = await pair.unmoved(LONG, **params)
    manager, may_compile = pair.b.core.structured_output_manager, threading.Event()
    create = manager._create_grammar

    def create_later(request: Any) -> Any:
        assert may_compile.wait(20)
        return create(request)

    monkeypatch.setattr(manager, "_create_grammar", create_later)
    pair.submit(pair.a, "moved", LONG, **params)
    pair.a.take_calls()
    export = await pair.done(pair.a.engine.export("moved"))
    sent = await pair.done(pair.b.engine.reserve(export))
    while not pair.a.scheduler.running:
        pair.a.step()
    stage = await pair.done(pair.a.engine.stage("moved", sent))
    assert stage.num_tokens, "it waits still"
    assert not stage.decoding

    growing = asyncio.ensure_future(pair.b.engine.grow("moved", stage.num_tokens))
    for _ in range(10):
        pair.b.take_calls()
        await asyncio.sleep(0.01)
    assert not growing.done()
    may_compile.set()
    blocks = await pair.done(growing)

    await pair.copy(pair.a, pair.b, stage.block_ids, [blocks[place] for place in stage.places])
    tail = await pair.suspend(pair.a, "moved", sent + len(stage.block_ids))
    await pair.copy(pair.a, pair.b, tail.block_ids, [blocks[place] for place in tail.places])
    pair.b.engine.assign("moved", 1)
    await pair.done(pair.b.engine.commit("moved", tail))
    await pair.done(pair.a.engine.release("moved"))
    assert_same(await pair.finish("moved"), unmoved)


async def test_bad_words_stay_forbidden(pair: Pair) -> None:
    params = completed(pair, bad_words=[" 0003", "4"])
    unmoved, moved = await moved_in_the_middle(pair, **params)

    assert moved.tokens == unmoved.tokens
    assert b"4" not in bytes(token for token in moved.tokens if token < 256)


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 5, "logprob_token_ids": None},
        {"logprobs": None, "logprob_token_ids": [48, 49]},
        {"logprobs": None, "frequency_penalty": -0.5},
    ],
    ids=str,
)
async def test_token_and_log_probabilities_go_on(pair: Pair, params: dict[str, Any]) -> None:
    unmoved, moved = await moved_in_the_middle(pair, **SEEDED, **params)

    assert_same(moved, unmoved)


async def test_prompt_log_probabilities_are_given_once_and_the_request_moves_after_them(
    pair: Pair,
) -> None:
    unmoved, moved = await moved_in_the_middle(pair, tokens=2, prompt_logprobs=2)

    assert moved.tokens == unmoved.tokens
    assert len(moved.prompt_logprobs) == len(unmoved.prompt_logprobs) == 1
    assert len(moved.prompt_logprobs[0].logprobs) == len(PROMPT) - 1


async def test_a_priority_travels(engines: Engines) -> None:
    async with engines.lent(BY_PRIORITY, BY_PRIORITY) as pair:
        await pair.run(pair.a, "moved", PROMPT, priority=7, until=10)

        await pair.move(pair.a, pair.b, "moved")

        (state,) = await pair.done(pair.b.engine.requests())
        assert (state.request_id, state.priority) == ("moved", 7)
        await pair.finish("moved")


async def stays(pair: Pair, side: Side, request_id: str, because: str) -> None:
    """The export is refused, and the list of requests says so before anybody asks."""
    states = await pair.done(side.engine.requests())
    assert [one.unmovable for one in states if one.request_id == request_id] == [because]
    with pytest.raises(MigrationRefused, match=f"unsupported: {because}"):
        await pair.done(side.engine.export(request_id))


async def test_prompt_log_probabilities_keep_a_request_in_place_until_it_decodes(
    pair: Pair,
) -> None:
    pair.submit(pair.a, "kept", LONG, prompt_logprobs=1)
    pair.a.step()

    await stays(pair, pair.a, "kept", "prompt log-probabilities still in prefill")

    await pair.step(pair.a, until=("kept", 1))
    assert [one.unmovable for one in await pair.done(pair.a.engine.requests())] == [""]
    await pair.finish("kept")


async def test_a_thinking_budget_keeps_a_request_in_place(engines: Engines) -> None:
    async with engines.lent(BY_PRIORITY, BY_PRIORITY) as pair:
        await pair.run(pair.a, "kept", PROMPT, thinking_token_budget=5, until=3)

        await stays(pair, pair.a, "kept", "thinking token budget")

        await pair.finish("kept")


async def test_a_session_that_waits_for_more_input_stays(pair: Pair) -> None:
    await pair.run(pair.a, "kept", PROMPT, resumable=True, until=3)

    await stays(pair, pair.a, "kept", "streaming input")

    pair.a.engine.abort(["kept"])
    await asyncio.sleep(0)
