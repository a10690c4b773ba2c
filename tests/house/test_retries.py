"""Tests that begin again are counted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.retries import TRIES, Count, EndedEarly, until_moved


class Calls:
    """Of which the first few are over early."""

    def __init__(self, early: int) -> None:
        self.left = early

    async def attempt(self) -> str:
        self.left -= 1
        if self.left >= 0:
            raise EndedEarly("it was")
        return "moved"


async def test_what_was_over_early_is_tried_again_and_counted() -> None:
    count = Count()
    assert await until_moved(Calls(2).attempt, count) == "moved"
    assert (count.begun, count.over) == (3, 2)


async def test_what_is_over_early_each_time_fails() -> None:
    with pytest.raises(EndedEarly, match=f"{TRIES} times"):
        await until_moved(Calls(TRIES).attempt, Count())


@pytest.mark.parametrize(
    ("begun", "over", "too_many"),
    [(1, 1, False), (2, 2, True), (99, 2, True), (100, 2, False), (150, 4, True)],
)
def test_more_than_one_in_50_are_too_many(begun: int, over: int, too_many: bool) -> None:
    assert Count(begun, over).too_many == too_many


RETRIES = """
import pytest
from tests.conftest import pytest_sessionfinish, pytest_terminal_summary
from tests.support.retries import SESSION
class Plugin:
    pytest_sessionfinish = staticmethod(pytest_sessionfinish)
    pytest_terminal_summary = staticmethod(pytest_terminal_summary)
SESSION.begun, SESSION.over = 50, {over}
flags = ["-q", "-c", "none.ini", "-p", "no:schemathesis"]
raise SystemExit(pytest.main([*flags, {file!r}], [Plugin()]))
"""


@pytest.mark.parametrize(("over", "status"), [(1, 0), (2, 1)])
def test_a_session_of_too_many_fails_though_its_tests_pass(
    tmp_path: Path, over: int, status: int
) -> None:
    (tmp_path / "none.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    file = tmp_path / "test_good.py"
    file.write_text("def test_good():\n    pass\n")
    program = RETRIES.replace("none.ini", str(tmp_path / "none.ini"))
    done = subprocess.run(
        [sys.executable, "-c", program.format(over=over, file=str(file))],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    assert f"{over} of 50 calls were over before they could be moved" in done.stdout
