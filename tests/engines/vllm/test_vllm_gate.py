"""The step gate on real vLLM engines: what they compute is what they would have computed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvmig.engines.gate import EVERYTHING, ComputeShares, StepGrant, StepRequest
from kvmig.engines.vllm.phase import StepPhase
from tests.support.inside import running_steps
from tests.support.local_unit import LocalUnit
from tests.support.vllm_pair import LONG, PROMPT, SAMPLING, SEEDED, Pair, assert_same
from tests.support.vllm_side import Side

pytestmark = pytest.mark.engine

ALL = ComputeShares(10, 10)
OTHER = [60 + number * number % 70 for number in range(200)]
FAR = LONG[::-1]
"""It begins with nothing that another one begins with."""


@pytest.fixture
async def gated(pair: Pair) -> AsyncIterator[tuple[Pair, LocalUnit]]:
    """Two engines that share a device; afterwards they don't."""
    unit = LocalUnit()
    yield pair, unit
    await pair.idle()
    for side in (pair.a, pair.b):
        side.core.phase = None


def share(unit: LocalUnit, pair: Pair, **limits: float) -> None:
    for name, side in (("a", pair.a), ("b", pair.b)):
        side.share(unit.join(name, ComputeShares(10, 6), **limits))


async def settled(pair: Pair) -> None:
    """No step is in flight, and what the last one gave has come."""
    for side in (pair.a, pair.b):
        side.core.collect()
    await pair.settle()


class Scripted:
    """A gate whose answers a test has written."""

    def __init__(self, *grants: StepGrant, limit_s: float = 5.0) -> None:
        self.limit_s, self.alone, self.answers = limit_s, False, 0
        self.waited_s = 0.0
        self.on_answer = lambda: None
        self.grants = list(grants)
        self.wants: list[StepRequest] = []
        self.ended = 0

    def request_step(self, want: StepRequest) -> None:
        self.wants.append(want)

    def answer(self) -> StepGrant | None:
        return self.grants.pop(0) if self.grants else None

    def reuse_grant(self) -> StepGrant | None:
        return None

    def finish_step(self) -> None:
        self.ended += 1

    def close(self) -> None:
        pass


PROMPTS = StepGrant(prompts=True, decodes=False)
DECODES = StepGrant(prompts=False, decodes=True)


@pytest.mark.parametrize("params", [SAMPLING["greedy"], SEEDED], ids=["greedy", "seeded"])
async def test_gated_engines_and_migrations_between_them_change_nothing(
    gated: tuple[Pair, LocalUnit], params: dict[str, Any]
) -> None:
    pair, unit = gated
    unmoved = await pair.unmoved(PROMPT, **params)
    share(unit, pair)
    assert_same(await pair.there_and_back(PROMPT, **params), unmoved)
    assert {name for name, _ in unit.told} == {"a", "b"}
    assert {grant.prompts for _, grant in unit.told} == {True, False}
    assert all(one.stands for one in running_steps(unit.turns))


async def test_a_request_moved_in_its_prefill_between_gated_engines_is_the_same(
    gated: tuple[Pair, LocalUnit],
) -> None:
    pair, unit = gated
    unmoved = await pair.unmoved(LONG)
    share(unit, pair)
    assert_same(await pair.moved_in_prefill(LONG, chunks=2), unmoved)


async def test_a_step_of_decodes_computes_no_prompt_even_after_one_that_was_full(
    gated: tuple[Pair, LocalUnit],
) -> None:
    pair, _ = gated
    unmoved = await pair.unmoved(LONG)
    gate = Scripted(*[EVERYTHING] * 3)
    await pair.run(pair.a, "first", PROMPT, until=1)
    pair.a.share(gate)
    pair.submit(pair.a, "long", LONG)
    pair.a.step()
    pair.submit(pair.a, "waits", OTHER)
    pair.a.step()
    scheduler = pair.a.scheduler
    assert scheduler.prefill_capacity_bound, "by itself vLLM would go on with prompts"
    request = scheduler.requests["long"]
    await settled(pair)
    before, tokens = request.num_computed_tokens, len(pair.outputs["first"].tokens)
    gate.grants = [DECODES] * 4
    for _ in range(4):
        pair.a.step()
    await pair.settle()
    assert request.num_computed_tokens == before
    assert scheduler.requests["waits"].num_computed_tokens == 0
    assert len(pair.outputs["first"].tokens) == tokens + 4
    gate.alone = True
    assert_same(await pair.finish("long"), unmoved)


async def test_where_nothing_decodes_prompts_are_held(gated: tuple[Pair, LocalUnit]) -> None:
    pair, _ = gated
    gate = Scripted(DECODES, DECODES, limit_s=0.05)
    pair.a.share(gate)
    pair.submit(pair.a, "one", PROMPT, max_tokens=2)
    pair.a.take_calls()
    began = time.monotonic()
    pair.a.step()  # both grants are of no use
    assert time.monotonic() - began >= 0.05
    assert gate.ended == 2
    phase = pair.a.core.phase
    assert isinstance(phase, StepPhase)
    assert phase.entrance.unanswered == 1
    gate.alone = True
    await pair.finish("one")


async def test_a_grant_that_comes_as_the_last_other_one_leaves_is_given_back(
    gated: tuple[Pair, LocalUnit],
) -> None:
    pair, _ = gated

    class Last(Scripted):
        def answer(self) -> StepGrant | None:
            self.alone = True
            return super().answer()

    gate = Last(EVERYTHING)
    pair.a.share(gate)
    pair.submit(pair.a, "one", PROMPT, max_tokens=2)
    pair.a.step()
    assert gate.ended == 1
    await pair.finish("one")


