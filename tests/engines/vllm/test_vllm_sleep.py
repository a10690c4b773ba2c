"""A real engine that sleeps as on a GPU, with a stand-in for what vLLM does to the GPU's memory."""

from __future__ import annotations

import asyncio

import pytest
from vllm.v1.serial_utils import MsgpackEncoder

from kvmig.core.errors import MigrationRefused, NotParked
from tests.engines.vllm.test_vllm_park import stepped
from tests.support.sleeping_worker import (
    SleepingWorker,
    count_as_sleeper,
    keep_probe,
    probe_by,
)
from tests.support.vllm_pair import PROMPT, Pair
from tests.support.vllm_side import Side

pytestmark = pytest.mark.engine


@pytest.fixture
async def side(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Side:
    """Warm, without a sleep mode so far."""
    keep_probe(monkeypatch, pair.a)
    await stepped(pair.a, pair.a.engine.warm_up())
    pair.begin()
    return pair.a


@pytest.fixture
def sleeper(side: Side, monkeypatch: pytest.MonkeyPatch) -> SleepingWorker:
    return count_as_sleeper(monkeypatch, side)


async def test_an_engine_that_slept_answers_as_before(
    pair: Pair, side: Side, sleeper: SleepingWorker
) -> None:
    await pair.run(side, "before", PROMPT, until=1)
    before = await pair.finish("before")

    await stepped(side, side.engine.park())
    assert sleeper.levels == [1], "level 2 would drop the weights"
    assert side.core.model_executor.is_sleeping
    await stepped(side, side.engine.unpark())

    await pair.run(side, "after", PROMPT, until=1)
    after = await pair.finish("after")
    assert (after.tokens, after.logprobs) == (before.tokens, before.logprobs)


async def test_one_that_wakes_with_another_weight_does_not_serve(
    side: Side, sleeper: SleepingWorker
) -> None:
    right = sleeper.first_weight.clone()
    sleeper.broken = lambda weight: weight.mul_(1.01)
    await stepped(side, side.engine.park())
    with pytest.raises(NotParked, match=r"it computes [0-9a-f]{12} where it computed"):
        await stepped(side, side.engine.unpark())
    sleeper.first_weight.copy_(right)
    side.core.reset_prefix_cache()
    await stepped(side, side.engine.unpark())


async def test_nothing_moves_to_one_that_sleeps(
    pair: Pair, side: Side, sleeper: SleepingWorker
) -> None:
    await pair.run(pair.b, "moves", PROMPT, until=4)
    export = await pair.done(pair.b.engine.export("moves"))
    await stepped(side, side.engine.park())
    with pytest.raises(MigrationRefused, match="the engine is paused"):
        await pair.done(side.engine.reserve(export))
    await pair.done(pair.b.engine.resume("moves"))
    await stepped(side, side.engine.unpark())
    await pair.finish("moves")


async def test_a_request_that_comes_meanwhile_waits_until_it_is_awake(
    pair: Pair, side: Side, sleeper: SleepingWorker
) -> None:
    await pair.run(side, "before", PROMPT, until=1)
    before = await pair.finish("before")
    await stepped(side, side.engine.park())
    pair.submit(side, "early", PROMPT)
    pair.submit(side, "unwanted", PROMPT)
    side.engine.abort(["unwanted"])
    for _ in range(5):
        side.step()
        await asyncio.sleep(0)
    assert "early" not in pair.outputs
    assert not side.scheduler.has_requests()

    await stepped(side, side.engine.unpark())
    early = await pair.finish("early")
    assert early.tokens == before.tokens
    assert "unwanted" not in pair.outputs


async def test_one_with_a_request_does_not_sleep(
    pair: Pair, side: Side, sleeper: SleepingWorker
) -> None:
    await pair.run(side, "runs", PROMPT, until=8)
    with pytest.raises(NotParked, match="has requests"):
        await stepped(side, side.engine.park())
    assert sleeper.levels == []
    await pair.finish("runs")


async def test_clients_calls_do_not_put_it_to_sleep(side: Side, sleeper: SleepingWorker) -> None:
    encode = MsgpackEncoder().encode
    for method, args in (("sleep", (1,)), ("wake_up", ()), ("release_kv_cache_memory", ())):
        with pytest.raises(NotParked, match=f"{method} is the server's to call"):
            side.engine.call(1, 1, method, list(encode(args)))
    side.engine.call(1, 1, "is_sleeping", list(encode(())))
    side.take_calls()
    assert sleeper.levels == []


async def test_one_whose_kernels_round_otherwise_each_time_is_not_parked(
    side: Side, sleeper: SleepingWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = side.core.vllm_config.device_config
    monkeypatch.setattr(config, "device_type", "cuda")
    numerics = side.engine.numerics
    await stepped(side, side.engine.warm_up())
    await stepped(side, side.engine.park())
    await stepped(side, side.engine.unpark())
    assert side.engine.numerics == numerics, "a GPU's probe makes no numerics class"

    probe_by(monkeypatch, side, iter("ab"))
    await stepped(side, side.engine.warm_up())
    with pytest.raises(NotParked, match="nothing shows"):
        await stepped(side, side.engine.park())


async def test_a_gpu_without_sleep_mode_is_named(
    side: Side, sleeper: SleepingWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side.core.vllm_config.model_config, "enable_sleep_mode", False)
    with pytest.raises(NotParked, match="without --enable-sleep-mode"):
        await stepped(side, side.engine.park())
