"""bench.loop_holds: its loop, its figures, and its engine behind vLLM's own application."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator

import pytest

from bench.loop_holds import Hold, TimedLoop, measure, summarise
from kvmig.engines.vllm import flags
from tests.support.environment import environment
from tests.support.vllm_side import ENVIRONMENT

pytestmark = pytest.mark.engine


@pytest.fixture
def thawed() -> Iterator[None]:
    """What the front end leaves to no collection of garbage is collected again afterwards."""
    with environment(ENVIRONMENT):
        flags.set_environment()
        yield
    gc.unfreeze()


def test_a_loop_knows_the_processor_time_of_its_longest_turn_and_no_wait() -> None:
    async def work() -> None:
        await asyncio.sleep(0.2)
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass

    with asyncio.Runner(loop_factory=TimedLoop) as runner:
        runner.run(work())
        loop = runner.get_loop()
        assert isinstance(loop, TimedLoop)
        assert 0.02 <= loop.longest_s < 0.2


@pytest.mark.usefixtures("thawed")
def test_a_call_is_answered_by_the_engine_that_is_made_up() -> None:
    with asyncio.Runner(loop_factory=TimedLoop) as runner:
        holds = runner.run(
            measure("count", 1024, ["generate"], [], lambda kind: kind == "logprobs of a stream")
        )
    assert [(one.kind, one.status) for one in holds] == [
        ("an ordinary call", 200), ("logprobs of a stream", 200)
    ]  # fmt: skip
    assert all(one.hold_ms > 0 for one in holds)


def test_the_figures_are_of_the_kind_that_holds_longest() -> None:
    holds = [
        Hold("ordinary", "/v1/completions", 0.001, 200, 0.01, 1.5, 0.2, ""),
        Hold("beams", "/v1/completions", 0.001, 200, 0.4, 21.0, 8.0, ""),
    ]
    assert summarise(holds) == {"kinds": 2, "hold_ms_max": 21.0, "above": 1, "grown_mb_max": 8.0}
