"""Which instances can be relied on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.core.config import ClusterConfig, FaultConfig, check
from kvmig.core.errors import ConfigError
from kvmig.frontend.instances import InstanceHealth, ListeningClock

PERIOD_S = 0.2
SILENT_S = 1.5


def ticked(listening: ListeningClock, start: float, seconds: float) -> float:
    """Let time pass in ticks; the time then."""
    steps = round(seconds / PERIOD_S)
    for step in range(1, steps + 1):
        listening.tick(start + step * PERIOD_S)
    return start + steps * PERIOD_S


def test_who_says_nothing_for_long_is_silent_until_it_speaks() -> None:
    listening = ListeningClock(PERIOD_S, 100.0)
    health = InstanceHealth(listening)
    now = ticked(listening, 100.0, 1.4)
    assert health.find_ailment(SILENT_S) == ""
    ticked(listening, now, 0.2)
    assert health.find_ailment(SILENT_S) == "silent"
    assert health.silence_s == pytest.approx(1.6)
    health.record_message()
    assert health.find_ailment(SILENT_S) == ""


@pytest.mark.parametrize("state", ["hung", "failed"])
def test_who_says_that_it_ails_does_until_it_says_otherwise(state: str) -> None:
    health = InstanceHealth(ListeningClock(PERIOD_S, 0.0))
    health.state = state
    assert health.find_ailment(SILENT_S) == state
    health.state = "draining"
    assert health.find_ailment(SILENT_S) == ""


@given(st.floats(0, 1000))
def test_time_during_which_nobody_listened_is_no_silence(slept: float) -> None:
    listening = ListeningClock(PERIOD_S, 0.0)
    health = InstanceHealth(listening)
    listening.tick(slept)
    assert health.silence_s <= 2 * PERIOD_S


def test_instances_report_before_they_are_taken_for_silent() -> None:
    faults = FaultConfig(heartbeat_timeout_s=1.5)
    check(ClusterConfig(heartbeat_interval_ms=1000.0, faults=faults))
    with pytest.raises(
        ConfigError, match=r"--heartbeat-timeout is 1\.5, must be more seconds than"
    ):
        check(ClusterConfig(heartbeat_interval_ms=2000.0, faults=faults))
