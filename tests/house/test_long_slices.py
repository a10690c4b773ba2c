"""Which of the long tests a run of the checks takes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import check, long_slices
from scripts.long_slices import (
    SLICES,
    START_S,
    LongSlices,
    assign_slices,
    group_of,
    number_of_commit,
    read_seconds,
)
from scripts.outcomes import Case, Outcome
from tests.support import long_slice

NAMES = st.text("abc", min_size=1, max_size=4)
SECONDS = st.dictionaries(NAMES, st.dictionaries(NAMES, st.floats(0.0, 300.0), max_size=20))


@given(SECONDS, NAMES, NAMES)
def test_every_long_test_is_in_exactly_one_slice_also_one_that_is_new(
    seconds: dict[str, dict[str, float]], name: str, test: str
) -> None:
    slices = assign_slices(seconds)
    number = slices.number_of(name, test)
    assert number in range(SLICES)
    assert number in slices.homes_of(name), "its check runs there"
    known = seconds.get(name, {})
    assert test not in known or number == slices.numbers[name][test]


def test_a_slice_imports_only_files_that_may_hold_tests_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seconds = {"some": {"test_a": 50.0, "test_b[x]": 40.0, "test_b[y]": 30.0}}
    monkeypatch.setattr(check, "read_seconds", lambda: seconds)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    for name in ("test_a", "test_b", "test_new"):
        (tmp_path / "tests" / f"{name}.py").touch()
    slices = assign_slices(seconds)
    of_a, of_x, of_y = (slices.numbers["some"][one] for one in seconds["some"])

    def found(number: int) -> list[str]:
        one = check.Check("some", sparing=("server",), slice=number)
        return [Path(file).stem for file in check.files_of(one)]

    assert len({of_a, of_x, of_y}) == 3
    assert found(of_a) == ["test_a", "test_new"]
    assert found(of_x) == found(of_y) == ["test_b", "test_new"]
    assert slices.number_of("some", "t/test_b.py::new[z]") in (of_x, of_y)


@given(SECONDS)
def test_the_same_seconds_give_the_same_slices_in_whatever_order_they_come(
    seconds: dict[str, dict[str, float]],
) -> None:
    turned = {
        name: dict(reversed(groups.items())) for name, groups in reversed(list(seconds.items()))
    }
    assert assign_slices(turned) == assign_slices(seconds)


@given(SECONDS)
def test_no_slice_is_longer_than_the_mean_by_more_than_a_group_and_a_start(
    seconds: dict[str, dict[str, float]],
) -> None:
    sums = seconds_of(assign_slices(seconds), seconds)
    longest = max((took for some in seconds.values() for took in some.values()), default=0.0)
    assert max(sums) <= sum(sums) / SLICES + longest + START_S + 1e-6


def test_a_check_of_many_small_groups_is_started_by_as_few_slices_as_hold_it() -> None:
    seconds = {name: {f"t{at}": 1.0 for at in range(100)} for name in ("a", "b", "c", "d")}
    slices = assign_slices(seconds)
    homes = [len(slices.homes_of(name)) for name in seconds]
    assert sum(homes) <= SLICES + len(seconds)


def test_the_slices_as_recorded_differ_by_a_minute_at_most() -> None:
    seconds = read_seconds()
    sums = seconds_of(assign_slices(seconds), seconds)
    assert max(sums) - min(sums) < 60.0, sums


def seconds_of(slices: LongSlices, seconds: long_slices.Seconds) -> list[float]:
    """How long each slice takes, with the starts of its checks."""
    return [
        sum(
            START_S * (number in set(slices.numbers[name].values()))
            + sum(took for group, took in some.items() if slices.numbers[name][group] == number)
            for name, some in seconds.items()
            if some
        )
        for number in range(SLICES)
    ]


def test_each_long_check_runs_within_32_slices() -> None:
    slices = assign_slices(read_seconds())
    parts = [check.part_of_long(slices, number) for number in range(SLICES)]
    assert {one.name for part in parts for one in part} == check.LONG_NAMES
    assert all(one.slice == number for number, part in enumerate(parts) for one in part)


def test_each_slice_runs_the_checks_whose_tests_are_in_it() -> None:
    slices = assign_slices(read_seconds())
    for number in range(SLICES):
        named = {name for name, some in slices.numbers.items() if number in some.values()}
        part = {one.name for one in check.part_of_long(slices, number)}
        assert named == part & slices.numbers.keys()


def test_a_check_whose_tests_have_files_runs_in_their_slices_also_if_one_has_none() -> None:
    slices = LongSlices({"a": {"": 5, "test_b": 3, "test_c[x]": 4}})
    assert slices.homes_of("a") == [3, 4, 5]
    assert slices.homes_of("a", "test_c") == [4]


@pytest.mark.parametrize("one", [one for one in check.LONG if not one.marks], ids=str)
def test_a_long_check_without_tests_runs_in_one_slice(one: check.Check) -> None:
    assert len(assign_slices(read_seconds()).homes_of(one.name)) == 1


def test_seconds_are_recorded_of_checks_that_there_are() -> None:
    assert set(read_seconds()) <= check.LONG_NAMES


def test_seconds_are_recorded_of_groups_as_tests_have_them() -> None:
    for groups in read_seconds().values():
        for group in groups:
            file, bracket, parameters = group.partition("[")
            assert group == (group and group_of(f"{file}.py::test_a{bracket}{parameters}"))


def test_tests_of_a_file_and_a_parametrisation_stay_together_wherever_the_file_lies() -> None:
    assert group_of("tests/engines/test_zoo.py::test_a[llama3]") == "test_zoo[llama3]"
    assert group_of("tests.test_zoo::test_b[llama3]") == "test_zoo[llama3]"
    assert group_of("tests/test_moves.py::test_a") == "test_moves"


@pytest.mark.parametrize(
    ("test", "group"),
    [
        ("test_serve_gpus.py::test_killed[source resolving]", "test_serve_gpus[source]"),
        ("test_serve_gpus.py::test_killed[destination scattering in a copy]",
         "test_serve_gpus[destination]"),
        ("test_serve_gpus.py::test_moves[async]", "test_serve_gpus[async]"),
        ("test_serve_gpus.py::test_parked", "test_serve_gpus"),
        ("test_serve_zoo.py::test_moved[qwen3-moe-seeded]", "test_serve_zoo[qwen3-moe]"),
        ("test_serve_zoo.py::test_drained[qwen3-moe]", "test_serve_zoo[qwen3-moe]"),
        ("test_vllm_adapter.py::test_a[async-greedy]", "test_vllm_adapter[async]"),
        ("test_vllm_kinds.py::test_a[sync]", "test_vllm_kinds[sync]"),
        ("test_vllm_rerun.py::test_a[other]", "test_vllm_rerun[other]"),
        ("test_serve_upgrade.py::test_a[greedy]", "test_serve_upgrade"),
    ],
)  # fmt: skip
def test_tests_stay_together_by_the_part_of_their_parameters_that_shares_a_server(
    test: str, group: str
) -> None:
    assert group_of(f"tests/e2e/{test}") == group


def test_a_run_takes_the_tests_of_its_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"some": {"test_a": 50.0, "test_b[x]": 40.0, "test_b[y]": 30.0}}
    monkeypatch.setattr(long_slice, "read_seconds", lambda: seconds)
    known = ["t/test_a.py::a", "t/test_a.py::b", "t/test_b.py::a[x]", "t/test_b.py::a[y]"]
    tests = [*known, "t/test_new.py::a"]
    ran = [names for number in range(SLICES) for names in chosen_of("some", number, tests)]
    assert sorted(ran) == sorted(tests)
    number = assign_slices(seconds).number_of("some", tests[0])
    assert chosen_of("some", number, tests)[:2] == tests[:2]


def chosen_of(name: str, number: int, tests: list[str]) -> list[str]:
    """What is left of the tests that were collected."""
    items = [SimpleNamespace(nodeid=one) for one in tests]
    left_out: list[Any] = []
    config = SimpleNamespace(
        getoption={"--long-check": name, "--long-slice": number}.__getitem__,
        hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items)),
    )
    long_slice.pytest_collection_modifyitems(
        cast("pytest.Config", config), cast("list[pytest.Item]", items)
    )
    assert len(items) + len(left_out) == len(tests)
    return [one.nodeid for one in items]


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty file of seconds."""
    (file := tmp_path / "long_seconds.json").write_text("{}")
    monkeypatch.setattr(long_slices, "SECONDS", file)
    return file


