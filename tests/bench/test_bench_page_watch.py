"""What bench.page_watch calls the cost of a page."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bench import page_watch
from bench.page_watch import Leg, running, summarise


def leg(pages: int, server: float, front_end: float = 9.0) -> Leg:
    return Leg(pages, 1000, server, 3.0, 1.5, front_end, 15.0, 2.0, 7000.0 if pages else 0.0)


def test_the_cost_of_a_page_is_what_it_adds_to_none() -> None:
    legs = [leg(0, 4.0), leg(1, 5.0, 11.0), leg(10, 9.0), leg(0, 4.5)]
    assert summarise(legs) == {
        "server_percent": 1.0, "front_end_percent": 2.0, "server_percent_each_of_several": 0.5,
        "server_percent_closed": 0.5, "kb_per_s": 7.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "seconds"), [([], 20.0), (["--quick"], 8.0), (["--quick", "--seconds=2"], 2.0)]
)
def test_a_quick_run_has_short_legs_unless_their_length_is_given(
    flags: list[str], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    async def run(options: Any) -> list[Leg]:
        seen.append(options.seconds)
        return [leg(0, 4.0), leg(1, 5.0), leg(10, 9.0), leg(0, 4.0)]

    monkeypatch.setattr(page_watch, "run", run)
    assert page_watch.main([*flags, "--check"]) == 0
    assert seen == [seconds]


async def test_an_error_of_a_stream_is_raised_at_the_end_of_its_leg() -> None:
    async def breaks() -> None:
        raise ConnectionError("the proxy has gone")

    with pytest.raises(ConnectionError, match="the proxy has gone"):
        async with running(breaks()):
            await asyncio.sleep(0)
