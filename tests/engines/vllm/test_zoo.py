"""The families that people serve, each on two real engines: what moved equals what stayed.

A CPU rounds differently with other neighbours in a batch, or in another order, so each request is
compared with one whose batches were the same: alone, or beside the same seven others.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from kvmig.core.errors import MigrationRefused, RequestGone
from tests.support.vllm_pair import PROMPT, SAMPLING, Engines, Pair, assert_same, preempt
from tests.support.vllm_side import AS_SERVED, Configuration, Side
from tests.support.vllm_talk import Talk, cached, found, stayed
from tests.support.zoo import eagle, make

pytestmark = pytest.mark.engine

FLAGS = ("--max-num-seqs=8", "--num-gpu-blocks-override=128", AS_SERVED)
SHORT = PROMPT[:40]
SEEDED = SAMPLING["penalties"]
TOKENS = 30
CHUNK = 128
"""Tokens of a step."""


@dataclass(frozen=True)
class Case:
    """Two engines of a family.

    tokens: of a prompt that doesn't fit the window, where the family has one; cached: how many of
    them the next request with this prompt finds in the prefix cache; stays: why a session without
    a request can't move; long: of a prompt that fills a block of attention before its last step.
    """

    family: str
    tokens: int = 200
    cached: int = 192
    flags: tuple[str, ...] = ()
    async_scheduling: bool = False
    stays: str = ""
    long: int = 300

    @property
    def prompt(self) -> list[int]:
        return tokens_of_prompt(self.tokens)

    @property
    def long_prompt(self) -> list[int]:
        return tokens_of_prompt(max(self.tokens, self.long))


def tokens_of_prompt(count: int) -> list[int]:
    return [40 + number * number % 97 for number in range(count)]


# vLLM's attention on a CPU takes blocks of 32 tokens and no smaller ones, but for MLA without AMX,
# which has blocks of 16 and no prefix cache. Where a family has states, a block is of so many
# tokens that one fits in.
BLOCKS_OF_128: dict[str, Any] = {"flags": ("--block-size=128",), "cached": 128}
STATES, UNCACHED = "states", "without a prefix cache"
AMX = torch.cpu._is_amx_tile_supported()
CASES = {
    "gemma3": Case("gemma3", tokens=600, cached=576, flags=("--dtype=float32",)),
    "qwen3-next": Case("qwen3-next", tokens=60, cached=0, stays=STATES, long=660),
}
SELDOM = {
    "llama3": Case("llama3"),  # as the bundled model, but for its vocabulary
    "llama3, blocks of 128": Case("llama3", **BLOCKS_OF_128),
    "llama7b": Case("llama7b"),
    "qwen2.5": Case("qwen2.5"),
    "qwen3": Case("qwen3"),
    "qwen3-moe": Case("qwen3-moe"),
    "mixtral": Case("mixtral"),
    "mistral": Case("mistral", tokens=300, cached=288),
    "gemma3, asynchronous": Case("gemma3", tokens=600, cached=576, async_scheduling=True),
    "gpt-oss, blocks of 128": Case("gpt-oss", **BLOCKS_OF_128),
    "gpt-oss": Case("gpt-oss"),
    "llama4": Case("llama4", tokens=300, cached=288),
    "granite4": Case("granite4", tokens=440, cached=416, stays=STATES, long=520),
    "qwen3-next, asynchronous": Case(
        "qwen3-next", tokens=600, cached=544, async_scheduling=True, stays=STATES, long=660
    ),
    "qwen3-next, hits of 32 tokens": Case(
        "qwen3-next", tokens=60, cached=0, stays=STATES, long=660, flags=("--prefix-match-unit=32",)
    ),
    "nemotron-h": Case("nemotron-h", cached=0, stays=STATES),
    "deepseek-v2": Case("deepseek-v2", cached=192 if AMX else 0, stays="" if AMX else UNCACHED),
    "mamba2": Case("mamba2", cached=0, stays=UNCACHED),
    "paddleocr-vl": Case("paddleocr-vl", flags=('--limit-mm-per-prompt={"image": 0}',)),
}


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(case, id=name) for name, case in CASES.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.long) for name, case in SELDOM.items()),
    ],
)
def case(request: pytest.FixtureRequest) -> Case:
    wanted: Case = request.param
    return wanted


@pytest.fixture(scope="module")
def configurations(
    case: Case, engines: Engines, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Configuration, Configuration]:
    engines.close()  # the first engine makes vLLM's process groups; a dense one, none for experts
    model = make(case.family, tmp_path_factory.mktemp("zoo"))
    wanted = Configuration(case.async_scheduling, (*FLAGS, *case.flags), model=model)
    return wanted, wanted


def spoil(side: Side, request_id: str, table: int) -> None:
    """Zero what the layers of one block table keep of a request."""
    scheduler = side.scheduler
    context = side.core.vllm_config.compilation_config.static_forward_context
    blocks = list(scheduler.kv_cache_manager.get_block_ids(request_id)[table])
    for name in scheduler.kv_cache_config.kv_cache_groups[table].layer_names:
        cache = context[name].kv_cache
        for tensor in cache if isinstance(cache, (list, tuple)) else [cache]:
            tensor[blocks] = 0


async def test_each_kind_of_cache_tells_in_the_answer(pair: Pair) -> None:
    """So the other tests can fail."""
    tables = len(pair.a.scheduler.kv_cache_config.kv_cache_groups)
    unmoved = await pair.unmoved(SHORT, max_tokens=12)
    assert len(set(unmoved.tokens)) > 5
    for table in range(tables):
        await pair.run(pair.a, "spoilt", SHORT, max_tokens=12, until=6)
        spoil(pair.a, "spoilt", table)
        spoilt = await pair.finish("spoilt")
        assert spoilt.logprobs[:6] == unmoved.logprobs[:6]
        assert spoilt.logprobs[6:] != unmoved.logprobs[6:], f"table {table}"
        del pair.outputs["spoilt"]
        pair.a.scheduler.reset_prefix_cache()


async def test_a_greedy_request_moved_there_and_back_equals_one_left_alone(
    pair: Pair, case: Case
) -> None:
    unmoved = await pair.unmoved(case.prompt, max_tokens=TOKENS)
    await pair.run(pair.a, "moved", case.prompt, max_tokens=TOKENS, until=10)

    await pair.move(pair.a, pair.b, "moved")
    await pair.step(pair.b, until=("moved", 25))
    await pair.move(pair.b, pair.a, "moved")

    assert_same(await pair.finish("moved"), unmoved)


async def test_a_seeded_request_moved_there_and_back_equals_one_left_alone(pair: Pair) -> None:
    unmoved = await pair.unmoved(SHORT, max_tokens=TOKENS, **SEEDED)
    await pair.run(pair.a, "moved", SHORT, max_tokens=TOKENS, **SEEDED, until=5)

    await pair.move(pair.a, pair.b, "moved")
    await pair.step(pair.b, until=("moved", 25))
    await pair.move(pair.b, pair.a, "moved", steps=0)

    assert_same(await pair.finish("moved"), unmoved)


async def test_a_request_moves_after_the_first_step_of_its_prompt(pair: Pair, case: Case) -> None:
    unmoved = await pair.unmoved(case.prompt, max_tokens=TOKENS)
    pair.submit(pair.a, "moved", case.prompt, max_tokens=TOKENS)
    pair.a.step()
    await pair.settle()

    await pair.move(pair.a, pair.b, "moved", steps=0)

    assert_same(await pair.finish("moved"), unmoved)


async def test_what_a_request_leaves_in_the_cache_after_a_move_is_what_others_read(
    pair: Pair, case: Case
) -> None:
    """Also the state at the end of a prompt, which the request itself goes on from."""
    await pair.run(pair.a, "first", case.prompt, max_tokens=TOKENS, until=TOKENS)
    pair.submit(pair.a, "unmoved", case.prompt, max_tokens=TOKENS)
    unmoved = await pair.finish("unmoved")
    pair.a.scheduler.reset_prefix_cache()
    pair.submit(pair.a, "moved", case.prompt, max_tokens=TOKENS)
    pair.a.step()
    await pair.settle()
    await pair.move(pair.a, pair.b, "moved", steps=0)
    await pair.finish("moved")

    pair.submit(pair.b, "next", case.prompt, max_tokens=TOKENS)
    after = await pair.finish("next")

    assert after.cached_tokens == unmoved.cached_tokens
    assert_same(after, unmoved)


@pytest.mark.long
async def test_a_prompt_is_computed_at_one_and_decoded_at_the_other(pair: Pair, case: Case) -> None:
    """Full blocks go while the next chunk is computed; states, and all without chunks, with the
    tail."""
    prompt = case.long_prompt
    unmoved = await pair.unmoved(prompt, max_tokens=TOKENS)
    went = await pair.hand_over(prompt, max_tokens=TOKENS)
    if pair.a.core.vllm_config.scheduler_config.enable_chunked_prefill:
        size, before_last = pair.a.attention_tokens, (len(prompt) - 1) // CHUNK * CHUNK
        assert len(went) > 2
        assert any(went) == (size is not None and size <= before_last)
    else:
        assert went == [0]
    assert_same(await pair.finish("moved"), unmoved)


async def test_what_the_destination_has_cached_need_not_travel(pair: Pair, case: Case) -> None:
    unmoved = await pair.unmoved(case.prompt, max_tokens=TOKENS)
    pair.submit(pair.b, "before", case.prompt, max_tokens=1)
    await pair.finish("before")
    await pair.run(pair.a, "moved", case.prompt, max_tokens=TOKENS, until=5)

    hit = await pair.move(pair.a, pair.b, "moved")

    assert hit == case.cached // pair.b.engine.layout.block_tokens
    assert_same(await pair.finish("moved"), unmoved)


async def assert_next_turn_same(pair: Pair, case: Case, *, known: bool) -> None:
    """known: whether the destination has the session's beginning, too."""
    a, b = pair.a, pair.b
    more: dict[str, Any] = {"prompt": case.prompt, "max_tokens": 50}
    alone = await stayed(pair, 2, **more)
    if known:
        await Talk(pair, prompt=case.prompt, max_tokens=1).turn(b)
    talk = Talk(pair, **more)
    assert_same(await talk.turn(a), alone[0])
    here, there, turns_at = cached(a), cached(b), b
    if case.stays:
        with pytest.raises(MigrationRefused, match=case.stays):
            await talk.held(a)
        turns_at = a
    else:
        await pair.done(b.engine.reserve(await talk.held(a)))
        await pair.done(b.engine.cancel("s"))
        await pair.done(a.engine.resume("s"))
    assert (a.used_blocks, b.used_blocks, cached(a), cached(b)) == (0, 0, here, there)
    if not case.stays:
        hit = await talk.move(a, b)
        assert (hit > 0) == known
        assert cached(a) < here

    second = await talk.turn(turns_at)

    assert_same(second, alone[1])
    assert found(second) == found(alone[1])
    if not case.stays:  # states are cached at few places, maybe at none that this turn reads
        assert found(second) >= case.cached


