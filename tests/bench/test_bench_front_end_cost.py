from __future__ import annotations

from dataclasses import replace

import pytest

from bench.front_end_cost import Round, summarise

PLAIN = Round("plain", 0, 8000.0, 7.0, 10.0, 30.0, 20.0, 40.0, 200.0)


def test_a_ratio_is_the_median_of_the_rounds_ours_over_plain() -> None:
    rounds = [
        one
        for number, more in enumerate((0.5, 1.1, 2.0))
        for one in (
            replace(PLAIN, number=number),
            replace(PLAIN, server="kvmig", number=number, cpu_ms=40.0 * more, tokens_per_s=8400.0),
        )
    ]
    summary = summarise(rounds)
    assert summary["cpu_ratio"] == pytest.approx(1.1)
    assert summary["throughput_ratio"] == pytest.approx(1.05)
    assert summary["kvmig_cpu_ms"] == pytest.approx(44.0)
    assert summary["plain_cpu_ms"] == 40.0
    assert summary["ttft_ratio"] == 1.0
