"""`python -m kvmig.placement`: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.mux.systems import power_law
from kvmig.core.errors import ConfigError
from kvmig.placement.__main__ import METHODS, main, placed
from kvmig.placement.dedicated import replicas, spatial
from kvmig.placement.estimator import PlanEstimator
from kvmig.placement.file import read, where
from kvmig.placement.greedy import UnplacedMember
from kvmig.placement.observed import check
from kvmig.placement.problem import Plan, cluster_of, models_of
from kvmig.placement.starts import own_flags
from kvmig_tools import simulate
from scripts import draw_placement

EXAMPLE = Path("examples/placement.toml")
CLUSTER = ("--cluster", "1x8:a100-80g")


def run(*flags: str, models: Path = EXAMPLE) -> int:
    return main(["--models", str(models), *flags])


def file_of(folder: Path, *rows: str) -> Path:
    file = folder / "models.toml"
    file.write_text("\n".join(f"[[models]]\n{row}" for row in rows))
    return file


def test_the_documented_example_can_be_carried_out(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    assert run(*CLUSTER, "--out", str(file)) == 0
    placement = read(file.read_text(), "p.toml")
    check(placement, list(placement.models()), "p.toml")
    sizes = {
        unit.size: own_flags(placement, "chat", unit.size, one.kv_bytes).split()[0]
        for unit in placement.units
        for one in unit.models
        if one.name == "chat"
    }
    assert sizes == {size: f"--tensor-parallel-size={size}" for size in (1, 2)}


def test_each_unit_is_printed_and_why_not_the_next_best(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(*CLUSTER) == 0
    out = capsys.readouterr().out
    assert "34.5 of 34.5 requests per second expected" in out
    units = out.split("\nunit ")[1:]
    assert len(units) >= 4
    for unit in units:
        assert "req/s, decodes on" in unit
        assert "next best: " in unit
        assert "% lower" in unit


@pytest.mark.parametrize("method", METHODS)
def test_the_file_holds_each_models_whole_rate_on_gpus_of_its_own(
    tmp_path: Path, method: str
) -> None:
    out = tmp_path / "placement.toml"
    assert run(*CLUSTER, "--method", method, "--out", str(out)) == 0
    units = tomllib.loads(out.read_text())["units"]
    rates: dict[str, float] = {}
    taken: list[tuple[int, int]] = []
    for unit in units:
        taken += [(unit["node"], gpu) for gpu in unit["gpus"]]
        for one in unit["models"]:
            rates[one["name"]] = rates.get(one["name"], 0) + one["rate"]
            assert 0 < one["decode_share"] <= 1
    assert rates == pytest.approx({"chat": 30, "code": 3, "mail": 1, "reports": 0.5})
    assert len(taken) == len(set(taken)) <= 8


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    files = [tmp_path / "a.toml", tmp_path / "b.toml"]
    for file in files:
        run(*CLUSTER, "--out", str(file))
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("method", [spatial, replicas])
def test_dedicated_placements_share_nothing(
    method: Callable[[PlanEstimator], Plan | UnplacedMember],
) -> None:
    estimator = PlanEstimator(power_law(1.3, 50), cluster_of("4x8:a100-80g"))
    plan = method(estimator)
    assert not isinstance(plan, UnplacedMember)
    assert all(len(unit.members) == 1 for unit in plan)
    assert len({unit.members[0].llm for unit in plan}) == 19
    assert len(where(estimator, plan)) == len(plan)


def test_only_replicas_place_a_model_twice() -> None:
    estimator = PlanEstimator(power_law(2.1, 50), cluster_of("4x8:a100-80g"))
    once, often = spatial(estimator), replicas(estimator)
    assert not isinstance(once, UnplacedMember)
    assert not isinstance(often, UnplacedMember)
    assert len(once) == 19
    assert len(often) > 19
    assert estimator.total(often) > estimator.total(once)


@pytest.mark.parametrize("method", METHODS)
def test_models_that_dont_fit_are_refused_with_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    rows = [f'name = "m{at}"\nmodel = "llama-30b"\nrate = 1' for at in range(5)]
    models = file_of(tmp_path, *rows)
    assert run("--cluster", "1x4:a100-80g", "--method", method, models=models) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "GiB" in error


def test_models_that_fit_together_but_in_no_units_are_refused_with_who_lacks_room() -> None:
    rows = "".join(
        f'[[models]]\nname = "m{at}"\nmodel = "llama-30b"\nrate = 1\n' for at in range(3)
    )
    estimator = PlanEstimator(models_of(rows, "m"), cluster_of("1x3:a100-80g"))
    with pytest.raises(ConfigError, match=r"finds no room for model m\d: \d+\.\d GiB are missing"):
        placed(estimator, "muxserve")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--cluster", "8xA100"), "--cluster is '8xA100', must be NODESxGPUS:DEVICE"),
        (("--cluster", "1x8:tpu"), "device is 'tpu', must be a100-80g"),
        ((*CLUSTER, "--out", "/nowhere/p.toml"), "--out /nowhere/p.toml can't be written"),
        ((*CLUSTER, "--models", "gone.toml"), "--models gone.toml can't be read"),
    ],
)
def test_what_cant_be_used_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], sentence: str
) -> None:
    assert run(*flags) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("flag", ["--method", "--objective"])
def test_an_unknown_choice_is_refused(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    with pytest.raises(SystemExit) as left:
        run(*CLUSTER, flag, "best")
    assert left.value.code == 2
    assert "invalid choice: 'best'" in capsys.readouterr().err


def test_the_picture_is_current() -> None:
    assert draw_placement.TARGET.read_text() == draw_placement.drawing()


# -- from the placement that is


def before(folder: Path) -> Path:
    file = folder / "before.toml"
    assert run(*CLUSTER, "--out", str(file)) == 0
    return file


def changed(folder: Path) -> Path:
    """The example at other rates."""
    file = folder / "models.toml"
    text = EXAMPLE.read_text().replace("rate = 30.0", "rate = 8.0")
    file.write_text(text.replace("rate = 0.5", "rate = 4.0"))
    return file


def test_the_way_from_a_placement_is_printed_in_seconds_and_bytes_with_its_worth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, out = before(tmp_path), tmp_path / "after.toml"
    capsys.readouterr()
    flags = (*CLUSTER, "--from", str(old), "--out", str(out))
    assert run(*flags, models=changed(tmp_path)) == 0
    text = capsys.readouterr().out
    assert "GiB of weights are loaded" in text
    assert "  wave 1, " in text
    assert "\nworth it: in 600 s it serves " in text
    was, is_now = (read(file.read_text(), str(file)) for file in (old, out))
    assert [one.called for one in was.units] == [one.called for one in is_now.units]
    assert was.leases().keys() != is_now.leases().keys()


def test_a_short_horizon_isnt_worth_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (*CLUSTER, "--from", str(before(tmp_path)), "--horizon", "1")
    assert run(*flags, models=changed(tmp_path)) == 0
    assert "\nnot worth it: in 1 s it serves " in capsys.readouterr().out


def test_from_a_placement_to_itself_nothing_moves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = before(tmp_path)
    file = tmp_path / "again.toml"
    assert run(*CLUSTER, "--from", str(old), "--out", str(file)) == 0
    assert ": nothing moves\nnot worth it" in capsys.readouterr().out
    leases = [read(one.read_text(), "it").leases() for one in (old, file)]
    assert leases[0] == leases[1]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--method", "spatial"), "--method divides the GPUs into other units, must be kvmig"),
        (("--horizon", "nan"), "--horizon is nan, must be a number above 0"),
        (("--load", "0"), "--load is 0, must be a number above 0"),
    ],
)
def test_what_cant_be_done_from_a_placement_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], sentence: str
) -> None:
    assert run(*CLUSTER, "--from", str(before(tmp_path)), *flags) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path) -> None:
    command = (
        f"{sys.executable} -m kvmig.placement --models {EXAMPLE} --cluster 1x8:a100-80g | true"
    )
    ended = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_placement_is_simulated_beside_what_it_expects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = before(tmp_path)
    words = ["--placement", str(file), "--models", str(EXAMPLE), "--cluster", "1x8:a100-80g"]
    capsys.readouterr()
    assert simulate.main([*words, "--requests", "300"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("chat", "code", "mail", "reports"))
    assert "within 8 times their time alone" in out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--placement", "gone.toml"), "--placement wants --models and --cluster, and no --trace"),
        ((), "--trace is missing, or --placement"),
        (("--placement", "gone.toml", "--models", str(EXAMPLE), *CLUSTER), "gone.toml can't be"),
    ],
)
def test_a_simulation_of_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], sentence: str
) -> None:
    assert simulate.main(flags) == 2
    assert sentence in capsys.readouterr().err
