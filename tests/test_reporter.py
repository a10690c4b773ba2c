"""When a llumlet reports, and what it says of itself."""

from __future__ import annotations

from kvmig.controlplane.reporter import Reporter
from kvmig.engines.base import EngineLoad

ONE = EngineLoad(100, 10, 1, 0, 0, 0)
TWO = EngineLoad(100, 10, 2, 0, 0, 0)
GROWN = EngineLoad(100, 11, 2, 0, 0, 0)


def test_it_reports_when_it_is_time_and_when_there_is_news() -> None:
    reporter = Reporter(50, 60, 0.0)
    assert reporter.due(1.0, "serving", ONE, 0, 0)
    assert not reporter.due(1.01, "serving", ONE, 0, 0)
    assert reporter.due(1.02, "serving", TWO, 0, 0)
    assert not reporter.due(1.03, "serving", GROWN, 0, 0)
    assert reporter.due(1.04, "serving", GROWN, 1, 0)
    assert reporter.due(1.05, "hung", GROWN, 1, 0)
    assert reporter.due(1.11, "hung", GROWN, 1, 0)
    assert reporter.seq == 5


def test_it_is_in_the_wanted_state_unless_it_ails() -> None:
    reporter = Reporter(50, 1.0, 0.0)
    reporter.wanted = "draining"
    said = [reporter.state(look / 10, look / 10, failed=False) for look in range(1, 31)]
    assert sorted(set(said), key=said.index) == ["draining", "hung", "failed"]
    assert reporter.state(3.1, 0.0, failed=False) == "draining"
    assert reporter.state(3.2, 0.0, failed=True) == "failed"
