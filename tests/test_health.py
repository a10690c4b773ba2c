"""Which instances can be relied on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.gateway.health import Health
from kvmig.ground.config import ClusterConfig, check
from kvmig.ground.errors import ConfigError
from kvmig.ground.faults import FaultConfig

PERIOD_S = 0.2


def ticked(health: Health, start: float, seconds: float) -> float:
    """Let time pass in ticks; the time then."""
    steps = round(seconds / PERIOD_S)
    for step in range(1, steps + 1):
        health.tick(start + step * PERIOD_S)
    return start + steps * PERIOD_S


def test_who_says_nothing_for_long_is_silent_until_it_speaks() -> None:
    health = Health(1.5, PERIOD_S, 100.0)
    health.join("a")
    now = ticked(health, 100.0, 1.4)
    assert health.ailment("a") == ""
    ticked(health, now, 0.2)
    assert health.ailment("a") == "silent"
    assert health.silence_s() == {"a": pytest.approx(1.6)}
    health.heard("a")
    assert health.ailment("a") == ""


@pytest.mark.parametrize("state", ["hung", "failed"])
def test_who_says_that_it_ails_does_until_it_says_otherwise(state: str) -> None:
    health = Health(1.5, PERIOD_S, 0.0)
    health.join("a")
    health.said("a", state)
    assert health.ailment("a") == state
    health.said("a", "draining")
    assert health.ailment("a") == ""


def test_strangers_are_not_listened_to() -> None:
    health = Health(1.5, PERIOD_S, 0.0)
    health.join("a")
    health.leave("a")
    health.leave("a")
    health.heard("a")
    health.said("a", "hung")
    assert "a" not in health
    assert health.silence_s() == {}


def test_one_that_joins_again_starts_anew() -> None:
    health = Health(1.5, PERIOD_S, 0.0)
    health.join("a")
    health.said("a", "failed")
    ticked(health, 0.0, 3.0)
    health.leave("a")
    health.join("a")
    assert health.ailment("a") == ""


@given(st.floats(0, 1000))
def test_time_during_which_nobody_listened_is_no_silence(slept: float) -> None:
    health = Health(1.5, PERIOD_S, 0.0)
    health.join("a")
    health.tick(slept)
    assert health.silence_s()["a"] <= 2 * PERIOD_S


def test_instances_report_before_they_are_taken_for_silent() -> None:
    faults = FaultConfig(silent_after_s=1.5)
    check(ClusterConfig(report_ms=1000.0, faults=faults))
    with pytest.raises(ConfigError, match=r"--silent-after is 1\.5, must be more seconds than"):
        check(ClusterConfig(report_ms=2000.0, faults=faults))
