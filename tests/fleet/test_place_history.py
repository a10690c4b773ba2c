"""Decisions about places, as long as they are kept."""

from __future__ import annotations

from kvmig.fleet.place_choice import NodeVerdict, PlaceExplanation
from kvmig.fleet.place_history import PlaceHistory


def explanation(rows: int, model: str = "m") -> PlaceExplanation:
    nodes = tuple(NodeVerdict(f"n{at}", chosen=not at) for at in range(rows))
    return PlaceExplanation(model, "spread", 1, 0, 0, nodes)


def test_the_latest_decision_about_an_instance_is_kept() -> None:
    history = PlaceHistory()
    history.keep("d1", "i0", 1.0, explanation(3))
    history.keep("d1", "i0", 2.0, explanation(2))
    found = history.decision("d1", "i0")
    assert found is not None
    assert (found.at, history.rows) == (2.0, 2)
    assert history.decision("d2", "i0") is None, "another deployment has other instances"


def test_rows_are_bounded_and_the_oldest_decisions_go() -> None:
    history = PlaceHistory(rows=10)
    for at in range(100):
        history.keep("d", f"i{at}", float(at), explanation(4))
        assert history.rows <= 10
    assert history.decision("d", "i99") is not None
    assert history.decision("d", "i97") is None
    history.keep("d", "large", 0.0, explanation(50))
    assert (history.rows, history.decision("d", "i99")) == (50, None)
    assert history.decision("d", "large") is not None, "the latest is kept whatever its size"
