"""An MPS daemon of a server's own (`--mps`), under which the processes on a GPU compute at the same
time instead of by turns.

A shell waits for the end of a pipe that this process holds, and then ends the daemon: so it ends
with the server, however that ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

from kvmig.core.errors import StartupError
from kvmig.core.killed import kill_and_wait
from kvmig.process.child import say
from kvmig.process.nvml import MPS_PIPES, mps_listens

CONTROL = "nvidia-cuda-mps-control"
LOGS = "CUDA_MPS_LOG_DIRECTORY"
ANSWER_S = 20.0
"""Time for the daemon's start, and for its end."""
_ENDS_IT = 'cat >/dev/null; echo quit | "$0"; rm -rf "$1"'


@contextmanager
def own_daemon(wanted: bool, environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Run a daemon until the end of the block: processes that start meanwhile are its clients.

    One that listens already is left alone. Raises StartupError if none can be started.
    """
    if not wanted or mps_listens(environment):
        yield
        return
    control = shutil.which(CONTROL, path=environment.get("PATH"))
    if control is None:
        raise StartupError(f"--mps needs {CONTROL}, which is not on the PATH")
    folder = Path(tempfile.mkdtemp(prefix="kvmig-mps-"))
    own = {MPS_PIPES[0]: str(folder / "pipe"), LOGS: str(folder / "log")}
    before = {name: environment.get(name) for name in own}
    try:
        for one in own.values():
            Path(one).mkdir()
        end = subprocess.Popen(
            ["sh", "-c", _ENDS_IT, control, str(folder)],
            env={**environment, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the server's
        )
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise StartupError(f"--mps: no MPS daemon starts: {error}") from error
    environment.update(own)
    try:
        _start(control, environment)
        yield
    finally:
        assert end.stdin is not None
        end.stdin.close()
        for name, value in before.items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value
        try:
            end.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            os.killpg(end.pid, signal.SIGKILL)  # also the program that it waits for
            kill_and_wait(end, "the shell that ends the MPS daemon")
            say(f"the MPS daemon of {folder} doesn't end")


def _start(control: str, environment: MutableMapping[str, str]) -> None:
    """Raises StartupError."""
    # To a file: the daemon keeps what it inherits, and a pipe would not end.
    with tempfile.TemporaryFile() as log:
        try:
            done = subprocess.run(
                [control, "-d"],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=ANSWER_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise StartupError(f"--mps: no MPS daemon starts: {error}") from error
        if done.returncode or not mps_listens(environment):
            log.seek(0)
            words = log.read().decode(errors="replace").strip() or f"exit status {done.returncode}"
            raise StartupError(f"--mps: no MPS daemon starts: {words.splitlines()[-1]}")
