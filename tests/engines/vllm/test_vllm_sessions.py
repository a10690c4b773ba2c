"""Sessions without a request move between real engines: the next turn finds its beginning there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvmig.core.errors import KvmigError, MigrationRefused
from kvmig.engines.base import CameBlocks
from tests.support import tiny_lora
from tests.support.inside import give_memory_back, other_weights
from tests.support.vllm_pair import Engines, Pair, assert_same
from tests.support.vllm_side import BY_PRIORITY, Configuration
from tests.support.vllm_talk import BLOCK, PROMPT, Talk, cached, found, stayed

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

pytestmark = pytest.mark.engine


async def suspend_and_commit(pair: Pair) -> None:
    tail = await pair.done(pair.a.engine.suspend("s", 0))
    await pair.done(pair.b.engine.commit("s", tail))


async def test_turns_after_moves_there_and_back_equal_those_of_a_session_that_stayed(
    pair: Pair,
) -> None:
    alone = await stayed(pair, 3)
    talk = Talk(pair)
    assert_same(await talk.turn(pair.a), alone[0])
    assert await talk.move(pair.a, pair.b) == 0
    whole = talk.whole
    assert (cached(pair.a), cached(pair.b)) == (0, whole // BLOCK)
    second = await talk.turn(pair.b)
    assert_same(second, alone[1])
    assert found(second) == found(alone[1]) == whole
    await talk.move(pair.b, pair.a)
    assert cached(pair.b) == 0
    whole = talk.whole
    third = await talk.turn(pair.a)
    assert_same(third, alone[2])
    assert found(third) == found(alone[2]) == whole


async def test_what_the_destination_has_cached_does_not_travel(pair: Pair) -> None:
    talk = Talk(pair)
    await Talk(pair).turn(pair.b)
    await talk.turn(pair.a)
    assert await talk.move(pair.a, pair.b) == talk.whole // BLOCK
    assert found(await talk.turn(pair.b)) > len(PROMPT)


async def test_what_other_sessions_have_too_stays_cached(pair: Pair) -> None:
    talk = Talk(pair)
    await talk.turn(pair.a)
    await talk.move(pair.a, pair.b, shared_tokens=100)
    assert cached(pair.a) == 3
    assert found(await Talk(pair).turn(pair.a)) == 96


async def test_blocks_that_a_request_uses_meanwhile_stay_cached(pair: Pair) -> None:
    talk = Talk(pair)
    await talk.turn(pair.a)
    await pair.run(pair.a, "other", PROMPT, until=2)
    await talk.move(pair.a, pair.b)
    assert cached(pair.a) == len(PROMPT) // BLOCK
    await pair.finish("other")


async def test_two_tenants_sessions_never_meet(pair: Pair) -> None:
    ours = Talk(pair, salt="ours")
    await ours.turn(pair.a)
    await ours.move(pair.a, pair.b)
    assert found(await Talk(pair, salt="theirs").turn(pair.b)) == 0
    assert found(await Talk(pair).turn(pair.b)) == 0
    assert found(await ours.turn(pair.b)) > 0


async def test_held_blocks_are_not_evicted_and_found_again_when_the_move_is_given_up(
    pair: Pair,
) -> None:
    talk = Talk(pair)
    await talk.turn(pair.a)
    await talk.held(pair.a)
    assert pair.a.used_blocks == talk.whole // BLOCK
    for number in range(3):
        await pair.run(pair.a, f"r{number}", [number + 7] * 700, until=1)
        await pair.finish(f"r{number}")
    await pair.done(pair.a.engine.resume("s"))
    assert pair.a.used_blocks == 0
    whole = talk.whole
    assert found(await talk.turn(pair.a)) == whole


@pytest.mark.parametrize("at", ["reserve", "grow", "copy", "corrupt"])
async def test_a_move_that_is_given_up_frees_all_and_leaves_the_session_where_it_was(
    pair: Pair, at: str
) -> None:
    talk, a, b = Talk(pair), pair.a, pair.b
    await talk.turn(a)
    export = await talk.held(a)
    await pair.done(b.engine.reserve(export))
    assert b.used_blocks == talk.whole // BLOCK
    if at != "reserve":
        blocks = await pair.done(b.engine.grow("s", export.num_tokens))
        if at != "grow":
            await pair.copy(a, b, (await pair.done(a.engine.stage("s", 0))).block_ids, blocks)
        if at == "corrupt":
            tail = await pair.done(a.engine.suspend("s", 1))
            fused = memoryview(bytearray(a.engine.layout.block_bytes))
            with pytest.raises(MigrationRefused, match="came changed"):
                await pair.done(b.engine.commit("s", tail, CameBlocks(1, blocks[1:2], fused, [7])))
    await pair.done(b.engine.cancel("s"))
    await pair.done(a.engine.resume("s"))
    assert (a.used_blocks, b.used_blocks, cached(b)) == (0, 0, 0)
    whole = talk.whole
    assert found(await talk.turn(a)) == whole


async def test_a_session_of_which_nothing_is_cached_any_more_does_not_move(pair: Pair) -> None:
    talk = Talk(pair)
    await talk.turn(pair.a)
    pair.a.scheduler.reset_prefix_cache()
    with pytest.raises(MigrationRefused, match="nothing of it is in the prefix cache"):
        await talk.held(pair.a)


async def test_a_destination_without_room_refuses_it_and_holds_nothing(pair: Pair) -> None:
    talk = Talk(pair)
    await talk.turn(pair.a)
    export = await talk.held(pair.a)
    await pair.run(pair.b, "large", [9] * 1100, until=1)
    before = pair.b.used_blocks
    with pytest.raises(MigrationRefused, match="no room for"):
        await pair.done(pair.b.engine.reserve(export))
    assert pair.b.used_blocks == before
    await pair.done(pair.a.engine.resume("s"))
    await pair.finish("large")


@pytest.mark.parametrize("side", ["source", "destination"])
async def test_weights_that_are_updated_meanwhile_end_the_move(pair: Pair, side: str) -> None:
    talk, a, b = Talk(pair), pair.a, pair.b
    await talk.turn(a)
    export = await talk.held(a)
    await pair.done(b.engine.reserve(export))
    changed = (a if side == "source" else b).engine
    with other_weights(changed), pytest.raises(MigrationRefused, match="weights were updated"):
        await suspend_and_commit(pair)
    await pair.done(b.engine.cancel("s"))
    await pair.done(a.engine.resume("s"))
    assert (a.used_blocks, b.used_blocks, cached(b)) == (0, 0, 0)


async def test_an_engine_that_knows_no_sessions_refuses_one_before_it_holds_anything(
    pair: Pair,
) -> None:
    from msgspec.structs import replace

    talk = Talk(pair)
    await talk.turn(pair.a)
    export = replace(await talk.held(pair.a), idle=False)  # a field that it leaves out
    with pytest.raises(MigrationRefused, match="export of another kind"):
        await pair.done(pair.b.engine.reserve(export))
    await pair.done(pair.a.engine.resume("s"))


async def test_a_park_waits_for_a_sessions_move(pair: Pair) -> None:
    talk = Talk(pair)
    await talk.turn(pair.a)
    await talk.held(pair.a)
    with pytest.raises(KvmigError, match="it has requests"):
        give_memory_back(pair.a.engine)
    await pair.done(pair.a.engine.resume("s"))


async def test_an_engine_without_a_prefix_cache_moves_no_session(engines: Engines) -> None:
    async with engines.lent(BY_PRIORITY, BY_PRIORITY) as pair:
        talk = Talk(pair)
        await talk.turn(pair.a)
        with pytest.raises(MigrationRefused, match="without a prefix cache"):
            await talk.held(pair.a)


LORA = Configuration(
    flags=("--enable-lora", "--max-loras=1", "--max-cpu-loras=4", "--max-lora-rank=8")
)


def adapter(folder: Path, number: int) -> LoRARequest:
    from vllm.lora.request import LoRARequest

    folder.mkdir()
    return LoRARequest(f"adapter {number}", number, str(tiny_lora.make(folder, number)))


@pytest.mark.long
async def test_a_session_with_an_adapter_is_found_under_it_alone(
    engines: Engines, tmp_path: Path
) -> None:
    one, two = adapter(tmp_path / "one", 1), adapter(tmp_path / "two", 2)
    async with engines.lent(LORA, LORA) as pair:
        alone = await stayed(pair, 2, lora=one)
        talk = Talk(pair, lora=one)
        await talk.turn(pair.a)
        await talk.move(pair.a, pair.b)
        assert found(await Talk(pair, lora=two).turn(pair.b)) == 0
        assert found(await Talk(pair).turn(pair.b)) == 0
        second = await talk.turn(pair.b)
        assert_same(second, alone[1])
        assert found(second) == found(alone[1]) > 0
