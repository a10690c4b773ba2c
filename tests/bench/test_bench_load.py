"""`bench.load`: what doesn't need a server."""

from __future__ import annotations

import asyncio
import math

import pytest

from bench.load.latency import delays_s, quantile
from bench.load.orders import Log
from bench.load.pace import Given, Group, Metronome


def test_a_stream_gets_its_first_token_at_once_and_the_others_with_the_ticks() -> None:
    group = Group()
    assert group.begin("a", 1, 3) == Given("a", last=False)
    assert group.tick() == {1: [Given("a", last=False)]}
    assert group.tick() == {1: [Given("a", last=True)]}
    assert group.tick() == {}


def test_a_stream_of_one_token_has_ended_when_it_begins() -> None:
    group = Group()
    assert group.begin("a", 1, 1) == Given("a", last=True)
    assert len(group) == 0


def test_a_stream_whose_client_has_left_gets_nothing_more() -> None:
    group = Group()
    group.begin("a", 1, 9)
    group.begin("b", 2, 9)
    group.end("a")
    group.end("a")
    assert group.tick() == {2: [Given("b", last=False)]}


def test_a_delay_is_from_the_tick_that_made_the_token_to_its_read() -> None:
    log = Log(ticks=[[10.0, 20.0, 30.0, 40.0]], began=[{"cmpl-s1-0-abc": 1}])
    # The first token isn't one of a tick; the second was made at 20, the next two at 30 and 40.
    seen = {"s1": [(0, 1, 12.0), (1, 2, 20.5), (2, 4, 41.0)]}
    assert delays_s(log, seen) == pytest.approx([0.5, 1.0, 11.0])


def test_a_quantile_is_the_nearest_value() -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 3.0
    assert quantile([1.0, 2.0], 0.99) == 2.0
    assert math.isnan(quantile([], 0.5))


async def test_a_metronome_beats_at_its_rate_and_stands_still_at_zero() -> None:
    metronome = Metronome()
    beats: list[int] = []
    enough = asyncio.Event()

    def beat() -> None:
        beats.append(1)
        if len(beats) == 5:
            enough.set()

    beating = asyncio.create_task(metronome.run(0.0, beat))
    await asyncio.sleep(0.01)
    assert beats == []
    metronome.set(1000.0)
    await asyncio.wait_for(enough.wait(), 10)
    metronome.set(0.0)
    await asyncio.sleep(0)
    stood = len(beats)
    await asyncio.sleep(0.02)
    beating.cancel()
    assert len(beats) == stood
