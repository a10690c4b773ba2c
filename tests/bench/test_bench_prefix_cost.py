"""What prefixes add to a dispatch: bench.prefix_cost."""

from __future__ import annotations

import pytest

from bench import prefix_cost
from bench.prefix_cost import KINDS, FrontEnd, Sample, summarize


def test_prompts_of_each_kind_find_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cost, "SESSIONS", 50)
    front = FrontEnd(1)
    found = {kind: front.find_tokens(front.prompts[kind][0]) for kind in KINDS}
    assert found["new"] == {}
    assert set(found["begun"].values()) == {prefix_cost.SHARED}
    assert sorted(set(found["held"].values())) == [prefix_cost.SHARED, prefix_cost.HELD]
    assert len(found["begun"]) == len(found["held"]) == prefix_cost.INSTANCES
    front.report_loads()
    with_us, marks_us = front.place(front.prompts["held"][0], 3, prefixes=True)
    assert with_us > marks_us > 0


def test_the_kind_to_which_prefixes_add_most_counts() -> None:
    rows = [Sample(kind, 50.0 + 10 * at, 20.0, 5.0, 500.0) for at, kind in enumerate(KINDS)]
    summary = summarize(rows)
    assert (summary["added_us"], summary["added_over_sort"]) == (50.0, 0.1)
