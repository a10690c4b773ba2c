"""Decode steps of a real engine are timed before it serves, once for a model on a machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvmig.engines.base import StepTime
from tests.support.vllm_pair import Engines
from tests.support.vllm_side import Configuration, Side

pytestmark = pytest.mark.engine

PATIENT_S = 120.0


@pytest.fixture
def engine(engines: Engines) -> Side:
    return engines.side(Configuration())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def break_file(cache: Path) -> None:
    (file,) = cache.rglob("*.json")
    file.write_bytes(b"[")


async def timed(side: Side, limit_s: float = PATIENT_S) -> list[StepTime]:
    """Its step times, while it is stepped."""
    side.listen({})
    measuring = asyncio.create_task(side.engine.step_times(limit_s))
    async with asyncio.timeout(PATIENT_S):
        while not measuring.done():
            side.step()
            await asyncio.sleep(0)
    times = await measuring
    side.step()
    assert side.used_blocks == 0
    assert not side.scheduler.requests
    assert not side.incoming.submitted
    return times


def test_batches_double_until_the_cache_is_filled() -> None:
    from kvmig.engines.vllm.warmup import sizes

    assert sizes(20_000, 16, 8192) == ([1, 2, 4, 8, 11], 1250)
    assert sizes(13_616, 256, 4096) == ([1, 2, 4, 8, 16], 512)
    assert sizes(1000, 1, 4096) == ([1], 250)
    assert sizes(64, 4, 4096) == ([1], 16)


async def test_each_size_is_timed_and_nothing_is_left_in_the_engine(engine: Side) -> None:
    times = await timed(engine)
    assert [one.tokens for one in times] == sorted({one.tokens for one in times})
    assert len(times) == 2
    assert times[-1].tokens < 40 * 32
    assert all(one.ms > 0 for one in times)


async def test_the_second_time_they_are_read_and_a_broken_file_is_measured_anew(
    engine: Side, cache: Path
) -> None:
    times = await timed(engine)
    assert await engine.engine.step_times(0.0) == times
    break_file(cache)
    again = await timed(engine)
    assert len(again) == len(times)
    assert again != times


async def test_after_the_limit_it_goes_on_with_what_it_has(engine: Side) -> None:
    assert await timed(engine, 0.0) == []
