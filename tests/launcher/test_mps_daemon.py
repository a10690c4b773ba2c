"""`--mps`: a daemon of the server's own, by a stand-in for NVIDIA's program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvmig.core.errors import StartupError
from kvmig.launcher import mps_daemon
from kvmig.launcher.mps_daemon import CONTROL, LOGS, own_daemon
from kvmig.process.nvml import MPS_PIPES, mps_listens

STAND_IN = """#!/bin/sh
if [ "$1" = -d ]; then
  {start}
else
  read word
  rm "$CUDA_MPS_PIPE_DIRECTORY/control"
  echo "$word" >> "$0.log"
fi
"""
STARTS = 'touch "$CUDA_MPS_PIPE_DIRECTORY/control"'


def install(folder: Path, start: str = STARTS) -> dict[str, str]:
    """The environment of a server that finds the stand-in."""
    program = folder / CONTROL
    program.write_text(STAND_IN.format(start=start))
    program.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, MPS_PIPES[0]: str(folder / "nobody's")}


def words_to(folder: Path) -> list[str]:
    """What the daemon was told after its start."""
    log = folder / f"{CONTROL}.log"
    return log.read_text().split() if log.exists() else []


def test_a_daemon_listens_until_the_server_ends(tmp_path: Path) -> None:
    environment = install(tmp_path)
    before = dict(environment)
    with own_daemon(True, environment):
        assert mps_listens(environment)
        assert words_to(tmp_path) == []
        pipes, logs = Path(environment[MPS_PIPES[0]]), Path(environment[LOGS])
        assert pipes.parent == logs.parent
    assert words_to(tmp_path) == ["quit"]
    assert not pipes.parent.exists()
    assert environment == before


def test_nothing_starts_that_nobody_wants(tmp_path: Path) -> None:
    environment = install(tmp_path)
    with own_daemon(False, environment):
        assert not mps_listens(environment)
    assert words_to(tmp_path) == []


def test_a_daemon_that_listens_already_is_left_alone(tmp_path: Path) -> None:
    environment = install(tmp_path)
    pipes = Path(environment[MPS_PIPES[0]])
    pipes.mkdir()
    (pipes / "control").touch()
    with own_daemon(True, environment):
        assert environment[MPS_PIPES[0]] == str(pipes)
    assert words_to(tmp_path) == []
    assert mps_listens(environment)


def test_without_nvidias_program_the_flag_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(StartupError, match=f"--mps needs {CONTROL}, which is not on the PATH"),
        own_daemon(True, {"PATH": str(tmp_path)}),
    ):
        pass


@pytest.mark.parametrize(
    ("start", "words"),
    [("echo no device is here >&2; exit 1", "no device is here"), ("exit 0", "exit status 0")],
)
def test_a_daemon_that_does_not_start_is_an_error_with_its_words(
    tmp_path: Path, start: str, words: str
) -> None:
    environment = install(tmp_path, start)
    before = dict(environment)
    with pytest.raises(StartupError, match=words), own_daemon(True, environment):
        pass
    assert environment == before


def test_a_server_whose_daemon_does_not_end_ends_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = install(tmp_path)
    program = tmp_path / CONTROL
    with own_daemon(True, environment):
        pid = tmp_path / "pid"
        program.write_text(f"#!/bin/sh\necho $$ > {pid}\nexec sleep 600\n")
        monkeypatch.setattr(mps_daemon, "ANSWER_S", 1.0)
    assert "the MPS daemon of " in capsys.readouterr().err
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid.read_text().strip()}").exists():
        assert time.monotonic() < deadline, "the program that should have ended it stays"
        time.sleep(0.02)


def test_where_no_process_can_be_started_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    environment = install(tmp_path)
    before = dict(environment)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(StartupError, match="unavailable"), own_daemon(True, environment):
        pass
    assert environment == before
    assert not list(tmp_path.glob("kvmig-mps-*"))


HOLDS = """
import os, sys, time
from kvmig.launcher.mps_daemon import own_daemon
with own_daemon(True):
    print(os.environ["CUDA_MPS_PIPE_DIRECTORY"], flush=True)
    time.sleep(60)
"""


def test_a_server_that_is_killed_leaves_no_daemon(tmp_path: Path) -> None:
    environment = {**os.environ, **install(tmp_path)}
    command = [sys.executable, "-c", HOLDS]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pipes = Path(server.stdout.readline().strip())
        assert (pipes / "control").exists()
        server.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while pipes.parent.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not pipes.parent.exists()
    assert words_to(tmp_path) == ["quit"]
