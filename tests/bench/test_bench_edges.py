from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import policies
from bench.edges import WITHIN, edge


@pytest.mark.parametrize("true", [1.0, 3.3, 7.0])
def test_the_edge_is_the_lowest_rate_that_queues(true: float) -> None:
    asked: list[float] = []

    def queues(rate: float) -> bool:
        asked.append(rate)
        return rate >= true

    found = edge(0.5, 8.0, queues)
    assert found is not None
    assert true <= found <= true * (1 + 2 * WITHIN)
    assert len(asked) <= 12


def test_where_nothing_queues_there_is_no_edge() -> None:
    assert edge(1.0, 4.0, lambda rate: False) is None


def test_policies_are_compared_at_the_edges_that_were_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "EDGES", tmp_path / "edges.json")
    drawn = len(policies.DRAWN)
    assert len(list(policies.workloads(10, [1], None))) == drawn
    (tmp_path / "edges.json").write_text(json.dumps({"summary": {"L-L": 3.21}}))
    (*_, (name, run)) = policies.workloads(10, [1], None)
    assert (name, run.trace, run.rate, run.seed) == ("L-L 3.21/s", "L-L", 3.21, 1)
    (tmp_path / "edges.json").write_text(json.dumps({"summary": {"L-L": 3.0}}))  # one of DRAWN
    assert len(list(policies.workloads(10, [1], None))) == drawn


def test_our_own_policy_has_no_say_in_the_edges() -> None:
    assert "kvmig" not in policies.OTHERS
