"""A run of all long tests that was interrupted, and the run that goes on from it."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts import check
from scripts.check import ENVIRONMENT, FETCH, LINT, Check, Runner, options_of, taken_over, without
from scripts.kept_outcomes import WRITTEN, KeptOutcomes
from scripts.outcomes import Case, Outcome

PASSED = Outcome("tests on fleets", True, 12.0, [Case("tests.test_a::b", "passed", 3.0)], ["flaky"])
FAILED = Outcome("tests on servers", False, 9.0, [Case("tests.test_a::c", "failed", 3.0)])


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with one commit."""
    (tmp_path / "tests").mkdir()
    for name in ("kept.py", "tests/test_a.py", WRITTEN):
        (tmp_path / name).write_text("{}\n")
    (tmp_path / ".gitignore").write_text("/.long-results/\nbuilt\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message=change")
    return tmp_path


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    said = subprocess.check_output(("git", *identity, *words), cwd=folder, text=True, timeout=30)
    return said.strip()


def test_what_has_passed_is_taken_over_whole_with_the_run_that_it_is_of(tree: Path) -> None:
    first = KeptOutcomes(tree)
    assert [first.keep(one) for one in (PASSED, FAILED)] == ["", ""]
    (found,) = KeptOutcomes(tree).passed()
    assert (found.name, list(found.cases), found.flaky) == (
        PASSED.name, PASSED.cases, PASSED.flaky
    )  # fmt: skip
    commit = git(tree, "rev-parse", "--short", "HEAD")
    assert found.taken_from == f"the run of {first.run.began} at {commit}"
    assert found.taken_from in taken_over([found])
    assert found.taken_from in check.closing([found], 0.0)


def add(tree: Path) -> None:
    (tree / "new.py").touch()


def remove(tree: Path) -> None:
    (tree / "kept.py").unlink()


def edit(tree: Path) -> None:
    (tree / "kept.py").write_text("[]\n")


def edit_and_commit(tree: Path) -> None:
    edit(tree)
    git(tree, "commit", "--quiet", "--all", "--message=change")


def turn_into_program(tree: Path) -> None:
    (tree / "kept.py").chmod(0o755)


@pytest.mark.parametrize(
    "change", [add, remove, edit, edit_and_commit, turn_into_program], ids=lambda one: one.__name__
)
def test_no_outcome_stands_for_a_tree_that_has_changed(
    tree: Path, change: Callable[[Path], None]
) -> None:
    KeptOutcomes(tree).keep(PASSED)
    change(tree)
    assert KeptOutcomes(tree).passed() == []


def build(tree: Path) -> None:
    (tree / "built").touch()


def record(tree: Path) -> None:
    (tree / WRITTEN).write_text('{"a": {}}\n')


def commit_nothing(tree: Path) -> None:
    git(tree, "commit", "--quiet", "--allow-empty", "--message=change")


@pytest.mark.parametrize("change", [build, record, commit_nothing], ids=lambda one: one.__name__)
def test_an_outcome_stands_while_all_files_hold_the_same(
    tree: Path, change: Callable[[Path], None]
) -> None:
    KeptOutcomes(tree).keep(PASSED)
    change(tree)
    assert len(KeptOutcomes(tree).passed()) == 1


def test_an_outcome_of_a_tree_that_changed_under_the_run_is_not_kept(tree: Path) -> None:
    kept = KeptOutcomes(tree)
    edit(tree)
    assert kept.keep(PASSED) == "files have changed since the run began"
    assert KeptOutcomes(tree).passed() == []


def test_a_check_that_fails_later_with_the_same_files_has_not_passed(tree: Path) -> None:
    KeptOutcomes(tree).keep(PASSED)
    KeptOutcomes(tree).keep(Outcome(PASSED.name, False, 1.0))
    assert KeptOutcomes(tree).passed() == []


def test_nothing_is_kept_where_no_git_knows_the_files(tmp_path: Path) -> None:
    kept = KeptOutcomes(tmp_path)
    assert kept.keep(PASSED) == "no git says which files there are"
    assert kept.passed() == []


def test_lanes_run_what_is_not_taken_over() -> None:
    earlier = [Outcome(one.name, True, 1.0) for one in LINT]
    assert without([LINT, (FETCH, LINT[0]), check.SERVERS], earlier) == [(FETCH,), check.SERVERS]


def test_only_a_run_of_all_long_tests_is_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options_of(["--resume"])
    assert "--resume goes on with a run of --long" in capsys.readouterr().err
    assert options_of(["--long", "--resume"]).resume


# -- a run that is interrupted


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Where a shell has started this in its background, children ignore SIGINT, too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_check_says_what_has_failed_and_no_further_one_begins(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (file := tmp_path / "test_waits.py").write_text(
        "import threading\n"
        "def test_fails(): assert 1 == 2, 'the text of a failure'\n"
        f"def test_waits(): open({str(tmp_path / 'waits')!r}, 'w'); threading.Event().wait(60)\n"
    )
    (folder := tmp_path / "folder").mkdir()
    ended: list[Outcome] = []
    runner = Runner(folder, ENVIRONMENT, ended.append)
    command = ("pytest", "-q", "-p", "no:schemathesis", str(file))
    checks = [Check(name, command, marks="not long") for name in ("first", "second")]

    def interrupt() -> None:
        deadline = time.monotonic() + 60.0
        while not (tmp_path / "waits").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        runner.interrupt()

    (thread := threading.Thread(target=interrupt)).start()
    first, second = runner.lane(checks)
    thread.join()
    assert first.why.startswith("pytest ended (exit code 2)")
    assert second.why == "it did not begin: the run was interrupted"
    assert ended == [first]
    assert b"the text of a failure" in capfdbinary.readouterr().out
