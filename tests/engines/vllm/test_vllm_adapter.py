"""The vLLM adapter on two real engines, every step boundary under the test's control."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from kvmig.core.errors import MigrationRefused, RequestGone
from kvmig.engines import base
from kvmig.engines.base import CameBlocks
from kvmig.engines.vllm.runner import uses_v2
from tests.support.vllm_pair import (
    LONG,
    PROMPT,
    SAMPLING,
    SEEDED,
    TOKENS,
    Pair,
    assert_same,
    preempt,
)
from tests.support.vllm_side import Output

pytestmark = pytest.mark.engine

OTHER = [60 + number * number % 70 for number in range(1000)]


@pytest.mark.parametrize("params", SAMPLING.values(), ids=SAMPLING)
async def test_a_request_moved_there_and_back_equals_one_left_alone(
    pair: Pair, params: dict[str, Any]
) -> None:
    unmoved = await pair.unmoved(PROMPT, **params)
    assert_same(await pair.there_and_back(PROMPT, **params), unmoved)


async def test_a_request_that_returns_at_once_forgets_its_first_stay(pair: Pair) -> None:
    unmoved = await pair.unmoved(PROMPT, **SEEDED)
    await pair.run(pair.a, "moved", PROMPT, **SEEDED, until=10)

    await pair.move(pair.a, pair.b, "moved", steps=0)
    await pair.move(pair.b, pair.a, "moved", steps=0)

    assert_same(await pair.finish("moved"), unmoved)


def in_queue(output: Output) -> float:
    stats = output.stats
    return float(stats.scheduled_ts - stats.queued_ts)


@pytest.mark.parametrize("steps", [0, 1], ids=["waits", "begun"])
async def test_a_prompt_is_computed_at_one_and_decoded_at_the_other(pair: Pair, steps: int) -> None:
    unmoved = await pair.unmoved(LONG)
    went = await pair.hand_over(LONG, steps=steps)
    assert sum(map(bool, went)) > 1, "its prompt was shorter"
    assert_same(await pair.finish("moved"), unmoved)


async def test_a_request_moves_in_the_middle_of_its_prefill(pair: Pair) -> None:
    unmoved = await pair.unmoved(LONG)
    began = time.monotonic()
    moved = await pair.moved_in_prefill(LONG, chunks=2)
    took = time.monotonic() - began
    assert_same(moved, unmoved)
    assert 0 <= in_queue(moved) < moved.stats.first_token_ts - moved.stats.queued_ts < took


async def test_a_waiting_request_moves_queue(pair: Pair) -> None:
    unmoved = await pair.unmoved(PROMPT)
    for number in range(4):
        await pair.run(pair.a, f"busy {number}", PROMPT, max_tokens=40, until=1)
    began = time.monotonic()
    pair.submit(pair.a, "moved", PROMPT)
    pair.a.step()
    waits = time.monotonic()

    await pair.move(pair.a, pair.b, "moved", steps=0)

    moved = await pair.finish("moved")
    assert_same(moved, unmoved)
    now = time.monotonic()
    assert waits - began < in_queue(moved) < now - began
    assert 0 < moved.stats.first_token_ts - moved.stats.scheduled_ts < now - waits


@pytest.mark.parametrize("outputs", [0, 3])
async def test_a_waiting_request_moves_to_where_no_block_and_no_place_is_free(
    pair: Pair, outputs: int
) -> None:
    """outputs: that it had put out when it was preempted, and had to wait."""
    unmoved = await pair.unmoved(PROMPT)
    for number, prompt in enumerate(([*OTHER, *PROMPT[:80]], *[PROMPT[:20]] * 3)):
        pair.submit(pair.b, f"busy {number}", prompt, max_tokens=30)
    await pair.step(pair.b, until=("busy 3", 1))
    there = pair.b.holdings.load()
    assert (there.running, there.total_blocks - there.used_blocks) == (4, 2)
    pair.submit(pair.a, "moved", PROMPT)
    if outputs:
        await pair.step(pair.a, until=("moved", outputs))
        preempt(pair.a, "moved")

    await pair.done(pair.a.engine.export("moved"))
    assert (await pair.done(pair.a.engine.stage("moved", 0))).num_tokens == 0
    await pair.move(pair.a, pair.b, "moved", steps=0)

    there = pair.b.holdings.load()
    assert (there.waiting, there.waiting_blocks) == (1, 4)
    assert_same(await pair.finish("moved"), unmoved)


async def test_what_a_waiting_request_has_computed_meanwhile_is_refused_where_no_room_is(
    pair: Pair,
) -> None:
    unmoved = await pair.unmoved(PROMPT)
    pair.submit(pair.a, "kept", PROMPT)
    pair.a.take_calls()
    export = await pair.done(pair.a.engine.export("kept"))
    await pair.done(pair.b.engine.reserve(export))
    assert (await pair.done(pair.a.engine.stage("kept", 0))).num_tokens == 0
    await pair.step(pair.a, until=("kept", 1))
    tail = await pair.suspend(pair.a, "kept", 0)

    pair.b.engine.assign("kept", 1)
    with pytest.raises(MigrationRefused, match="no_blocks"):
        await pair.done(pair.b.engine.commit("kept", tail))

    await pair.done(pair.a.engine.resume("kept"))
    assert_same(await pair.finish("kept"), unmoved)


async def test_a_load_says_what_is_left_of_prompts_that_run(pair: Pair) -> None:
    """600 tokens in blocks of 32, 128 of them a step."""
    pair.submit(pair.a, "long", LONG, max_tokens=5)
    pair.submit(pair.a, "next", OTHER[:300], max_tokens=5)
    left = []
    while "long" not in pair.outputs:
        pair.a.step()
        await pair.settle()
        left.append(pair.a.holdings.load().prefill_blocks)

    assert left[:5] == [15, 11, 7, 3, 9]  # the step that ends the one prompt begins the next
    for name in ("long", "next"):
        await pair.finish(name)
    assert pair.a.engine.load().prefill_blocks == 0


async def test_several_requests_move_both_ways_at_once(pair: Pair) -> None:
    unmoved = {
        seed: await pair.unmoved(PROMPT[seed:], temperature=1.0, seed=seed) for seed in range(4)
    }
    for seed in range(4):
        side = pair.a if seed % 2 else pair.b
        pair.submit(side, f"r{seed}", PROMPT[seed:], temperature=1.0, seed=seed)
        # One prefill at a time: vLLM 0.32's CPU build dies of a seeded prompt in two chunks.
        await pair.step(pair.a, pair.b, until=(f"r{seed}", 5))

    for seed in range(4):
        source, to = (pair.a, pair.b) if seed % 2 else (pair.b, pair.a)
        await pair.move(source, to, f"r{seed}")

    for seed in range(4):
        assert (await pair.finish(f"r{seed}")).tokens == unmoved[seed].tokens


async def test_blocks_that_the_destination_has_cached_need_not_travel(pair: Pair) -> None:
    unmoved = await pair.unmoved(LONG)
    pair.submit(pair.b, "before", LONG, max_tokens=1)
    await pair.finish("before")
    await pair.run(pair.a, "moved", LONG, until=10)

    hit = await pair.move(pair.a, pair.b, "moved")

    assert hit == len(LONG) // 32
    assert (await pair.finish("moved")).tokens == unmoved.tokens


async def test_what_was_moved_in_serves_as_a_prefix_later(pair: Pair) -> None:
    await pair.run(pair.a, "moved", LONG, until=5)
    await pair.move(pair.a, pair.b, "moved")
    moved = await pair.finish("moved")

    pair.submit(pair.b, "later", LONG)
    later = await pair.finish("later")

    assert later.tokens == moved.tokens


async def test_a_suspended_request_that_is_resumed_goes_on_as_if_nothing_was(pair: Pair) -> None:
    unmoved = await pair.unmoved(PROMPT, **SEEDED)
    export = await pair.exported("kept", PROMPT, **SEEDED, until=10)
    await pair.done(pair.b.engine.reserve(export))
    await pair.suspend(pair.a, "kept", 0)
    for _ in range(3):
        pair.a.step()

    await pair.done(pair.b.engine.cancel("kept"))
    await pair.done(pair.a.engine.resume("kept"))

    assert_same(await pair.finish("kept"), unmoved)


async def test_what_a_suspended_request_holds_serves_others_while_steps_go_on(pair: Pair) -> None:
    unmoved = await pair.unmoved(LONG)
    await pair.run(pair.a, "moved", LONG, until=10)
    await pair.done(pair.a.engine.export("moved"))
    await pair.suspend(pair.a, "moved", 0)

    pair.submit(pair.a, "beside", LONG)
    beside = await pair.finish("beside")
    await pair.done(pair.a.engine.resume("moved"))

    assert beside.tokens == unmoved.tokens
    assert_same(await pair.finish("moved"), unmoved)


@pytest.mark.parametrize("mode", ["keep", "wait"])
async def test_a_paused_engine_takes_no_request_and_gives_none_up(pair: Pair, mode: str) -> None:
    export = await pair.exported("moved", PROMPT, until=10)
    pair.b.core.pause_scheduler(mode)
    await pair.refused("moved", export, "the engine is paused")
    pair.b.core.resume_scheduler()

    await pair.run(pair.a, "stays", PROMPT, until=10)
    pair.a.core.pause_scheduler("keep")
    with pytest.raises(MigrationRefused, match="the engine is paused"):
        await pair.done(pair.a.engine.export("stays"))
    pair.a.core.resume_scheduler()
    await pair.finish("stays")


async def test_an_engine_that_is_paused_meanwhile_commits_nothing(pair: Pair) -> None:
    unmoved = await pair.unmoved(PROMPT)
    export = await pair.exported("moved", PROMPT, until=10)
    await pair.done(pair.b.engine.reserve(export))
    tail = await pair.suspend(pair.a, "moved", 0)
    await pair.done(pair.b.engine.grow("moved", tail.num_tokens))
    pair.b.core.pause_scheduler("keep", clear_cache=False)

    with pytest.raises(MigrationRefused, match="the engine is paused"):
        await pair.done(pair.b.engine.commit("moved", tail))
    await pair.done(pair.b.engine.cancel("moved"))
    pair.b.core.resume_scheduler()
    await pair.done(pair.a.engine.resume("moved"))

    assert pair.b.used_blocks == 0
    assert_same(await pair.finish("moved"), unmoved)


async def test_a_request_that_vllm_calls_invalid_ends_with_its_sentence_where_it_has_one(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import StructuredOutputsParams

    def refuse(request: object) -> None:
        raise VLLMValidationError("the engine has no such grammar")

    monkeypatch.setattr(pair.a.core.structured_output_manager, "grammar_init", refuse)
    guided = StructuredOutputsParams(regex="[0-9]{9}")
    guided._backend = "xgrammar"
    pair.submit(pair.a, "refused", PROMPT, structured_outputs=guided, ignore_eos=False)
    refused = await pair.finish("refused")

    assert str(refused.finish_reason) == "error"
    if hasattr(pair.a.core, "_handle_request_validation_error"):  # from 0.33 on
        assert refused.error.code == "validation_error"
        assert "the engine has no such grammar" in refused.error.message
    await pair.idle()


async def test_a_commit_that_fails_leaves_nothing_and_the_source_goes_on(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmoved = await pair.unmoved(PROMPT)
    export = await pair.exported("kept", PROMPT, until=10)
    await pair.done(pair.b.engine.reserve(export))
    tail = await pair.suspend(pair.a, "kept", 0)

    def fail(*_: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(pair.b.destination, "_start", fail)
    with pytest.raises(RuntimeError, match="out of order"):
        await pair.done(pair.b.engine.commit("kept", tail))
    monkeypatch.undo()
    await pair.done(pair.a.engine.resume("kept"))

    assert_same(await pair.finish("kept"), unmoved)


async def test_a_corrupt_block_that_comes_with_a_commit_leaves_nothing_there(pair: Pair) -> None:
    unmoved = await pair.unmoved(PROMPT)
    export = await pair.exported("kept", PROMPT, until=10)
    await pair.done(pair.b.engine.reserve(export))
    buffer = memoryview(bytearray(pair.a.engine.layout.block_bytes * 4))
    tail = await pair.suspend(pair.a, "kept", 0, buffer)
    blocks = await pair.done(pair.b.engine.grow("kept", tail.num_tokens))
    count = len(tail.block_ids)
    buffer[pair.a.engine.layout.block_bytes * count - 1] ^= 1
    last = CameBlocks(0, blocks[:count], buffer[: len(buffer) // 4 * count], tail.checksums)

    with pytest.raises(MigrationRefused, match=f"block {count - 1} came changed"):
        await pair.done(pair.b.engine.commit("kept", tail, last))
    assert pair.b.used_blocks == 0
    await pair.done(pair.a.engine.resume("kept"))

    assert_same(await pair.finish("kept"), unmoved)


async def test_a_tail_that_does_not_fit_is_left_to_be_gathered(pair: Pair) -> None:
    await pair.exported("kept", PROMPT, until=10)
    buffer = memoryview(bytearray(pair.a.engine.layout.block_bytes - 1))
    tail = await pair.suspend(pair.a, "kept", 0, buffer)
    assert tail.block_ids
    assert not tail.checksums
    assert not any(buffer)
    await pair.done(pair.a.engine.resume("kept"))
    await pair.finish("kept")


async def test_a_suspension_that_is_given_up_writes_nothing_later(pair: Pair) -> None:
    await pair.exported("kept", PROMPT, until=10)
    buffer = memoryview(bytearray(pair.a.engine.layout.block_bytes * 4))
    task = asyncio.ensure_future(pair.a.engine.suspend("kept", 0, buffer))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    pair.a.take_calls()
    assert not any(buffer)
    await pair.done(pair.a.engine.resume("kept"))
    await pair.finish("kept")


async def test_only_an_idle_engine_makes_a_step_of_nothing_before_a_request_comes(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    for name, side in (("idle", pair.b), ("busy", pair.a)):
        monkeypatch.setattr(side.core, "execute_dummy_batch", lambda name=name: steps.append(name))
    await pair.run(pair.a, "other", PROMPT, until=2)

    await pair.done(pair.a.engine.prepare("moved"))
    await pair.done(pair.b.engine.prepare("moved"))

    assert steps == ([] if uses_v2(pair.a.core) else ["idle"])


async def test_a_moved_request_does_not_wait_behind_a_long_prefill(pair: Pair) -> None:
    unmoved = await pair.unmoved(PROMPT, **SEEDED)
    await pair.run(pair.a, "moved", PROMPT, **SEEDED, until=10)
    pair.submit(pair.b, "long", OTHER, max_tokens=1)
    pair.b.step()

    await pair.move(pair.a, pair.b, "moved", steps=0)
    before = len(pair.outputs["moved"].tokens)
    for _ in range(3):
        pair.b.step()
    await pair.settle()

    assert "long" not in pair.outputs
    assert len(pair.outputs["moved"].tokens) > before
    assert_same(await pair.finish("moved"), unmoved)


async def test_a_request_preempted_at_the_source_is_told_so_and_goes_on(pair: Pair) -> None:
    await pair.exported("kept", PROMPT, until=10)
    preempt(pair.a, "kept")

    with pytest.raises(RequestGone, match="preempted"):
        await pair.done(pair.a.engine.stage("kept", 0))

    assert pair.a.engine.load().preempted_waiting == 1
    assert len((await pair.finish("kept")).tokens) == TOKENS


async def test_a_request_preempted_at_the_destination_ends_with_the_same_tokens(
    pair: Pair,
) -> None:
    unmoved = await pair.unmoved(PROMPT, **SEEDED)
    await pair.run(pair.a, "moved", PROMPT, **SEEDED, until=10)
    (before,) = await pair.done(pair.a.engine.requests())
    await pair.move(pair.a, pair.b, "moved")
    await pair.step(pair.b, until=("moved", 20))
    (after,) = await pair.done(pair.b.engine.requests())
    assert after.arrived_s == before.arrived_s > 0

    preempt(pair.b, "moved")

    moved = await pair.finish("moved")
    assert moved.tokens == unmoved.tokens
    assert moved.finish_reason == unmoved.finish_reason


async def test_a_request_that_finishes_meanwhile_is_gone(pair: Pair) -> None:
    export = await pair.exported("short", PROMPT, max_tokens=12, until=10)
    await pair.done(pair.b.engine.reserve(export))
    await pair.finish("short")

    with pytest.raises(RequestGone):
        await pair.done(pair.a.engine.stage("short", 0))

    await pair.done(pair.b.engine.cancel("short"))


async def test_a_suspended_request_can_be_aborted(pair: Pair) -> None:
    await pair.exported("unwanted", PROMPT, until=10)
    await pair.suspend(pair.a, "unwanted", 0)

    pair.a.engine.abort(["unwanted"])
    pair.a.take_calls()
    await pair.done(pair.a.engine.resume("unwanted"))


async def test_a_destination_without_blocks_refuses_at_the_first_reserve(pair: Pair) -> None:
    await pair.run(pair.b, "large", OTHER, max_tokens=30, until=1)
    export = await pair.exported("kept", LONG, max_tokens=20, until=2)

    await pair.refused("kept", export, "no_blocks")


async def test_a_destination_that_fills_up_refuses_at_a_later_stage(pair: Pair) -> None:
    await pair.run(pair.b, "large", OTHER[:900], max_tokens=30, until=1)
    export = await pair.exported("kept", PROMPT, max_tokens=20, until=2)
    await pair.done(pair.b.engine.reserve(export))

    with pytest.raises(MigrationRefused, match="no_blocks"):
        await pair.done(pair.b.engine.grow("kept", 800))

    await pair.done(pair.b.engine.cancel("kept"))
    await pair.done(pair.a.engine.resume("kept"))
    await pair.finish("kept")


async def test_a_full_batch_refuses(pair: Pair) -> None:
    for number in range(4):
        await pair.run(pair.b, f"busy {number}", PROMPT[:20], max_tokens=30, until=1)
    export = await pair.exported("kept", PROMPT, max_tokens=20, until=2)

    with pytest.raises(MigrationRefused, match="no_batch_slot"):
        await pair.done(pair.b.engine.reserve(export))

    await pair.done(pair.a.engine.resume("kept"))
    for name in ("kept", *(f"busy {number}" for number in range(4))):
        await pair.finish(name)


async def test_a_reserved_request_keeps_its_place_in_the_batch(pair: Pair) -> None:
    """vLLM's scheduler dies of more running requests than --max-num-seqs, which is 4 here."""
    unmoved = await pair.unmoved(PROMPT)
    export = await pair.exported("moved", PROMPT, until=5)
    await pair.done(pair.b.engine.reserve(export))
    busy = [f"busy {number}" for number in range(5)]
    for name in busy:
        pair.submit(pair.b, name, PROMPT[:20], max_tokens=30)
    await pair.step(pair.b, until=("busy 2", 1))
    assert len(pair.b.scheduler.running) == 3

    await pair.copy_stage(pair.a, pair.b, "moved", 0)
    tail = await pair.suspend(pair.a, "moved", 3)
    blocks = await pair.done(pair.b.engine.grow("moved", tail.num_tokens))
    await pair.copy(pair.a, pair.b, tail.block_ids, blocks[3 : 3 + len(tail.block_ids)])
    pair.b.engine.assign("moved", 1)
    await pair.done(pair.b.engine.commit("moved", tail))
    await pair.done(pair.a.engine.release("moved"))
    assert_same(await pair.finish("moved"), unmoved)
    for name in busy:
        await pair.finish(name)