async def test_a_sessions_next_turn_is_the_same_whether_it_moves_or_must_stay(
    pair: Pair, case: Case
) -> None:
    await assert_next_turn_same(pair, case, known=False)


async def test_what_the_destination_has_of_a_session_does_not_travel(
    pair: Pair, case: Case
) -> None:
    await assert_next_turn_same(pair, case, known=True)


async def preempted_at_20(pair: Pair, request_id: str) -> None:
    await pair.run(pair.a, request_id, SHORT, max_tokens=TOKENS, until=20)
    if request_id == "moved":
        export = await pair.done(pair.a.engine.export(request_id))
        sent = await pair.done(pair.b.engine.reserve(export))
        await pair.copy_stage(pair.a, pair.b, request_id, sent)
    preempt(pair.a, request_id)


async def test_a_request_preempted_while_it_moves_stays_and_moves_later(pair: Pair) -> None:
    await preempted_at_20(pair, "unmoved")
    unmoved = await pair.finish("unmoved")
    pair.a.scheduler.reset_prefix_cache()

    await preempted_at_20(pair, "moved")
    with pytest.raises(RequestGone, match="preempted"):
        await pair.done(pair.a.engine.stage("moved", 0))
    await pair.done(pair.b.engine.cancel("moved"))
    assert pair.b.used_blocks == 0
    await pair.step(pair.a, until=("moved", 25))
    await pair.move(pair.a, pair.b, "moved")

    assert_same(await pair.finish("moved"), unmoved)


