from __future__ import annotations

import pytest

from bench.beat import floor_s, means, rows, summary
from bench.policies import COMPARED
from kvmig_tools.sim.run import Run, simulate


def sample(policy: str, tail: float, seed: int) -> dict[str, object]:
    figures = {"ttft_p99_s": tail, "e2e_mean_s": 10.0, "loss_mean_s": tail / 10}
    return {"policy": policy, "workload": "w", "seed": seed, "figures": figures}


def test_the_best_other_is_the_one_with_the_lowest_tail() -> None:
    tails = dict(zip(COMPARED, (6.0, 4.0, 3.0, 2.5, 5.0, 2.0), strict=True))
    of = means(sample(name, tail + by, 1) for name, tail in tails.items() for by in (-1.0, 1.0))
    row, total = rows(of, {"w": 1.5})
    assert row == [
        "w", "1.50", "2.00", "3.00", "2.50 (least-loaded)", "1.50", "2.00", "1.25", "1.00",
        "0.200", "0.300",
    ]  # fmt: skip
    assert total[5:] == row[5:]
    found = summary(of, ["w"])
    assert found["ttft_p99_artifact_over_kvmig"] == 1.5
    assert found["ttft_p99_best_over_kvmig_least"] == 1.25
    assert found["loss_over_artifact"] == pytest.approx(2 / 3)


def test_no_policy_is_under_the_floor() -> None:
    run = Run(trace="S-L", policy="kvmig", rate=0.5, requests=400)
    floor = floor_s([run])
    assert floor <= simulate(run).result.figures["ttft_p99_s"] <= 1.3 * floor
