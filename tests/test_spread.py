"""A pause that is spread over the tokens before it: the arithmetic of both ends, and the source."""

from __future__ import annotations

import asyncio
import time
from math import nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.engines.base import Cadence
from kvmig.gateway.streams import MOST_S, Ramp
from kvmig.kvtransfer.measured import MeasuredPause, PauseTime
from kvmig.kvtransfer.messages import Reserve
from kvmig.kvtransfer.pause import MOST_STEPS, Spread, spread
from tests.fake_cluster import cluster, until
from tests.fake_engine import FakeEngine

PAUSES = st.floats(0.01, 1e4)


def test_a_pause_takes_as_many_steps_as_it_has_stretches() -> None:
    assert spread(5.0, 20.0, 0.1) == Spread(5.0, 2.0, 3)


def test_an_engine_without_steps_and_a_share_of_nothing_spread_nothing() -> None:
    assert spread(5.0, 0.0, 0.1) is None
    assert spread(5.0, 20.0, 0.0) is None
    assert spread(0.0, 20.0, 0.1) is None


@given(PAUSES, st.floats(0.1, 1e3), st.floats(0.01, 1.0))
def test_the_last_token_before_the_pause_is_as_late_as_was_foretold(
    pause_ms: float, step_ms: float, share: float
) -> None:
    found = spread(pause_ms, step_ms, share)
    assert found is not None
    assert 1 <= found.steps <= MOST_STEPS
    assert found.pause_ms <= pause_ms
    ramp = Ramp(found.pause_ms / 1e3, found.stretch_ms / 1e3)
    assert ramp.delay_s(found.steps) == pytest.approx(min(MOST_S, found.pause_ms / 1e3))


@given(PAUSES, st.floats(0.01, 1e3), st.integers(1, 100))
def test_no_token_is_held_longer_than_the_pause_nor_stretched_by_more_than_was_said(
    pause_ms: float, stretch_ms: float, number: int
) -> None:
    ramp = Ramp(pause_ms / 1e3, stretch_ms / 1e3)
    delay, following = ramp.delay_s(number), ramp.delay_s(number + 1)
    assert 0.0 <= delay <= following <= min(MOST_S, pause_ms / 1e3)
    assert following - delay <= stretch_ms / 1e3 + 1e-9


def test_nonsense_holds_nothing_for_long() -> None:
    assert Ramp(-1.0, 1.0).delay_s(1) == 0.0
    assert 0.0 <= Ramp(nan, nan).delay_s(1) <= MOST_S


def test_a_pause_is_foretold_by_those_before_it() -> None:
    pause = PauseTime()
    for _ in range(50):
        pause.observe(True, MeasuredPause(1.0, 10.0, 5.0, first_token_ms=11.0), step_ms=10.0)
        pause.observe(False, MeasuredPause(0.0, 4.0, 2.0, first_token_ms=10.0), step_ms=10.0)
    assert pause.expected_ms(True) == pytest.approx(1.0 + 2.0 + 5.0 + 1.0, rel=0.01)
    assert pause.expected_ms(False) == pytest.approx(1.0 + 2.0, rel=0.01)


def test_a_first_step_that_is_quicker_than_a_usual_one_foretells_no_pause() -> None:
    pause = PauseTime()
    for _ in range(50):
        pause.observe(True, MeasuredPause(0.0, 2.0, 1.0, first_token_ms=5.0), step_ms=20.0)
    assert pause.expected_ms(True) == pytest.approx(0.0, abs=0.01)


async def test_the_request_decodes_on_for_as_long_as_its_pause_is_spread() -> None:
    told: list[tuple[str, float, float]] = []

    def foretell(request_id: str, pause_ms: float, stretch_ms: float) -> bool:
        told.append((request_id, pause_ms, stretch_ms))
        return True

    async with cluster(spread=0.5) as them:
        them.a.foretell = foretell
        them.a.engine.now = Cadence(0.0, 100.0)  # 2 ms, by the first guess: one step
        moving = asyncio.create_task(them.move())
        await until(lambda: told)
        since = time.monotonic()
        assert (await moving).state == "committed"
        assert time.monotonic() - since >= 0.1
        assert told == [("r", 2.0, 50.0)]


async def test_a_destination_keeps_its_reservation_however_long_the_pause_is_spread() -> None:
    async with cluster(timeout_ms=1000.0, spread=0.0016) as them:
        them.a.foretell = lambda request_id, pause_ms, stretch_ms: True
        them.a.engine.now = Cadence(0.0, 80.0)  # 2 ms, by the first guess: 16 steps
        assert (await them.move()).state == "committed"
        asked = [message for message in them.b.heard if isinstance(message, Reserve)]
        opening, *again = asked
        assert opening.export is not None
        assert len(again) >= 3


async def test_a_request_is_not_suspended_while_the_destination_prepares_for_it() -> None:
    """Commit would wait behind that, and the client for Commit."""
    preparing, prepared = asyncio.Event(), asyncio.Event()
    prepares = 0

    async def before(method: str) -> None:
        nonlocal prepares
        prepares += method == "prepare"
        if method == "prepare" and prepares == 2:  # the first one answers the stage before
            preparing.set()
            await prepared.wait()

    async with cluster(spread=0.5) as them:
        them.a.foretell = lambda request_id, pause_ms, stretch_ms: True
        them.a.engine.now = Cadence(0.0, 50.0)
        them.b.engine.before = before
        moving = asyncio.create_task(them.move())
        await preparing.wait()
        await asyncio.sleep(0.2)
        assert "suspend" not in them.a.engine.calls
        prepared.set()
        assert ((await moving).state, them.owners()) == ("committed", "b")


async def test_the_pause_of_an_urgent_move_is_not_spread() -> None:
    told: list[str] = []

    def foretell(request_id: str, pause_ms: float, stretch_ms: float) -> bool:
        told.append(request_id)
        return True

    async with cluster(spread=0.5) as them:
        them.a.foretell = foretell
        them.a.engine.now = Cadence(0.0, 100.0)
        assert (await them.move(urgent=True)).state == "committed"
        assert not told


async def test_nobody_waits_where_no_front_end_was_told() -> None:
    async with cluster(spread=0.5) as them:
        them.a.foretell = lambda request_id, pause_ms, stretch_ms: False
        them.a.engine.now = Cadence(0.0, 1000.0)
        assert (await them.move()).state == "committed"


@pytest.mark.parametrize("why", ["no spread", "it does not decode"])
async def test_no_pause_is_foretold_that_is_not_spread_or_that_nobody_feels(why: str) -> None:
    told: list[str] = []

    def foretell(request_id: str, pause_ms: float, stretch_ms: float) -> bool:
        told.append(request_id)
        return True

    source = FakeEngine()
    source.decoding = why == "no spread"
    source.now = Cadence(0.0, 1000.0)
    async with cluster(source=source, spread=0.0 if source.decoding else 0.5) as them:
        them.a.foretell = foretell
        assert (await them.move()).state == "committed"
        assert not told
