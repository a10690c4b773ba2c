"""How a check of scripts/check.py goes whose process ends before it has said how its tests went."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from scripts.check import ENVIRONMENT, Check, Outcome, Runner, closing, run_of

LAST = "tests/test_a.py::test_b"
REPORT = (
    '<testsuites><testsuite><testcase classname="test_a" name="test_b"/></testsuite></testsuites>'
)


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    (file := tmp_path / "begun").write_text(LAST)
    return file


@pytest.mark.parametrize(
    ("status", "how"),
    [(-signal.SIGABRT, "killed by SIGABRT"), (-signal.SIGKILL, "killed by SIGKILL"),
     (0, "exit code 0"), (1, "exit code 1")],
)  # fmt: skip
def test_a_run_without_a_report_is_said_to_have_ended_how_and_in_which_test(
    tmp_path: Path, begun: Path, status: int, how: str
) -> None:
    run = run_of(status, tmp_path / "none.xml", begun)
    assert run.why == f"pytest ended without a report ({how}); the test that began last: {LAST}"


def test_a_report_that_was_not_written_to_its_end_is_none(tmp_path: Path, begun: Path) -> None:
    (report := tmp_path / "report.xml").write_text(REPORT[:-9])
    run = run_of(0, report, begun)
    assert (run.cases, run.why.partition(" (")[0]) == ([], "pytest ended without a report")


def test_a_run_that_ended_before_its_first_test_says_so(tmp_path: Path) -> None:
    run = run_of(4, tmp_path / "none.xml", tmp_path / "none")
    assert run.why == "pytest ended without a report (exit code 4); no test had begun"


@pytest.mark.parametrize("status", [0, 1, 5])
def test_a_run_with_a_report_has_its_tests_and_nothing_to_say(
    tmp_path: Path, begun: Path, status: int
) -> None:
    (report := tmp_path / "report.xml").write_text(REPORT)
    run = run_of(status, report, begun)
    assert ([one.name for one in run.cases], run.why) == (["test_a::test_b"], "")


def test_a_run_that_was_interrupted_is_not_whole_though_it_has_a_report(
    tmp_path: Path, begun: Path
) -> None:
    (report := tmp_path / "report.xml").write_text(REPORT)
    assert run_of(2, report, begun).why.startswith("pytest ended (exit code 2); ")


def test_a_test_that_ends_the_process_without_an_error_fails_its_check_by_name(
    tmp_path: Path,
) -> None:
    (file := tmp_path / "test_ends.py").write_text(
        "import os\ndef test_first(): pass\ndef test_ends(): os._exit(0)\n"
    )
    command = ("pytest", "-q", "-p", "no:schemathesis", str(file))
    outcome = Runner(tmp_path, ENVIRONMENT).run(Check("some tests", command, marks="not long"))
    assert not outcome.passed
    assert outcome.why.startswith(
        "pytest ended without a report (exit code 0); the test that began"
    )
    assert outcome.why.endswith("test_ends.py::test_ends")
    assert f"FAILED  some tests (0 s, 0 s of a core): {outcome.why}" in closing(
        [Outcome("some tests", False, 0.0, why=outcome.why)], 0.0
    )


def test_a_command_that_a_signal_ends_says_which(tmp_path: Path) -> None:
    words = ("python", "-c", f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})")
    outcome = Runner(tmp_path, ENVIRONMENT).run(Check("some command", words))
    assert (outcome.passed, outcome.why) == (False, "killed by SIGKILL")