@pytest.mark.long
async def test_an_id_that_has_left_may_come_again(pair: Pair, case: Case) -> None:
    """As of a request that is run again where it was before."""
    unmoved = await pair.unmoved(SHORT, max_tokens=5)
    await pair.run(pair.a, "again", case.prompt, max_tokens=20, until=2)
    await pair.move(pair.a, pair.b, "again")
    await pair.finish("again")
    await pair.idle()
    del pair.outputs["again"]

    pair.submit(pair.a, "again", SHORT, max_tokens=5)

    assert_same(await pair.finish("again"), unmoved)


@pytest.mark.long
async def test_eight_requests_leave_at_once(pair: Pair) -> None:
    names = [f"r{number}" for number in range(8)]

    async def begin(kind: str) -> None:
        for number, name in enumerate(names):
            more: dict[str, Any] = SEEDED if number % 2 else {}
            pair.submit(pair.a, f"{kind} {name}", SHORT[number:24], max_tokens=TOKENS, **more)
        await pair.step(pair.a, until=(f"{kind} {names[-1]}", 10))

    await begin("unmoved")
    unmoved = [await pair.finish(f"unmoved {name}") for name in names]
    pair.a.scheduler.reset_prefix_cache()
    await begin("moved")
    for name in reversed(names):  # each goes to the head of the batch
        await pair.move(pair.a, pair.b, f"moved {name}", steps=0)

    moved = [await pair.finish(f"moved {name}") for name in names]
    for one, other in zip(moved, unmoved, strict=True):
        assert_same(one, other)


