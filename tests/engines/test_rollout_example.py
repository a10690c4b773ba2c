"""A trainer's rounds by examples/rollout.py: on toys, and on two real engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

import kvmig
from examples.rollout import RolloutRounds, pack_tail
from kvmig.core.errors import ConfigError, NotParked, WeightsInUse
from kvmig.engines.toy.engine import ToyEngine
from kvmig.engines.toy.script import ScriptFile, ToyScript
from tests.support import count_down
from tests.support.environment import environment
from tests.support.vllm_side import ENVIRONMENT
from tests.support.waiting import until

PROMPT = b"Count: 0017 0018"
SEATS = 8
FLAGS = (
    "--enforce-eager", "--block-size=32", "--max-model-len=1216", "--max-num-seqs=8",
    "--max-num-batched-tokens=128", "--num-gpu-blocks-override=64", "--dtype=float32",
)  # fmt: skip
LENGTHS = [400, 300, 8, 11, 5, 4, 6, 5, 7, 5]
"""The longest two begin at different engines."""


def script(folder: Path, counts_by: int) -> Path:
    path = folder / f"by-{counts_by}"
    ScriptFile(str(path)).write(ToyScript(counts_by=counts_by))
    return path


def counted(by: int, length: int, after: int = 18) -> bytes:
    numbers = b"".join(b" %04d" % ((after + by * step) % 10_000) for step in range(1, length))
    return numbers[:length]


@pytest.fixture
async def toys() -> AsyncIterator[tuple[RolloutRounds, list[str]]]:
    free: list[str] = []
    engines = {name: ToyEngine(max_running=SEATS) for name in "abcd"}
    async with RolloutRounds(engines, SEATS, free.append) as rounds:
        yield rounds, free


def test_the_engine_with_the_fewest_answers_is_emptied_into_the_fullest_others() -> None:
    left = {"a": ["1", "2"], "b": ["3"], "c": ["4", "5", "6"], "d": []}
    assert pack_tail(left, 4) == [("3", "b", "c")]
    assert pack_tail({"a": ["1", "2"], "b": ["3", "4", "5"], "c": ["6", "7", "8"]}, 4) == [
        ("1", "a", "c"), ("2", "a", "b"),
    ]  # fmt: skip


@pytest.mark.parametrize("left", [
    {"a": ["1", "2"], "b": ["3", "4"]}, {"a": ["1"], "b": []}, {"a": [], "b": []},
])  # fmt: skip
def test_nothing_moves_where_no_engine_can_be_left_empty(left: dict[str, list[str]]) -> None:
    assert pack_tail(left, 3) == []


async def test_a_rounds_tail_moves_onto_one_engine_and_the_others_are_handed_back(
    tmp_path: Path, toys: tuple[RolloutRounds, list[str]]
) -> None:
    rounds, free = toys
    identity = await rounds.load_weights(script(tmp_path, 3))
    answers = await rounds.answer([(PROMPT, length) for length in LENGTHS])

    assert [bytes(one.tokens) for one in answers] == [counted(3, length) for length in LENGTHS]
    assert all(one.weights == {identity} for one in answers)
    assert answers[0].engines[-1] == answers[1].engines[-1], "the longest two end side by side"
    assert any(len(one.engines) > 1 for one in answers)
    assert sorted(free) == ["a", "b", "c", "d"]
    assert free[-1] == answers[0].engines[-1]


async def test_each_round_answers_by_the_weights_that_were_loaded_before_it(
    tmp_path: Path, toys: tuple[RolloutRounds, list[str]]
) -> None:
    rounds, _ = toys
    seen = []
    for by in (1, 2):
        identity = await rounds.load_weights(script(tmp_path, by))
        answers = await rounds.answer([(PROMPT, 40)] * 6)
        assert {bytes(one.tokens) for one in answers} == {counted(by, 40)}
        assert all(one.weights == {identity} for one in answers)
        seen.append(identity)
    assert len(set(seen)) == 2


async def test_a_toy_with_a_request_keeps_its_weights(tmp_path: Path) -> None:
    engine = ToyEngine()
    engine.connect(lambda *out: None, lambda *done: None, lambda error: None)
    before = engine.layout
    engine.submit(1, "r", engine.encode_request(PROMPT, 400))
    with pytest.raises(WeightsInUse, match="it has requests"):
        await engine.load_weights(script(tmp_path, 2))
    assert engine.layout is before
    engine.abort(["r"])
    assert await engine.load_weights(script(tmp_path, 2)) == "counts-by-2"
    await engine.close(5.0)


class HeldScatter:
    """A toy's copies into its cache, of which the first one waits for `free`."""

    def __init__(self, engine: ToyEngine) -> None:
        self.began, self.free = asyncio.Event(), asyncio.Event()
        self._scatter, engine.scatter = engine.scatter, self.scatter

    async def scatter(
        self, block_ids: Sequence[int], data: memoryview, urgent: bool = False
    ) -> list[int]:
        self.began.set()
        await self.free.wait()
        return await self._scatter(block_ids, data, urgent)


