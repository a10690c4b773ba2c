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
TABLES = """
SELECT format('public.%I', relname) FROM pg_class
WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'
"""
DEFINITIONS = """
WITH relations AS (SELECT oid, xmin FROM pg_class WHERE relnamespace = 'public'::regnamespace),
versions AS (
  SELECT concat_ws(' ', 'relation', oid, xmin) AS version FROM relations
  UNION ALL SELECT concat_ws(' ', 'column', attrelid, attnum, column_of.xmin)
    FROM pg_attribute AS column_of JOIN relations ON relations.oid = attrelid
  UNION ALL SELECT concat_ws(' ', 'default', default_of.oid, default_of.xmin)
    FROM pg_attrdef AS default_of JOIN relations ON relations.oid = adrelid
  UNION ALL SELECT concat_ws(' ', 'trigger', trigger_on.oid, trigger_on.xmin)
    FROM pg_trigger AS trigger_on JOIN relations ON relations.oid = tgrelid
  UNION ALL SELECT concat_ws(' ', 'constraint', oid, xmin)
    FROM pg_constraint WHERE connamespace = 'public'::regnamespace
  UNION ALL SELECT concat_ws(' ', 'function', oid, xmin)
    FROM pg_proc WHERE pronamespace = 'public'::regnamespace
)
SELECT md5(string_agg(version, ',' ORDER BY version)) FROM versions
"""


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

    def keep(self, url: str) -> FilledDatabase:
        """A database as it is now, to be restored."""
        return FilledDatabase(url, self._dump(url), self._dump(url, "--data-only"))

    def _dump(self, url: str, *flags: str) -> str:
        """SQL that makes a database's tables and rows."""
        lines = self._run("pg_dump", "--inserts", "--no-owner", *flags, _plain(url)).splitlines()
        return "\n".join(line for line in lines if not line.startswith("\\"))  # those are psql's

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


class FilledDatabase:
    """A database that is restored to the tables and rows that it had when this object was made.

    As long as no test has changed a definition, `restore` replaces the rows only, which takes a
    third of the time that the tables take.
    """

    def __init__(self, url: str, whole: str, rows: str) -> None:
        """whole: SQL that makes its tables and rows in an empty schema; rows: the rows only."""
        self.url = url
        self._whole = f"DROP SCHEMA public CASCADE; CREATE SCHEMA public; {whole}".encode()
        with self._connection() as connection:
            tables = [str(name) for (name,) in connection.execute(TABLES)]
            self._definitions = _definitions(connection)
        # A connection that a test has left in a transaction is waited for here, then an error.
        emptied = "; ".join(f"DELETE FROM {name}" for name in tables)
        self._rows = (
            f"LOCK TABLE {', '.join(tables)} IN ACCESS EXCLUSIVE MODE;"
            f" SET LOCAL session_replication_role = replica; {emptied}; {rows}"
        ).encode()

    def restore(self) -> None:
        """Leave nothing of earlier tests in it."""
        with self._connection() as connection:
            if _definitions(connection) == self._definitions:
                connection.execute(self._rows)
            else:
                connection.execute(self._whole)
                self._definitions = _definitions(connection)

    def _connection(self) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(_plain(self.url), options=f"-c lock_timeout={LOCK_MS}")


def _definitions(connection: psycopg.Connection[tuple[object, ...]]) -> object:
    """A digest of the versions of all definitions in the schema: any change of one changes it."""
    found = connection.execute(DEFINITIONS).fetchone()
    assert found is not None
    return found[0]


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