async def test_a_suspended_request_finds_its_place_in_the_batch_again(pair: Pair) -> None:
    unmoved = await pair.unmoved(PROMPT)
    await pair.exported("kept", PROMPT, until=5)
    await pair.suspend(pair.a, "kept", 0)
    busy = [f"busy {number}" for number in range(5)]
    for name in busy:
        pair.submit(pair.a, name, PROMPT[:20], max_tokens=30)
    await pair.step(pair.a, until=("busy 2", 1))
    await pair.done(pair.a.engine.resume("kept"))
    assert_same(await pair.finish("kept"), unmoved)
    for name in busy:
        await pair.finish(name)


async def test_during_a_long_step_the_last_list_is_told_with_its_age(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pair.run(pair.a, "there", PROMPT, until=2)
    (fresh,) = await pair.done(pair.a.engine.requests())
    monkeypatch.setattr("kvmig.engines.vllm.serving._LIST_WAIT_S", 0.01)
    (old,) = await pair.a.engine.requests()  # nobody takes the call

    assert (fresh.request_id, fresh.age_ms) == ("there", 0.0)
    assert (old.request_id, old.tokens) == ("there", fresh.tokens)
    assert old.age_ms > 0.0
    await pair.finish("there")


async def test_a_step_that_expects_a_commit_waits_for_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmoved = await pair.unmoved(PROMPT)
    await pair.run(pair.b, "other", PROMPT[3:], until=5)
    export = await pair.exported("moved", PROMPT, until=10)
    sent = await pair.done(pair.b.engine.reserve(export))
    sent = await pair.copy_stage(pair.a, pair.b, "moved", sent)
    tail = await pair.suspend(pair.a, "moved", sent)
    blocks = await pair.done(pair.b.engine.grow("moved", tail.num_tokens))
    await pair.copy(pair.a, pair.b, tail.block_ids, [blocks[place] for place in tail.places])
    for module in ("steps", "vllm.core"):  # nothing but the commit may end the wait
        monkeypatch.setattr(f"kvmig.engines.{module}.limit_s", lambda step_s: 60.0)
    engine = pair.b.engine
    engine.expect("moved", 0.0)
    engine.assign("moved", 1)
    commit = asyncio.ensure_future(engine.commit("moved", tail))
    await pair.settle()

    pair.b.core._process_engine_step()

    assert not pair.b.destination.is_arriving("moved")
    await pair.done(commit)
    await pair.done(pair.a.engine.release("moved"))
    assert (await pair.finish("moved")).tokens == unmoved.tokens


async def test_a_request_too_large_to_move_says_so_before_anybody_asks(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pair.run(pair.a, "large", PROMPT, until=1)
    monkeypatch.setattr(base, "MOST_BYTES", 100)
    (state,) = await pair.done(pair.a.engine.requests())
    assert "with its images, allowed are 100" in state.unmovable
    with pytest.raises(MigrationRefused, match="unsupported: a request of"):
        await pair.done(pair.a.engine.export("large"))


async def test_an_unknown_request_is_refused(pair: Pair) -> None:
    with pytest.raises(MigrationRefused, match="unknown_request"):
        await pair.done(pair.a.engine.export("nobody"))


async def test_without_the_copied_blocks_the_answer_would_differ(pair: Pair) -> None:
    """So the other tests can fail: the output does depend on what is copied."""
    unmoved = await pair.unmoved(LONG)
    export = await pair.exported("moved", LONG, until=10)
    await pair.done(pair.b.engine.reserve(export))
    tail = await pair.suspend(pair.a, "moved", 0)

    pair.b.engine.assign("moved", 1)
    await pair.done(pair.b.engine.commit("moved", tail))
    await pair.done(pair.a.engine.release("moved"))

    assert (await pair.finish("moved")).logprobs != unmoved.logprobs