async def test_what_a_given_up_move_holds_is_waited_for_before_a_toy_forgets_its_cache(
    tmp_path: Path,
) -> None:
    engines = {name: ToyEngine() for name in "ab"}
    source, destination = engines.values()
    held = HeldScatter(destination)
    async with kvmig.Migrator(engines) as migrator:
        for name, one in engines.items():
            one.connect(
                migrator.tap(name, lambda *out: None), lambda *done: None, lambda error: None
            )
        source.submit(1, "r", source.encode_request(PROMPT, 400))
        await until(lambda: source.load().running)
        moving = asyncio.create_task(migrator.migrate("r", "a", "b"))
        await held.began.wait()
        migrator.cancel("r")
        source.abort(["r"])
        assert (await moving).state == "aborted"

        with pytest.raises(NotParked, match="it has requests"):
            await destination.park()
        loading = asyncio.create_task(destination.load_weights(script(tmp_path, 2)))
        await asyncio.sleep(0.05)
        assert not loading.done()
        held.free.set()
        assert await loading == "counts-by-2"
        await destination.park()
    await asyncio.gather(*(one.close(5.0) for one in engines.values()))


async def test_weights_that_are_not_there_are_refused_by_name(tmp_path: Path) -> None:
    engine = ToyEngine()
    with pytest.raises(ConfigError, match=r"source is '.*none', must be a file"):
        await engine.load_weights(tmp_path / "none")
    (tmp_path / "broken").write_text("{")
    with pytest.raises(ConfigError, match=r"source is '.*broken', must be a script"):
        await engine.load_weights(tmp_path / "broken")
    assert engine.layout.weights == "counts-by-1"
    await engine.close(5.0)


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.filterwarnings(  # vLLM looks at all that torch defines
    r"ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning"
)
async def test_two_real_engines_answer_each_round_by_its_weights_and_move_its_tail(
    tmp_path: Path,
) -> None:
    from kvmig.engines.vllm import factory
    from kvmig.models import BUNDLED

    down = count_down.make(tmp_path / "down")
    with environment(ENVIRONMENT):
        engines = {name: factory(str(BUNDLED), *FLAGS) for name in "ab"}
    started = {engine.layout.weights for engine in engines.values()}
    free: list[str] = []
    lengths = (300, 200, 10, 12)
    async with RolloutRounds(engines, SEATS, free.append) as rounds:
        identities = []
        for source, by, prompt, after in (
            (down, -1, b"Count: 0118 0117", 117), (BUNDLED, 1, PROMPT, 18),
        ):  # fmt: skip
            identities.append(await rounds.load_weights(source))
            answers = await rounds.answer([(prompt, length) for length in lengths])
            assert all(one.weights == {identities[-1]} for one in answers)
            assert any(len(one.engines) > 1 for one in answers), rounds.reports
            for one, length in zip(answers, lengths, strict=True):
                assert bytes(one.tokens) == counted(by, length, after)
        assert sorted(free[:2]) == sorted(free[2:]) == ["a", "b"]
        assert identities[1] in started, "equal checkpoints have one identity"
        assert identities[0] not in started

        running = asyncio.create_task(rounds.answer([(PROMPT, 300)]))
        await until(lambda: engines["a"].load().running)
        with pytest.raises(WeightsInUse, match="it has requests"):
            await engines["a"].load_weights(down)
        (answer,) = await running
        assert answer.weights == {identities[1]}
        with pytest.raises(ConfigError, match="must be a folder"):
            await engines["a"].load_weights(tmp_path / "none")
