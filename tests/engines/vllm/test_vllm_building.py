"""Requests on their way into a vLLM engine: none waits for one that takes long to build."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvmig.core.errors import MigrationRefused
from tests.support.vllm_pair import PROMPT, SEEDED, Pair
from tests.support.vllm_side import Configuration

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def configurations() -> tuple[Configuration, Configuration]:
    return Configuration(), Configuration()


class Slow:
    """A call that begins, and ends when it may."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._began = threading.Event()
        self.may_end = threading.Event()

    def __call__(self, *args: Any) -> Any:
        self._began.set()
        assert self.may_end.wait(20)
        return self._call(*args)

    async def begun(self) -> None:
        assert await asyncio.to_thread(self._began.wait, 10)


def guided() -> dict[str, Any]:
    from vllm.sampling_params import StructuredOutputsParams

    params = StructuredOutputsParams(regex="[0-9]{3}( [0-9]{3}){30}")
    params._backend = "xgrammar"
    return {**SEEDED, "structured_outputs": params}


@pytest.fixture
def slow_grammar(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    manager = pair.b.core.structured_output_manager
    slow = Slow(manager._create_grammar)
    monkeypatch.setattr(manager, "_create_grammar", slow)
    yield slow
    slow.may_end.set()


@pytest.fixture
def slow_draws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    from kvmig.engines.vllm.building import generator_after

    slow = Slow(generator_after)
    monkeypatch.setattr("kvmig.engines.vllm.building.generator_after", slow)
    yield slow
    slow.may_end.set()


async def test_others_enter_while_a_grammar_compiles(pair: Pair, slow_grammar: Slow) -> None:
    whole = await pair.unmoved(PROMPT, **guided())
    pair.submit(pair.b, "slow", PROMPT, again=whole.tokens[:20], **guided())
    await slow_grammar.begun()

    pair.submit(pair.b, "new", PROMPT, max_tokens=2)
    pair.submit(pair.b, "again", PROMPT, again=[50], max_tokens=3)
    await pair.finish("new")
    await pair.finish("again")
    assert "slow" not in pair.outputs

    slow_grammar.may_end.set()
    await pair.b.entered()
    assert (await pair.finish("slow")).tokens == whole.tokens[20:]


async def test_others_enter_and_leave_while_a_generator_is_wound_on(
    pair: Pair, slow_draws: Slow
) -> None:
    whole = await pair.unmoved(PROMPT, **SEEDED)
    await pair.run(pair.b, "running", PROMPT, until=2)
    pair.submit(pair.b, "slow", PROMPT, again=whole.tokens[:20], **SEEDED)
    await slow_draws.begun()

    pair.submit(pair.b, "new", PROMPT, max_tokens=2)
    await pair.finish("new")
    pair.b.engine.abort(["running"])
    pair.b.take_calls()
    assert pair.b.used_blocks == 0
    assert "slow" not in pair.outputs

    slow_draws.may_end.set()
    await pair.b.entered()
    assert (await pair.finish("slow")).tokens == whole.tokens[20:]


async def test_one_that_is_aborted_while_it_is_built_never_runs(
    pair: Pair, slow_draws: Slow
) -> None:
    pair.submit(pair.b, "unwanted", PROMPT, again=[50, 51], **SEEDED)
    await slow_draws.begun()
    pair.b.engine.abort(["unwanted"])
    await pair.b.entered()
    slow_draws.may_end.set()
    await pair.idle()
    assert "unwanted" not in pair.outputs


async def test_a_new_one_that_is_aborted_while_it_is_built_does_not_stay(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(pair.b.core.preprocess_add_request)
    monkeypatch.setattr(pair.b.core, "preprocess_add_request", slow)
    monkeypatch.setattr(pair.b, "wait_for_new", lambda: None)
    pair.submit(pair.b, "unwanted", PROMPT)
    await slow.begun()
    pair.b.engine.abort(["unwanted"])
    slow.may_end.set()
    await pair.b.entered()
    await pair.b.built()
    pair.b.take_calls()
    assert pair.b.scheduler.requests == {}


async def test_a_migration_that_is_given_up_does_not_wait_for_its_grammar(
    pair: Pair, slow_grammar: Slow
) -> None:
    export = await pair.exported("guided", PROMPT, **guided(), until=3)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await pair.b.engine.reserve(export)
    slow_grammar.may_end.set()
    await pair.done(pair.b.engine.cancel("guided"))
    await pair.done(pair.a.engine.resume("guided"))
    await pair.finish("guided")


async def test_one_that_waits_need_not_wait_for_its_grammar_there(
    pair: Pair, slow_grammar: Slow
) -> None:
    unmoved = await pair.unmoved(PROMPT, **guided())
    pair.submit(pair.a, "guided", PROMPT, **guided())
    pair.a.take_calls()
    await pair.move(pair.a, pair.b, "guided", steps=0)

    slow_grammar.may_end.set()
    assert (await pair.finish("guided")).tokens == unmoved.tokens


async def test_a_grammar_that_takes_too_long_is_refused(
    pair: Pair, slow_grammar: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmig.engines.vllm.building.GRAMMAR_TIMEOUT_S", 0.05)
    export = await pair.exported("guided", PROMPT, **guided(), until=3)
    with pytest.raises(MigrationRefused, match="timeout"):
        await pair.b.engine.reserve(export)
    await pair.done(pair.a.engine.resume("guided"))
    await pair.finish("guided")


async def test_one_that_ran_elsewhere_is_told_why_it_ends_where_its_grammar_is_not_compiled_in_time(
    pair: Pair, slow_grammar: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its instance has ended: `retry` is answered with 503 and Retry-After."""
    monkeypatch.setattr("kvmig.engines.vllm.building.GRAMMAR_TIMEOUT_S", 0.05)
    pair.submit(pair.b, "again", PROMPT, again=[50, 51], **guided())
    await pair.b.entered()
    await pair.settle()
    assert str(pair.outputs["again"].finish_reason) == "error"
    assert pair.outputs["again"].stop_reason == (
        "retry: the request's instance has ended, and another one can't go on with it:"
        " its grammar is still compiled after 0.05 s"
    )
    assert pair.b.scheduler.requests == {}
