"""Calls that pause a real engine or clear its caches, while migrations hold blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from vllm.v1.serial_utils import MsgpackEncoder

from kvmig.core.errors import MigrationRefused
from kvmig.engines.vllm import clearing_calls
from tests.support.vllm_pair import PROMPT, Pair
from tests.support.vllm_side import Side
from tests.support.vllm_talk import Talk, cached

pytestmark = pytest.mark.engine

PAUSE = ("pause_scheduler", "keep", True)
SOON = "caches are about to be cleared"


@pytest.fixture
async def running(pair: Pair) -> AsyncIterator[Pair]:
    """Both have a prefix in their caches, and run again in the end."""
    for side in (pair.a, pair.b):
        await pair.run(side, "before", [7] * 64, until=1)
        await pair.finish("before")
        del pair.outputs["before"]
    await pair.idle()
    yield pair
    for side in (pair.a, pair.b):
        side.core.resume_scheduler()
    await pair.idle()


def call(side: Side, method: str, *args: Any) -> None:
    """As a client's, which waits for no answer here."""
    side.engine.call(1, 1, method, list(MsgpackEncoder().encode(args)))


async def pass_time(side: Side) -> None:
    for _ in range(10):
        side.take_calls()
        await asyncio.sleep(0.01)


async def test_a_pause_waits_until_a_request_that_comes_has_given_its_blocks_back(
    running: Pair,
) -> None:
    unmoved = await running.unmoved(PROMPT)
    a, b = running.a, running.b
    export = await running.exported("stays", PROMPT, until=40)
    await running.done(b.engine.reserve(export))
    call(b, *PAUSE)
    await pass_time(b)

    assert not b.core.is_scheduler_paused()
    with pytest.raises(MigrationRefused, match=SOON):
        await running.copy_stage(a, b, "stays", 0)
    with pytest.raises(MigrationRefused, match=SOON):
        await running.done(
            b.engine.scatter([1], memoryview(bytearray(b.engine.layout.block_bytes)))
        )
    await running.done(b.engine.cancel("stays"))
    await pass_time(b)

    assert b.core.is_scheduler_paused()
    assert cached(b) == 0
    with pytest.raises(MigrationRefused, match="the engine is paused"):
        await running.done(b.engine.reserve(export))
    await running.done(a.engine.resume("stays"))
    assert (await running.finish("stays")).tokens == unmoved.tokens


async def test_a_pause_waits_for_the_word_on_a_request_that_is_suspended(running: Pair) -> None:
    unmoved = await running.unmoved(PROMPT)
    a = running.a
    await running.exported("stays", PROMPT, until=5)
    await running.suspend(a, "stays", 0)
    call(a, *PAUSE)
    await pass_time(a)
    assert not a.core.is_scheduler_paused()
    await running.done(a.engine.resume("stays"))
    await pass_time(a)

    assert a.core.is_scheduler_paused()
    assert cached(a) == 0
    a.core.resume_scheduler()
    assert (await running.finish("stays")).tokens == unmoved.tokens


async def test_a_request_that_is_about_to_be_suspended_stays_in_the_batch(running: Pair) -> None:
    a = running.a
    await running.exported("stays", PROMPT, until=5)
    await running.exported("suspended", PROMPT, until=5)
    await running.suspend(a, "suspended", 0)
    call(a, *PAUSE)
    await pass_time(a)
    with pytest.raises(MigrationRefused, match=SOON):
        await running.suspend(a, "stays", 0)
    with pytest.raises(MigrationRefused, match=SOON):
        await running.done(a.engine.export("stays"))
    await running.done(a.engine.resume("suspended"))
    await pass_time(a)
    a.core.resume_scheduler()
    for name in ("stays", "suspended"):
        await running.finish(name)


async def test_a_session_that_moves_is_waited_for_and_the_next_calls_wait_behind_it(
    running: Pair,
) -> None:
    a = running.a
    talk = Talk(running)
    await talk.turn(a)
    await talk.held(a)
    call(a, *PAUSE)
    call(a, "resume_scheduler")
    await pass_time(a)
    assert cached(a)
    await running.done(a.engine.resume("s"))
    await pass_time(a)
    assert not a.core.is_scheduler_paused(), "it was resumed first"
    assert cached(a) == 0


async def test_a_pause_does_not_wait_for_ever(
    running: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clearing_calls, "SETTLE_S", 0.0)
    a, b = running.a, running.b
    await running.done(b.engine.reserve(await running.exported("stays", PROMPT, until=5)))
    call(b, *PAUSE)
    await pass_time(b)
    assert b.core.is_scheduler_paused()
    await running.done(b.engine.cancel("stays"))
    await running.done(a.engine.resume("stays"))
    await running.finish("stays")
