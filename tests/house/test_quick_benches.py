"""`scripts.quick_benches`: no benchmark is forgotten, and what each run comes to is kept."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from scripts import quick_benches
from scripts.quick_benches import (
    EXCLUDED,
    ROOT,
    RUNS,
    QuickRun,
    choose,
    find_programs,
    is_excluded,
    judge,
    run_program,
)

PROGRAMS = find_programs()
MISSED = "missed: a is 2.5, should be at most 2"
LEFT_OUT = "left out: p99_ratio, whose target needs the whole run"
STARTS_ANOTHER = """
import subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True
)
print(child.pid, flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(1)
"""


def python(text: str) -> list[str]:
    return [sys.executable, "-S", "-c", text]


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- which programs there are


def test_each_program_of_bench_runs_or_is_excluded_with_its_reason() -> None:
    programs = {name.split()[0] for name in RUNS}
    assert {one for one in PROGRAMS if not is_excluded(one)} == programs
    assert all(EXCLUDED.values())
    assert all(any(one.startswith(name) for one in PROGRAMS) for name in EXCLUDED)


def test_each_program_of_the_readmes_table_is_found() -> None:
    named = re.findall(
        r"^\| `python -m (bench[.\w]*)", (ROOT / "bench/README.md").read_text(), re.M
    )
    assert len(named) > 40
    assert set(named) <= set(PROGRAMS)


def test_a_program_is_found_by_its_main_part_and_its_quick_mode(tmp_path: Path) -> None:
    folder = tmp_path / "bench"
    (folder / "part").mkdir(parents=True)
    main = 'if __name__ == "__main__":\n    main()\n'
    (folder / "one.py").write_text(f"root = report.parser(__doc__)\n{main}")
    (folder / "part" / "__main__.py").write_text(f"if options.quick: pass\n{main}")
    (folder / "helper.py").write_text("def f(quick): ...\n")
    (folder / "server.py").write_text(main)
    assert find_programs(folder) == ["bench.one", "bench.part"]


# -- which of them run


NAMES = ("bench.drain", "bench.units --memory", "bench.units --shift")


@pytest.mark.parametrize(
    ("only", "skip", "chosen"),
    [
        ((), (), NAMES),
        (("units",), (), NAMES[1:]),
        (("bench.units --shift", "drain"), (), (NAMES[0], NAMES[2])),
        ((), ("bench.units --memory",), (NAMES[0], NAMES[2])),
        (("bench.units",), ("bench.units --shift",), NAMES[1:2]),
    ],
)
def test_programs_are_picked_by_name_by_its_last_part_or_by_the_command(
    only: tuple[str, ...], skip: tuple[str, ...], chosen: tuple[str, ...]
) -> None:
    assert choose(NAMES, only, skip) == [*chosen]


def test_a_name_that_no_program_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert quick_benches.main(["--skip", "drian"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --skip is drian, must be one of bench.imports, ")


# -- how they went


def test_a_program_that_passes_is_ok_and_names_what_it_left_out() -> None:
    one = run_program("a", python(f"print({LEFT_OUT!r})"), 20)
    assert (one.state, one.lines, one.left_out) == ("ok", [], ["p99_ratio"])
    assert one.line().endswith("ok (1 left out)")


def test_a_program_that_misses_has_the_lines_of_the_targets() -> None:
    text = f"import sys; print('figures'); sys.exit({MISSED!r})"
    one = run_program("a", python(text), 20)
    assert (one.state, one.lines) == ("missed", [MISSED])
    assert one.line().splitlines()[1:] == [f"    {MISSED}"]


def test_a_program_that_breaks_has_its_last_lines() -> None:
    one = run_program("a", python("print('before'); raise ValueError('no figure')"), 20)
    assert one.state == "failed"
    assert one.lines[0] == "before"
    assert one.lines[-2:] == ["ValueError: no figure", "exit status 1"]


def test_an_end_by_a_signal_is_no_missed_target() -> None:
    assert judge("a", 1.0, [MISSED], -9, late=False).state == "failed"


def test_a_program_that_takes_too_long_is_ended_with_all_that_it_started() -> None:
    one = run_program("a", python(STARTS_ANOTHER), 2.0)
    child, *rest = one.lines
    assert one.state == "failed"
    assert rest[0] == "interrupted"
    assert rest[-1].startswith("it had not ended after ")
    assert not runs(int(child))


def test_a_program_is_interrupted_also_where_a_shell_lets_its_jobs_ignore_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        one = run_program("a", python("import time; time.sleep(600)"), 0.5)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "KeyboardInterrupt" in one.lines


def test_a_program_that_does_not_heed_its_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_benches, "END_S", 0.3)
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
    began = time.monotonic()
    assert run_program("a", python(deaf), 0.5).state == "failed"
    assert time.monotonic() - began < 20


# -- what is kept


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs: the first passes, the second misses a target."""
    texts = {"bench.one": "", "bench.two": f"import sys; sys.exit({MISSED!r})"}
    monkeypatch.setattr(quick_benches, "RUNS", dict.fromkeys(texts, 1.0))
    monkeypatch.setattr(quick_benches, "command_of", lambda name: python(texts[name]))


@pytest.mark.usefixtures("stand_ins")
def test_each_program_is_a_line_and_a_summary_comes_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "quick.json"
    assert quick_benches.main(["--out", str(file)]) == 1
    load, one, two, missed, counts, names = capsys.readouterr().out.splitlines()
    assert load.startswith("the machine's load is ")
    assert (one.split()[0], one.split()[-1]) == ("bench.one", "ok")
    assert (two.split()[0], missed.strip()) == ("bench.two", MISSED)
    assert counts == "2 runs in 0 minutes: 1 ok"
    assert names == "missed: bench.two"
    document = json.loads(file.read_text())
    assert [(row["name"], row["state"]) for row in document["runs"]] == [
        ("bench.one", "ok"), ("bench.two", "missed")
    ]  # fmt: skip
    assert document["machine"]["cores"] >= 1


@pytest.mark.usefixtures("stand_ins")
def test_an_interrupted_run_has_kept_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, run = tmp_path / "quick.json", quick_benches.run_program

    def stops(name: str, command: list[str], limit_s: float) -> QuickRun:
        if name == "bench.two":
            raise KeyboardInterrupt
        return run(name, command, limit_s)

    monkeypatch.setattr(quick_benches, "run_program", stops)
    with pytest.raises(KeyboardInterrupt):
        quick_benches.main(["--out", str(file)])
    assert [row["name"] for row in json.loads(file.read_text())["runs"]] == ["bench.one"]


@pytest.mark.usefixtures("stand_ins")
def test_the_list_says_how_long_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert quick_benches.main(["--list", "--only", "one"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["bench.one", "1", "s"]
