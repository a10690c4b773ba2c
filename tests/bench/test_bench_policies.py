from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from bench import policies
from bench.policies import BURSTS, COMPARED, PAPERS, SEEDS, Sample, named


def sample(policy: str, workload: str, seed: int) -> Sample:
    return Sample(policy, workload, seed, dict.fromkeys(policies.FIGURES, 1.0))


def test_policies_are_compared_with_all_seeds_and_parts_with_fewer() -> None:
    jobs = list(policies.jobs(10, SEEDS, None))
    burst, paper = named(*BURSTS[0]), named(*PAPERS[0])
    for load in (burst, paper):
        seeds = {(one, run.seed) for one, name, run in jobs if name == load}
        assert {(one, seed) for one, seed in seeds if one in COMPARED} == {
            (policy, seed) for policy in COMPARED for seed in SEEDS
        }
        part = "kvmig, no migration"
        assert {seed for one, seed in seeds if one == part} == set(SEEDS[:3])


def test_what_only_some_policies_were_tried_with_is_left_out_of_a_comparison() -> None:
    both = [sample(policy, "w", 1) for policy in ("llumnix", "kvmig")]
    assert policies.shared([*both, sample("llumnix", "w", 2)], ("llumnix", "kvmig")) == both


def test_known_samples_are_taken_up_again_if_they_are_of_the_same_runs(tmp_path: Path) -> None:
    file = tmp_path / "policies.json"
    settings: dict[str, object] = {"requests": 10, "instances": 16}
    one = sample("kvmig", "w", 1)
    file.write_text(json.dumps({"settings": settings, "samples": [asdict(one)]}))
    assert policies.known(file, settings) == [one]
    with pytest.raises(SystemExit, match="has requests 10, not 20"):
        policies.known(file, {"requests": 20, "instances": 16})


def test_real_traces_are_none_of_the_unseen_loads(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        policies.main(["--unseen", "--traces", "folder"])
    assert "--traces is folder, must not be given with --unseen" in capsys.readouterr().err
