"""What tests share: calls that begin again are counted, engines are lent, variables restored."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import cast
from unittest import mock

import pytest

from tests.support import vllm_pair
from tests.support.environment import environment
from tests.support.retries import TRIES, Count, EndedEarly, until_moved
from tests.support.vllm_pair import Engines, Pair
from tests.support.vllm_side import Configuration


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


PLAIN = Configuration()
OTHER = Configuration(async_scheduling=True)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    monkeypatch.setattr(vllm_pair, "Side", lambda wanted: mock.MagicMock())
    monkeypatch.setattr(Pair, "assert_empty", mock.AsyncMock())
    return Engines()


async def test_tests_of_one_configuration_have_the_same_two(engines: Engines) -> None:
    async with engines.lent(PLAIN, PLAIN) as first:
        assert first.a is not first.b
    async with engines.lent(PLAIN, OTHER) as other:
        assert other.a is first.a
        assert other.b is not first.b
    async with engines.lent(PLAIN, PLAIN) as again:
        assert (again.a, again.b) == (first.a, first.b)


async def test_those_that_a_test_does_not_leave_empty_end_and_the_next_has_new_ones(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        stays = AssertionError("a request stays")
        broken.setattr(Pair, "assert_empty", mock.AsyncMock(side_effect=stays))
        with pytest.raises(AssertionError, match="a request stays"):
            async with engines.lent(PLAIN, PLAIN) as spoilt:
                pass
    for side in (spoilt.a, spoilt.b):
        cast("mock.MagicMock", side).close.assert_called_once()
    async with engines.lent(PLAIN, PLAIN) as next_one:
        assert next_one.a is not spoilt.a


def test_what_was_set_in_a_block_is_gone_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMIG_TEST_KEPT", "before")
    with environment({"KVMIG_TEST_KEPT": "inside", "KVMIG_TEST_NEW": "1"}):
        os.environ["KVMIG_TEST_LATER"] = "1"
        assert os.environ["KVMIG_TEST_KEPT"] == "inside"
    assert os.environ["KVMIG_TEST_KEPT"] == "before"
    assert not {"KVMIG_TEST_NEW", "KVMIG_TEST_LATER"} & os.environ.keys()
