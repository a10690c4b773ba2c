"""Sessions of a drain give way to requests: one at a time, and none while a request moves."""

from __future__ import annotations

import asyncio

import pytest

from kvmig.controlplane.session_turns import SessionTurns
from kvmig.core.errors import MigrationRefused
from tests.support.waiting import PATIENCE_S

QUIET_S = 0.01


async def hold(turns: SessionTurns, name: str, order: list[str], release: asyncio.Event) -> None:
    async with turns.session_moves(name, PATIENCE_S):
        order.append(name)
        await release.wait()
        order.append(f"end of {name}")


async def turn_of(order: list[str], name: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while name not in order:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_one_session_goes_after_the_other() -> None:
    turns, order, release = SessionTurns(lambda _: None, QUIET_S), list[str](), asyncio.Event()
    both = [asyncio.create_task(hold(turns, name, order, release)) for name in "ab"]
    await turn_of(order, "a")
    release.set()
    await asyncio.gather(*both)
    assert order == ["a", "end of a", "b", "end of b"]


async def test_no_session_goes_while_a_request_moves() -> None:
    turns = SessionTurns(lambda _: None, QUIET_S)
    with turns.request_moves(), pytest.raises(MigrationRefused, match="busy"):
        async with turns.session_moves("a", 0.05):
            raise AssertionError("it went")
    async with turns.session_moves("a", PATIENCE_S):
        turns.check_turn()


async def test_a_session_on_its_way_is_given_up_for_a_request() -> None:
    given_up: list[str] = []
    turns = SessionTurns(given_up.append, QUIET_S)
    async with turns.session_moves("a", PATIENCE_S):
        with turns.request_moves():
            assert given_up == ["a"]
            with pytest.raises(MigrationRefused, match="busy"):
                turns.check_turn()
    with turns.request_moves():
        assert given_up == ["a"], "nothing was on its way"


async def test_a_session_that_stops_waiting_holds_no_turn() -> None:
    turns = SessionTurns(lambda _: None, QUIET_S)
    with turns.request_moves():
        waiting = asyncio.create_task(turns.session_moves("a", PATIENCE_S).__aenter__())
        await asyncio.sleep(0.02)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    async with turns.session_moves("b", PATIENCE_S):
        pass