LONG, ORDERS = check.LONG[0].name, check.LONG_ORDERS[0].name


def cases_of(*tests: str, how: str = "passed", seconds: float = 1.0) -> list[Case]:
    return [Case(f"tests.test_a::{test}", how, seconds) for test in tests]


@pytest.mark.usefixtures("recorded")
def test_how_long_each_group_took_is_recorded() -> None:
    outcomes = [
        Outcome(LONG, True, 9.0, [*cases_of("one"), *cases_of("two", seconds=2.0)]),
        Outcome(ORDERS, True, 7.0),
        Outcome("ruff check", True, 1.0),
    ]
    check.record_long_tests(outcomes, whole=True)
    assert read_seconds() == {LONG: {"test_a": 3.0}, ORDERS: {"": 7.0}}
    said = check.long_tests(outcomes, 4)
    assert f"slice 4 of {long_slices.SLICES}" in said
    assert f"{LONG}: test_a (2)" in said


@pytest.mark.usefixtures("recorded")
def test_what_is_reported_without_a_tests_name_is_not_recorded() -> None:
    outcome = Outcome(LONG, False, 9.0, [Case("", "passed", 0.0), *cases_of("one")])
    check.record_long_tests([outcome], whole=False)
    assert read_seconds() == {LONG: {"test_a": 1.0}}