async def test_an_arrival_by_migration_in_its_prefill_waits_for_prompts_to_be_allowed(
    gated: tuple[Pair, LocalUnit],
) -> None:
    pair, _ = gated
    unmoved = await pair.unmoved(LONG)
    await pair.run(pair.b, "there", PROMPT, until=1)
    pair.submit(pair.a, "moved", LONG)
    pair.a.step()
    pair.a.step()
    await pair.move(pair.a, pair.b, "moved", steps=0)
    gate = Scripted(DECODES, DECODES)
    pair.b.share(gate)
    request = pair.b.scheduler.requests["moved"]
    before = request.num_computed_tokens
    for _ in range(2):
        pair.b.step()
    assert 0 < before == request.num_computed_tokens
    gate.alone = True
    assert_same(await pair.finish("moved"), unmoved)


async def test_an_arrival_that_decodes_goes_on_behind_a_head_that_is_held(
    gated: tuple[Pair, LocalUnit],
) -> None:
    pair, _ = gated
    unmoved = await pair.unmoved(PROMPT)
    await pair.run(pair.a, "moved", PROMPT, until=10)
    pair.submit(pair.b, "head", OTHER, max_tokens=2)
    pair.b.take_calls()
    await pair.move(pair.a, pair.b, "moved", steps=0)
    gate = Scripted(*[DECODES] * 100)
    pair.b.share(gate)
    assert_same(await pair.finish("moved"), unmoved)
    assert pair.b.scheduler.requests["head"].num_computed_tokens == 0
    gate.alone = True
    await pair.finish("head")


async def test_a_grant_of_few_tokens_makes_small_chunks_and_starves_no_decode(
    gated: tuple[Pair, LocalUnit],
) -> None:
    pair, _ = gated
    unmoved = await pair.unmoved(FAR)
    for number in range(2):
        await pair.run(pair.a, f"there {number}", PROMPT, until=1)
    few, one = (StepGrant(prompts=True, decodes=True, tokens=most) for most in (34, 1))
    gate = Scripted(few, few, one, one)
    pair.a.share(gate)
    pair.submit(pair.a, "long", FAR)
    await settled(pair)
    before = [len(pair.outputs[f"there {number}"].tokens) for number in range(2)]
    for _ in range(4):
        pair.a.step()
    await pair.settle()
    assert pair.a.scheduler.requests["long"].num_computed_tokens == 2 * 32 + 2
    after = [len(pair.outputs[f"there {number}"].tokens) for number in range(2)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [4, 4]
    gate.alone = True
    assert (await pair.finish("long")).tokens == unmoved.tokens


class Threaded:
    """An engine of the pair on a thread of its own, as a llumlet runs it."""

    def __init__(self, side: Side) -> None:
        self.core, self.stopped = side.core, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        core = self.core
        while not self.stopped.is_set():
            core._process_input_queue()
            if core.has_work():
                core._process_engine_step()
            else:
                time.sleep(0.001)

    def processor_s(self) -> float:
        """Of its thread: those that other tests have left in this process compute, too."""
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def stop(self) -> None:
        self.stopped.set()
        self.core.wake()
        self._thread.join(30)
        assert not self._thread.is_alive()


async def test_a_held_engine_still_takes_requests_aborts_and_calls_and_doesnt_spin(
    gated: tuple[Pair, LocalUnit],
) -> None:
    pair, unit = gated
    await pair.run(pair.a, "one", PROMPT, until=5)
    await settled(pair)
    blocker = unit.join("blocker", ALL)
    share(unit, pair, limit_s=60.0)
    blocker.request_step(StepRequest(prompt_tokens=10, decodes=0, oldest_prompt=1.0))
    assert blocker.answer() is not None
    held = Threaded(pair.a)
    try:
        core = pair.a.core
        before, cpu = len(pair.outputs["one"].tokens), held.processor_s()
        await asyncio.sleep(0.5)
        assert held.processor_s() - cpu < 0.1, "it spins"
        assert core.call(lambda: 7).result(1.0) == 7
        export = await pair.a.engine.export("one")
        assert export.num_tokens == len(PROMPT) + before
        await pair.a.engine.resume("one")
        pair.a.engine.abort(["one"])
        assert core.call(lambda: "one" in pair.a.scheduler.requests).result(1.0) is False
        await pair.settle()
        assert len(pair.outputs["one"].tokens) == before
    finally:
        unit.leave("blocker")
        held.stop()


async def test_a_gate_that_never_answers_stops_nobody(gated: tuple[Pair, LocalUnit]) -> None:
    pair, unit = gated
    unmoved = await pair.unmoved(PROMPT)
    share(unit, pair, limit_s=0.2)
    unit.silent = True
    began = time.monotonic()
    assert_same(await pair.there_and_back(PROMPT), unmoved)
    phase = pair.a.core.phase
    assert isinstance(phase, StepPhase)
    assert phase.entrance.unanswered > 10
    assert time.monotonic() - began < 5.0


async def test_an_engine_without_room_for_who_waits_hardly_looks(
    gated: tuple[Pair, LocalUnit],
) -> None:
    pair, unit = gated
    share(unit, pair)
    pool = pair.a.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks())  # all are lent
    pair.submit(pair.a, "one", PROMPT, max_tokens=3)
    held = Threaded(pair.a)
    try:
        await asyncio.sleep(0.1)
        before = pair.a.scheduler.current_step
        await asyncio.sleep(0.5)
        steps = pair.a.scheduler.current_step - before
        pair.a.core.call(lambda: pool.free_blocks(taken)).result(1.0)
        patience = time.monotonic() + 5
        while "one" not in pair.outputs or pair.outputs["one"].finish_reason is None:
            assert time.monotonic() < patience
            await pair.settle()
            await asyncio.sleep(0.005)
    finally:
        held.stop()
    assert 1 <= steps <= 25, "by itself vLLM looks every millisecond"
