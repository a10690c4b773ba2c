"""The parts of bench/gpu with whole servers, on the CPU: their shape, not their figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.cold import part_medians
from bench.gpu import fleet, pause, plain
from bench.gpu.device import SKIPPED

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