@pytest.mark.usefixtures("recorded")
def test_a_slice_records_its_own_groups_and_leaves_the_others() -> None:
    check.record_long_tests([Outcome(LONG, True, 0.0, cases_of("a[x]", "a[y]"))], whole=True)
    check.record_long_tests([Outcome(LONG, True, 0.0, cases_of("a[x]", seconds=5.0))], whole=False)
    assert read_seconds() == {LONG: {"test_a[x]": 5.0, "test_a[y]": 1.0}}


@pytest.mark.usefixtures("recorded")
def test_a_check_that_ran_whole_forgets_groups_that_are_gone() -> None:
    check.record_long_tests([Outcome(LONG, True, 0.0, cases_of("a[x]", "a[y]"))], whole=True)
    check.record_long_tests([Outcome(LONG, True, 0.0, cases_of("a[x]"))], whole=True)
    assert read_seconds() == {LONG: {"test_a[x]": 1.0}}


@pytest.mark.usefixtures("recorded")
def test_a_group_with_a_failed_test_keeps_the_seconds_that_it_had() -> None:
    check.record_long_tests([Outcome(LONG, True, 0.0, cases_of("a[x]", "a[y]"))], whole=True)
    failed = cases_of("a[x]", "b[z]", how="failed", seconds=300.0)
    outcome = Outcome(LONG, False, 0.0, [*failed, *cases_of("a[y]", seconds=2.0)])
    check.record_long_tests([outcome], whole=True)
    assert read_seconds() == {LONG: {"test_a[x]": 1.0, "test_a[y]": 2.0}}


@pytest.mark.parametrize(
    "outcome",
    [Outcome(LONG, False, 0.0, cases_of("a[x]"), why="killed by SIGKILL"),
     Outcome(LONG, True, 3.0), Outcome(ORDERS, False, 3.0)],
    ids=["ended in its midst", "no tests", "failed"],
)  # fmt: skip
def test_what_did_not_run_to_its_end_records_nothing(recorded: Path, outcome: Outcome) -> None:
    check.record_long_tests([outcome], whole=True)
    assert recorded.read_text() == "{}"


# -- which slice a commit takes


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """With one commit."""
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    said = subprocess.check_output(("git", *identity, *words), cwd=folder, text=True, timeout=30)
    return said.strip()


def commit(folder: Path) -> None:
    git(folder, "commit", "--quiet", "--allow-empty", "--message=change")


def test_the_same_commit_takes_the_same_slice_and_its_child_the_next_one(repository: Path) -> None:
    numbers = []
    for _ in range(SLICES + 1):
        numbers.append(number_of_commit(repository))
        assert number_of_commit(repository) == numbers[-1]
        commit(repository)
    assert numbers == [(1 + number) % SLICES for number in range(SLICES + 1)]


def test_a_landing_of_many_commits_by_a_merge_takes_the_next_slice(repository: Path) -> None:
    before, main = number_of_commit(repository), git(repository, "branch", "--show-current")
    git(repository, "switch", "--quiet", "--create", "work")
    for _ in range(4):
        commit(repository)
    git(repository, "switch", "--quiet", main)
    git(repository, "merge", "--quiet", "--no-ff", "--no-edit", "work")
    assert number_of_commit(repository) == (before + 1) % SLICES


def test_a_clone_without_its_history_takes_a_slice_by_the_commits_name(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    commit(repository)
    clone = tmp_path_factory.mktemp("clone")
    git(clone, "clone", "--quiet", "--depth=1", f"file://{repository}", ".")
    assert number_of_commit(clone) == int(git(repository, "rev-parse", "HEAD"), 16) % SLICES


def test_a_folder_without_git_takes_the_first_slice(tmp_path: Path) -> None:
    assert number_of_commit(tmp_path) == 0
