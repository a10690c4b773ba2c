"""A nursery of one's own, and servers that are forked there, for benchmarks and tests."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from kvmig.core.errors import StartupError
from kvmig.process.fork_server import (
    HANDED,
    SERVERS,
    ForkDone,
    ForkExited,
    ForkOrder,
    digest,
    join,
    likeness,
    receive_news,
    send_order,
)
from kvmig.process.supervisor import UNSEEN, how_it_ended

LOAD_S = 300.0
"""Where nothing is compiled yet it takes a minute, beside others more."""
END_S = 10.0


class Nursery:
    """`python -m kvmig.launcher.shared_fork_server` for one engine, ended at the end of the block.

    module: one that does the same in its place. python: the environment that it is of.
    """

    def __init__(
        self,
        engine: str,
        environment: Mapping[str, str] = os.environ,
        module: str = "kvmig.launcher.shared_fork_server",
        python: str = sys.executable,
    ) -> None:
        self._module = module
        self._python = python
        self._folder = tempfile.TemporaryDirectory(prefix="kvmig-nursery-")
        self._engine = engine
        self._own = dict(environment)
        self.address = str(Path(self._folder.name) / "socket")
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Of a server that is to use it."""
        return {**self._own, HANDED: self.address}

    def __enter__(self) -> Self:
        command = [self._python, "-m", self._module, self._engine, self.address]
        self.process = subprocess.Popen(command, env=self._own, stdin=subprocess.PIPE)
        deadline = time.monotonic() + LOAD_S
        while not self.listens():
            code = self.process.poll()
            if code is not None or time.monotonic() > deadline:
                self.close()
                how = "is too slow" if code is None else f"ended ({how_it_ended(code)})"
                raise StartupError(f"the nursery {how}")
            time.sleep(0.02)
        return self

    def listens(self) -> bool:
        """Whether it takes clients."""
        try:
            join(self.address, {}).close()
        except StartupError:
            return False
        return True

    def close(self) -> None:
        """End it, at the latest in END_S, for its clients may be there still; they don't mind."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._folder.cleanup()

    def __exit__(self, *_: object) -> None:
        self.close()


class ForkedServer:
    """A `kvmig.serve` forked in a nursery; the part of `subprocess.Popen` that is used here."""

    def __init__(
        self,
        flags: Sequence[str],
        environment: Mapping[str, str],
        output: int | None = None,
    ) -> None:
        """environment: names the nursery. output: descriptor of its stdout and stderr.

        Raises StartupError if it can't be forked there.
        """
        self.args = ["kvmig.serve", *flags]
        self.returncode: int | None = None
        wanted = {**likeness(), SERVERS: digest(environment)}
        self._nursery = join(environment[HANDED], wanted)
        self._watched: int | None = None
        said = (1, 2) if output is None else (output, output)
        try:
            order = ForkOrder("kvmig.serve", flags, environment, tied=True)
            send_order(self._nursery, order, (0, *said))
            news = receive_news(self._nursery)
            if not isinstance(news, ForkDone):
                raise StartupError(f"the nursery has forked nothing: {news}")
        except OSError as error:
            self._nursery.close()
            raise StartupError(f"the nursery has forked nothing: {error}") from error
        except StartupError:
            self._nursery.close()
            raise
        self.pid = news.pid

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        return self._ended_in(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """The same, once it has. Raises subprocess.TimeoutExpired."""
        code = self._ended_in(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """If it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def _ended_in(self, timeout: float | None) -> int | None:
        if self.returncode is None and self._watched is None and comes(self._nursery, timeout):
            if isinstance(news := receive_news(self._nursery), ForkExited):
                self.returncode = news.code
            else:
                self._watch()
            self._nursery.close()
        if self.returncode is None and self._watched is not None and comes(self._watched, timeout):
            os.close(self._watched)
            self.returncode = UNSEEN
        return self.returncode

    def _watch(self) -> None:
        """The nursery is gone, and tells nothing any more."""
        try:
            self._watched = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self.returncode = UNSEEN


def comes(source: socket.socket | int, timeout: float | None) -> bool:
    """Whether there is something to be read within the time."""
    return bool(select.select([source], [], [], timeout)[0])


def forked_for(launcher: int) -> list[int]:
    """The instances of a launcher that a nursery has forked: it holds the other end of their stdin.

    A launcher's own children, too.
    """
    held = {_open_at(launcher, number) for number in _numbers(Path(f"/proc/{launcher}/fd"))}
    held -= {_open_at(launcher, number) for number in range(3)}  # others have those, too
    pipes = {one for one in held if one.startswith("pipe:")}
    return [pid for pid in _numbers(Path("/proc")) if _open_at(pid, 0) in pipes]


def _numbers(folder: Path) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return [int(one.name) for one in folder.iterdir() if one.name.isdecimal()]
    return []


def _open_at(pid: int, descriptor: int) -> str:
    with contextlib.suppress(FileNotFoundError, PermissionError, ProcessLookupError):
        return Path(f"/proc/{pid}/fd/{descriptor}").readlink().name
    return ""
