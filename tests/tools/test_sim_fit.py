from __future__ import annotations

from pathlib import Path

import pytest

from bench import report
from bench.simulator import FIGURES, LONGEST, compare, trace
from kvmig_tools.profile import main, model_of, to_toml
from kvmig_tools.profile_measure import Measured
from kvmig_tools.sim import cost
from kvmig_tools.sim.cost import Capacity
from kvmig_tools.sim.fit import (
    PromptTime,
    StageTime,
    StepTime,
    fit_copy,
    fit_decode,
    fit_prefill,
)

PROMPTS = [PromptTime(n, 8 + 0.2 * n + 1e-5 * n * n) for n in (16, 64, 256, 1024)]
STEPS = [StepTime(b, b * n, 10 + 0.5 * b + 0.001 * b * n) for b in (1, 2, 4, 8) for n in (32, 256)]
STAGES = [StageTime(n << 20, 3 + n * 0.5) for n in (1, 4, 16)]
CAPACITY = Capacity(
    blocks=600, block_tokens=32, max_sequences=16, max_batch_tokens=2048, prefill="chunked"
)


def test_a_model_is_found_again_from_its_own_times() -> None:
    prefill, error = fit_prefill(PROMPTS)
    assert (prefill.base_ms, prefill.per_token_ms) == pytest.approx((8, 0.2))
    assert error.most < 1e-6
    decode, _ = fit_decode(STEPS)
    assert decode.per_context_token_ms == pytest.approx(0.001)
    copy, _ = fit_copy(STAGES, 1024, 1.0)
    assert copy.stage_ms == pytest.approx(3)
    assert copy.bandwidth == pytest.approx((1 << 20) / 0.5e-3)


def test_no_coefficient_is_below_zero() -> None:
    prefill, _ = fit_prefill([PromptTime(n, 10 + 5 * n**0.5) for n in (16, 64, 256, 1024)])
    assert min(prefill.base_ms, prefill.per_token_ms, prefill.per_token_squared_ms) >= 0
    copy, _ = fit_copy([StageTime(1000, 5.0), StageTime(9000, 4.0)], 10, 1.0)
    assert copy.bandwidth == 1e12


def test_the_error_says_how_far_off_the_worst_point_is() -> None:
    _, error = fit_decode([*STEPS, StepTime(16, 512, 100.0)])
    assert error.most > error.mean > 0.01


def test_a_fitted_model_is_read_back_from_its_file(tmp_path: Path) -> None:
    found = Measured(PROMPTS, STEPS, STAGES, bytes_per_token=4096, blocks=600)
    model, errors = model_of(found, "fitted", CAPACITY)
    assert set(errors) == {"prefill", "decode", "copy"}
    file = tmp_path / "fitted.toml"
    file.write_text(to_toml(model))
    again = cost.load(str(file))
    assert again.capacity == model.capacity
    assert again.decode.base_ms == pytest.approx(model.decode.base_ms, rel=1e-5)


def test_nothing_starts_for_a_bad_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--instances=0", "--out=x.toml"]) == 2
    assert "--instances is 0, must be 1 or more" in capsys.readouterr().err


def test_a_timeline_needs_two_instances_to_move_between(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--instances=1", "--out=x.toml", "--timeline=x.svg"]) == 2
    assert "--instances is 1, must be 2 or more with --timeline" in capsys.readouterr().err


def test_the_largest_stage_of_all_migrations_is_the_one_to_draw() -> None:
    found = Measured()
    for nbytes in (10, 30, 20):
        stage = {"blocks": 1, "bytes": nbytes, "ms": 1.0}
        found.add_report({"stages": [stage], "transport": "shm"})
    assert found.largest is not None
    assert (found.largest.bytes, len(found.stages)) == (30, 3)


def test_a_trace_repeats_and_stays_within_its_bounds() -> None:
    rows = trace(200, 2.0, 3)
    assert rows == trace(200, 2.0, 3)
    assert max(max(row[1:]) for row in rows) <= LONGEST
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)


def test_small_counts_may_differ_by_two() -> None:
    result = report.begin("simulator", {})
    real = dict.fromkeys(FIGURES, 1.0)
    result.samples = [{"real": real, "simulated": real | {"migrations": 3.0, "ttft_mean_s": 1.2}}]

    compare(result)

    (line,) = report.missed(result.summary, result.targets)
    assert line == "ttft_mean_s_simulated_over_real is 1.2, should be at most 1.15"
