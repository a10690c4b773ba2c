"""What bench.faults makes of what it saw."""

from __future__ import annotations

from typing import cast

import pytest

from bench.arrivals import Arrival
from bench.client import Stream
from bench.faults import Sample, gap_around, summarise


class Arrived:
    """A stream whose tokens came at these times."""

    def __init__(self, *times: float) -> None:
        self.arrivals = [Arrival(at, number, 1) for number, at in enumerate(times)]


def test_the_gap_is_the_longest_pause_that_ends_after_the_fault() -> None:
    stream = cast("Stream", Arrived(0.0, 5.0, 5.1, 5.2, 7.0, 7.1))
    assert gap_around(stream, at=5.15) == pytest.approx(1.8)
    assert gap_around(stream, at=8.0) == 0.0


def test_faults_are_summed_up_one_kind_at_a_time() -> None:
    samples = [
        Sample("stopped", 1.6, [2.0, 3.0]),
        Sample("stopped", 1.8, [4.0]),
        Sample("killed", 0.1, [0.5]),
    ]
    summary = summarise(samples)
    assert summary["stopped_known_s"] == pytest.approx(1.7)
    assert (summary["stopped_known_s_most"], summary["stopped_gap_s"]) == (1.8, 3.0)
    assert (summary["killed_gap_s"], summary["killed_gap_s_most"]) == (0.5, 0.5)
