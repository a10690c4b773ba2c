"""Golden outputs: equal ones are equal, what has changed is printed, a moved test is no change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from scripts import golden
from scripts.golden_outputs import COUNTS, OUTPUTS, SLOW, TEST_IDS, documents, metrics, schema, wire

Shown = dict[str, Mapping[str, str]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """What is shown now, by output; nothing of this process is changed."""
    found: Shown = {"a": {"one.txt": "1\n2\n", "two.txt": "x\n"}, "b": {TEST_IDS: "n\tf.py\n"}}
    monkeypatch.setattr(golden, "OUTPUTS", {name: lambda name=name: found[name] for name in found})
    monkeypatch.setattr(golden, "SLOW", ("b",))
    monkeypatch.setattr(golden, "make_environment", lambda: None)
    return found


def compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    status = golden.main(["compare", str(folder)])
    return status, capsys.readouterr().out


def test_what_has_not_changed_is_equal(
    shown: Shown, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert golden.main(["write", str(tmp_path)]) == 0
    assert compared(tmp_path, capsys) == (0, "Equal: a, b.\n")


def test_a_changed_line_is_printed(
    shown: Shown, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden.main(["write", str(tmp_path)])
    shown["a"] = {"one.txt": "1\n3\n", "new.txt": ""}
    status, printed = compared(tmp_path, capsys)
    assert status == 1
    assert printed.splitlines() == [
        "a/new.txt differs:", "  the file is new",
        "a/one.txt differs:", "  @@ -2 +2 @@", "  -2", "  +3",
        "a/two.txt differs:", "  the file is gone",
        "3 files differ.",
    ]  # fmt: skip


def test_a_long_difference_is_cut(
    shown: Shown, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden.main(["write", str(tmp_path)])
    shown["a"] = {**shown["a"], "one.txt": "y\n" * 100}
    _, printed = compared(tmp_path, capsys)
    assert "  ... and 3 lines more" in printed.splitlines()


def test_a_test_may_move_to_another_file_and_may_not_go(
    shown: Shown, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown["b"] = {TEST_IDS: "n\ta.py\nn\tb.py\ngone\ta.py\n"}
    golden.main(["write", str(tmp_path)])
    shown["b"] = {TEST_IDS: "n\ta.py\nn\tc.py\ngone\tc.py\n"}
    status, printed = compared(tmp_path, capsys)
    assert status == 0
    assert "b: 1 tests moved from a.py to c.py" in printed
    assert "b: 1 tests moved from b.py to c.py" in printed
    shown["b"] = {TEST_IDS: "n\ta.py\nnew\tc.py\n"}
    status, printed = compared(tmp_path, capsys)
    assert status == 1
    assert {"  -n", "  -gone", "  +new"} <= set(printed.splitlines())


def test_a_file_may_have_more_tests_and_may_not_have_fewer(
    shown: Shown, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown["a"] = {COUNTS: "a.py 2\nb.py 1\n"}
    golden.main(["write", str(tmp_path)])
    shown["a"] = {COUNTS: "a.py 3\nb.py 1\nc.py 1\n"}
    assert compared(tmp_path, capsys) == (0, "Equal: a, b.\n")
    shown["a"] = {COUNTS: "a.py 1\n"}
    status, printed = compared(tmp_path, capsys)
    assert status == 1
    assert "  a.py had 2 tests, and has 1" in printed.splitlines()
    assert "  b.py had 1 tests, and has none" in printed.splitlines()


def test_a_difference_from_what_the_repository_keeps_names_the_command(
    shown: Shown,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(golden, "KEPT", tmp_path)
    golden.main(["write", str(tmp_path), "--only", "a"])
    shown["a"] = {**shown["a"], "one.txt": "1\n"}
    status, printed = compared(tmp_path, capsys)
    assert status == 1
    assert printed.startswith(
        "a/one.txt differs (if that is meant: python -m scripts.golden write --only a):\n"
    )


def test_only_what_the_folder_has_is_compared(
    shown: Shown, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden.main(["write", str(tmp_path), "--quick"])
    assert compared(tmp_path, capsys) == (0, "Equal: a.\n")


def test_a_folder_without_outputs_is_refused(
    shown: Shown, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert golden.main(["compare", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: FOLDER is {tmp_path}, must be one that `write` has written\n"
    )


def test_slow_outputs_are_outputs() -> None:
    assert set(SLOW) < OUTPUTS.keys()


@pytest.mark.parametrize("output", [documents, metrics, schema, wire])
def test_an_output_is_the_same_twice(output: Callable[[], Mapping[str, str]]) -> None:
    first = output()
    assert first == output()
    assert all(first.values())
