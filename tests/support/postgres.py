"""A PostgreSQL cluster of the tests' own: on a Unix socket, in a temporary folder, by no root."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psycopg

START_S = 180.0
LOCK_MS = 20_000
"""So long a connection that a test has left open may keep the next one waiting."""


def programs() -> Path | None:
    """The folder with initdb and postgres; None if there is none here."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)
    on_path = shutil.which("initdb")
    return found[0].parent if found else Path(on_path).parent if on_path else None


def _user() -> str | None:
    """PostgreSQL doesn't run as root; None: the tests don't either."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


class Cluster:
    """PostgreSQL that can be stopped and started again."""

    def __init__(self, bin_folder: Path, folder: Path) -> None:
        self._bin = bin_folder
        self._folder = folder
        self._server: subprocess.Popen[bytes] | None = None
        self._numbers = count()
        user = _user()
        if user is not None:
            shutil.chown(folder, user)
        self._run("initdb", "-D", str(folder / "data"), "-U", "kvmig", "-A", "trust", "-N")

    def new(self) -> str:
        """The URL of a new, empty database."""
        name = f"fleet{next(self._numbers)}"
        self._run("createdb", "-h", str(self._folder), "-U", "kvmig", name)
        return f"postgresql+psycopg://kvmig@/{name}?host={self._folder}"

    def dump(self, url: str) -> str:
        """What makes a database's tables and rows, as SQL."""
        lines = self._run("pg_dump", "--inserts", "--no-owner", _plain(url)).splitlines()
        return "\n".join(line for line in lines if not line.startswith("\\"))  # those are psql's

    def refill(self, url: str, dumped: str) -> None:
        """Leave nothing in a database but what was dumped: sooner done than a new one."""
        whole = f"DROP SCHEMA public CASCADE; CREATE SCHEMA public; {dumped}"
        with psycopg.connect(_plain(url), options=f"-c lock_timeout={LOCK_MS}") as connection:
            connection.execute(whole.encode())

    def start(self) -> None:
        """Return once it takes connections."""
        self._server = subprocess.Popen(
            [
                self._bin / "postgres", "-D", self._folder / "data", "-k", self._folder,
                "-c", "listen_addresses=", "-c", "fsync=off", "-c", "log_min_messages=fatal",
            ],
            user=_user(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + START_S
        ready = [str(self._bin / "pg_isready"), "-q", "-h", str(self._folder), "-U", "kvmig"]
        while subprocess.run(ready, check=False, timeout=START_S).returncode:
            assert self._server.poll() is None, "PostgreSQL has ended"
            assert time.monotonic() < deadline, "PostgreSQL takes no connections"
            time.sleep(0.05)

    def stop(self) -> None:
        """At once; connections break."""
        if self._server is not None:
            self._server.send_signal(signal.SIGINT)
            self._server.wait(START_S)
            self._server = None

    def _run(self, program: str, *args: str) -> str:
        done = subprocess.run(
            [self._bin / program, *args],
            user=_user(), check=True, timeout=START_S, capture_output=True, cwd="/", text=True,
        )  # fmt: skip
        return done.stdout


def _plain(url: str) -> str:
    """As PostgreSQL's own programs take it."""
    return url.replace("+psycopg", "", 1)


@contextmanager
def cluster(bin_folder: Path) -> Iterator[Cluster]:
    """One that runs; ended and removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="kvmig-pg-") as folder:
        made = Cluster(bin_folder, Path(folder))
        try:
            made.start()
            yield made
        finally:
            made.stop()
