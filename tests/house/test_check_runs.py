"""How a check of scripts/check.py goes whose process ends before it has said how its tests went."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from scripts import check, long_slices
from scripts.check import ENVIRONMENT, Check, Runner, closing, run_of, stacks_in
from scripts.outcomes import Outcome

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


def test_a_test_that_hangs_ends_its_check_which_shows_the_line_that_it_hung_in(
    tmp_path: Path,
) -> None:
    (file := tmp_path / "test_hangs.py").write_text(
        "import threading\ndef test_hangs():\n    threading.Event().wait()  # for ever\n"
    )
    soon = ("-o", "faulthandler_timeout=1", "-o", "faulthandler_exit_on_timeout=true")
    command = ("pytest", "-q", "-p", "no:schemathesis", *soon, str(file))
    outcome = Runner(tmp_path, ENVIRONMENT).run(Check("some tests", command, marks="not long"))
    assert outcome.why.endswith("test_hangs.py::test_hangs")
    assert outcome.stacks.startswith("Timeout (0:00:01)!\n")
    assert f'File "{file}", line 3 in test_hangs' in outcome.stacks
    said = closing([outcome], 0.0)
    assert "\nWhere some tests ended:\n  Timeout (0:00:01)!\n" in said
    assert f'    File "{file}", line 3 in test_hangs\n' in said


def test_of_many_stacks_the_main_threads_is_kept_which_comes_last() -> None:
    others = "".join(f'Thread 0x{at} [x] (most recent call first):\n  File "a", line {at} in f\n\n'
                     for at in range(check.MOST_FRAMES))  # fmt: skip
    main = 'Thread 0xabc [python] (most recent call first):\n  File "b", line 7 in main\n'
    found = stacks_in(f"...\nTimeout (0:03:00)!\n{others}{main}nanobind: leaked 3 functions!\n")
    assert found.startswith("Timeout (0:03:00)!\n")
    assert found.endswith('File "b", line 7 in main')
    assert found.count("\n") == check.MOST_FRAMES


def test_a_run_that_printed_no_stacks_shows_none() -> None:
    assert stacks_in("Timeout of a request\n") == ""
    assert "ended:" not in closing([Outcome("some", False, 0.0, why="killed by SIGKILL")], 0.0)


@pytest.mark.parametrize("number", range(long_slices.SLICES))
def test_lanes_take_each_check_once_and_the_longest_first(number: int) -> None:
    seconds = long_slices.read_seconds()
    slices = long_slices.assign_slices(seconds)
    part, took = check.part_of_long(slices, number), slices.seconds_of(seconds, number)
    order = check.order_of(part, took)
    names = [one.name for checks in order for one in checks]
    usual = (check.FETCH, *check.DRIFT, *check.ENGINES, *check.LIGHTS, *check.SERVERS,
             *check.FLEETS, *check.LINT, check.ORDERS)  # fmt: skip
    assert sorted(names) == sorted(one.name for one in (*usual, *part))
    long = [took[name] for name in names if name in check.LONG_NAMES]
    assert long == sorted(long, reverse=True)
    begun = names.index(check.LIGHTS[1].name)
    assert all(names.index(one.name) > begun for one in part if one.tree), "it is being fetched"


def test_the_seconds_of_a_slice_are_those_of_its_groups_and_a_start_for_each_check() -> None:
    seconds = {"some": {"a": 50.0, "b": 40.0}, "other": {"c": 1.0}}
    slices = long_slices.assign_slices(seconds)
    took = [slices.seconds_of(seconds, number) for number in range(long_slices.SLICES)]
    assert sum(sum(one.values()) for one in took) == 91.0 + 3 * long_slices.START_S
    assert slices.seconds_of(seconds, None) == {
        "some": 90.0 + long_slices.START_S, "other": 1.0 + long_slices.START_S,
    }  # fmt: skip