# -- an EAGLE head


async def proposals(pair: Pair, side: Side, name: str, until: int) -> list[tuple[int, list[int]]]:
    """(tokens so far, drafts for the next step) after each step."""
    seen: list[tuple[int, list[int]]] = []
    while len(pair.outputs[name].tokens) < until:
        side.step()
        await pair.settle()
        request = side.scheduler.requests[name]
        seen.append((request.num_output_tokens, list(request.spec_token_ids)))
    return seen


@pytest.mark.long
async def test_the_head_proposes_after_a_move_what_it_would_have_proposed(
    engines: Engines, tmp_path: Path
) -> None:
    """Tokens alone can't tell: drafts that are wrong are thrown away."""
    model = make("llama7b", tmp_path)
    drafts = {"method": "eagle", "model": str(eagle(model)), "num_speculative_tokens": 3}
    wanted = Configuration(flags=(f"--speculative-config={json.dumps(drafts)}",), model=model)
    prompt = [40 + number * number % 97 for number in range(100)]
    engines.close()
    async with engines.lent(wanted, wanted) as pair:
        await pair.run(pair.a, "unmoved", prompt, until=10)
        expected = await proposals(pair, pair.a, "unmoved", 40)
        unmoved = await pair.finish("unmoved")
        pair.a.scheduler.reset_prefix_cache()
        await pair.run(pair.a, "moved", prompt, until=10)

        await pair.move(pair.a, pair.b, "moved", steps=0)

        assert await proposals(pair, pair.b, "moved", 40) == expected
        assert len({tuple(drafts) for _, drafts in expected}) > 10
        assert_same(await pair.finish("moved"), unmoved)
