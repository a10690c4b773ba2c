"""What bench.rollout_gap makes of the streams that it saw."""

from __future__ import annotations

from typing import cast

import pytest

from bench.arrivals import Arrival
from bench.client import Stream
from bench.rollout_gap import CallSample, StreamSample, sample, summarise


class Arrived:
    """A stream whose tokens came at these times."""

    def __init__(self, *times: float) -> None:
        self.arrivals = [Arrival(at, number, 1) for number, at in enumerate(times)]


def test_a_stream_is_measured_in_the_window_and_before_it() -> None:
    stream = cast("Stream", Arrived(10.0, 10.1, 10.3, 10.4, 11.0, 11.1))
    seen = sample(0, "drain", stream, 10.45, 11.2)
    assert seen.inter_token_ms == pytest.approx(100)
    assert seen.longest_before_ms == pytest.approx(600)  # it reaches into the window
    assert seen.longest_ms == pytest.approx(600)
    assert seen.window_ms == pytest.approx(750)


def test_the_headline_is_the_longest_of_all_in_a_rollout_over_that_in_a_drain() -> None:
    drained = [StreamSample(0, "drain", 700, 20, 60, longest) for longest in (100.0, 125.0)]
    rolled = [
        StreamSample(0, "rollout", 1300, 20, 60, longest, 900, longest, 80.0)
        for longest in (100.0, 150.0)
    ]
    summary = summarise(
        [*drained, *rolled, CallSample(0, "call", 12.0), CallSample(0, "call", 30.0)]
    )
    assert summary["rollout_over_drain"] == pytest.approx(1.2)
    assert (summary["drain_longest_ms"], summary["drain_longest_of_all_ms"]) == (112.5, 125.0)
    assert summary["rollout_longest_starting_of_all_ms"] == 150.0
    assert summary["rollout_longest_gathering_of_all_ms"] == 80.0
    assert (summary["calls"], summary["ttft_ms"], summary["ttft_of_all_ms"]) == (2, 21.0, 30.0)
