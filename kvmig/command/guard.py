"""`python -m kvmig.command.guard STOP_S REPORT WORD...`: runs one server, and leaves nothing of it.

The server is not ours and knows nothing of its parent. The guard's stdin is a pipe that ends with
the deployment, however that ends: then the server gets SIGTERM and STOP_S seconds, and all that it
has started is killed. REPORT is a descriptor on which the guard names the server's process id, or
the reason why it can't be started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from kvmig.process.descendants import descendants, parents

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KILLED = 128
"""An exit code above it is that of a server that a signal has killed."""
LOOK_S = 0.05
KILL_S = 10.0
"""Time for what was killed to be gone: a process that waits for a driver may take long."""
NOT_STARTED = 127


def main(argv: Sequence[str]) -> int:
    """The server's exit code, or 128 and the number of the signal that killed it."""
    stop_s, report, words = float(argv[0]), int(argv[1]), list(argv[2:])
    os.setpgid(0, 0)  # what ends the deployment's group must not end the guard
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # what loses its parent stays below the guard
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    for name in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(name, lambda *_: None)
    try:
        server = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            process_group=0,
            # It runs between fork and exec of a process with one thread.
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509
        )
    except OSError as error:
        os.write(report, f"!{words[0]} can't be started: {error.strerror}\n".encode())
        return NOT_STARTED
    os.write(report, f"{server.pid}\n".encode())
    os.close(report)
    try:
        if not _ends_by_itself(server, woken):
            server.terminate()
            _wait(server, stop_s)
    finally:
        _kill_all(server)
    code = server.poll()
    if code is None:  # it hangs in the kernel
        return KILLED + signal.SIGKILL
    return code if code >= 0 else KILLED - code


def _ends_by_itself(server: subprocess.Popen[bytes], woken: int) -> bool:
    """Wait for the server's end, which it returns, or for the deployment's, or SIGTERM."""
    stdin = sys.stdin.fileno()
    while server.poll() is None:
        ready, _, _ = select.select([stdin, woken], [], [])
        if stdin in ready and not os.read(stdin, 4096):
            return False
        if woken in ready and signal.SIGTERM in os.read(woken, 4096):
            return False
    return True


def _wait(server: subprocess.Popen[bytes], most_s: float) -> None:
    deadline = time.monotonic() + most_s
    while server.poll() is None and time.monotonic() < deadline:
        time.sleep(LOOK_S)


def _kill_all(server: subprocess.Popen[bytes]) -> None:
    """Kill all that the server has started, and itself."""
    own, deadline = os.getpid(), time.monotonic() + KILL_S
    while time.monotonic() < deadline:
        _reap(server)
        try:
            left = descendants([own], parents()) - {own}
        except OSError:  # no file is left to look with
            time.sleep(LOOK_S)
            continue
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)


def _reap(server: subprocess.Popen[bytes]) -> None:
    """Take the exit codes of the server, and then of its orphans."""
    if server.poll() is None:
        return
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
