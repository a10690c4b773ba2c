"""The parts of bench/gpu with whole servers, on the CPU: their shape, not their figures."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins

from bench.cold import part_medians
from bench.gpu import fleet, pause, plain
from bench.gpu.device import SKIPPED, options_of
from bench.pause import COLD, HERE, PauseSample
from bench.report import begin
from kvmig.kvtransfer.report import StageParts

CPU = ["--device", "cpu", "--quick"]


def result_of(part: Any, file: Path) -> dict[str, Any]:
    assert part.main([*CPU, "--out", str(file)]) == 0
    result: dict[str, Any] = json.loads(file.read_text())
    assert not [one for one in result["samples"] if "failed" in one]
    return result


@pytest.mark.server
@pytest.mark.long
def test_kvmig_and_plain_vllm_are_asked_in_turns(tmp_path: Path) -> None:
    result = result_of(plain, tmp_path / "plain.json")
    assert [one["server"] for one in result["samples"]] == ["plain", "kvmig"]
    assert result["summary"]["throughput_ratio"] > 0


@pytest.mark.server
@pytest.mark.long
def test_one_model_of_a_fleet_comes_from_zero_and_the_other_is_parked(tmp_path: Path) -> None:
    result = result_of(fleet, tmp_path / "fleet.json")
    rows = result["samples"]
    assert [one["what"] for one in rows] == ["a, first of the fleet", "b, cold", "b, parked"]
    assert all(one["right"] and one["weights_s"] > 0 for one in rows)
    assert rows[2]["total_s"] == rows[1]["total_s"], "it has not been started again"
    assert (result["summary"]["wrong"], result["summary"]["restarts"]) == (0, 0)


@pytest.mark.server
@pytest.mark.long
def test_pauses_are_measured_and_a_stage_is_drawn(tmp_path: Path) -> None:
    summary = result_of(pause, tmp_path / "pause.json")["summary"]
    assert (summary["wrong_tokens"], summary["moves_0"], summary["moves_1"]) == (0, 8, 8)
    assert summary["stage_gb_s_0"] > 0
    pictures = [(tmp_path / f"pause-stage-{load}.svg").read_text() for load in (0, 1)]
    assert all("gather" in one and "scatter" in one for one in pictures)


def a_move(number: int) -> PauseSample:
    """All its times are 1 ms."""
    names = [field.name for field in fields(PauseSample)[3:-1]]
    times: dict[str, Any] = dict.fromkeys(names, 1.0)
    return PauseSample(HERE, 0, number, **times)


@pytest.mark.parametrize(
    ("gather_ms", "scatter_ms", "gb_s"), [(2.0, 0.5, 50.0), (0.5, 4.0, 25.0), (None, None, None)]
)
def test_a_stages_slower_copy_bounds_what_the_gpus_would_do_by_themselves(
    tmp_path: Path, gather_ms: float | None, scatter_ms: float | None, gb_s: float | None
) -> None:
    """A CPU says nothing of itself."""
    file = tmp_path / "pause.json"
    parts = StageParts(1.0, 10.0, 1.0, 10.0, gather_ms, scatter_ms)
    result = begin("gpu pause", {})
    result.samples.append(
        {"what": "stage", "load": 0, "bytes": 100_000_000, "gb_s": 5.0, "parts": to_builtins(parts)}
    )
    moves = [a_move(number) for number in (COLD, COLD + 1)]
    pause.record(result, options_of("", ["--out", str(file)]), moves, 0)
    summary = json.loads(file.read_text())["summary"]
    assert summary.get("stage_gpu_gb_s_0") == gb_s
    assert (summary["stage_gb_s_0"], summary["moves_0"]) == (5.0, 1)


@pytest.mark.parametrize("part", [plain, fleet, pause])
def test_without_vllm_they_are_skipped(
    part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part, "missing", lambda: "vLLM is not installed")
    file = tmp_path / "result.json"
    assert part.main([*CPU, "--out", str(file)]) == SKIPPED
    assert json.loads(file.read_text())["samples"] == [{"skipped": "vLLM is not installed"}]


def test_parts_of_starts_are_medians_of_those_that_took_time() -> None:
    samples = [{"weights_s": 1.0, "graphs_s": 0.0}, {"weights_s": 3.0}, {"ttft_s": 1.0}]
    assert part_medians(samples) == {"start weights_s": 2.0}
