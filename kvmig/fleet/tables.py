"""The tables of a fleet's database, and how its two kinds are opened: SQLite and PostgreSQL.

Times are Unix seconds. Rows of `audit` are only added, which triggers enforce; the id of the
newest row is the catalogue's version. One server at a time leads, and only it changes the
catalogue: it holds a lock on a file next to SQLite's, or an advisory lock that PostgreSQL ties to
one connection. Each leader has a token, greater than those before it. A server that connects again
takes the lock only if no other server has led in between.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    Engine,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    create_engine,
    delete,
    event,
    inspect,
    select,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from kvmig.core.errors import ConfigError, KvmigError
from kvmig.core.shown_urls import shown_url
from kvmig.core.sqlite_wal import use_wal
from kvmig.fleet.database_url import parse_database_url

SCHEMA = 19
"""The newest migration's number."""
OLDEST_SCHEMA = 8
"""The schema of 0.1.0; databases from before it, which was never released, are refused."""
LOCK_KEY = 0x6B766D6967
"""Number of PostgreSQL's advisory lock."""
LEDGER_KEY = 0x6B766D6968
"""The same, of the lock of transactions that change the ledger."""
LOCK_NOT_AVAILABLE = "55P03"
"""PostgreSQL's code."""
READING = "kvmig_reading"
"""Execution option of transactions that write nothing."""
QUICK_CHECK_BYTES = 64 << 20
"""SQLite files up to this size are read whole at the start."""
CONNECT_S = 5
STATEMENT_S = 30.0
"""Timeout of a statement in PostgreSQL."""
DEAD_S = 10.0
"""A connection is over when its other end acknowledges nothing for this time: the host, or the
network, is gone."""
IDLE_S = 10.0
"""A transaction ends when its server does nothing for this time: one that stands still, but whose
host acknowledges all, has locks that other hosts' servers wait for."""


class StoreError(KvmigError):
    """The database can't do it now, or can't be used at all; nothing was changed.

    There is one exception: PostgreSQL's connection broke at the commit itself. Then all or nothing
    was.
    """


class DatabaseUnusable(StoreError, ConfigError):
    """Nor will it do it later: it is damaged, read-only, of a newer kvmig, or something else's."""


class LeadershipLost(StoreError):
    """Another server leads: this one changes nothing any more."""


class GarbledJson:
    """What a column of JSON has in place of JSON; it fits no type."""


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return GarbledJson()


metadata = MetaData()

meta = Table(
    "meta",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", LargeBinary, nullable=False),
)

users = Table(
    "users",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("role", Text, nullable=False),
    Column("disabled", Boolean, nullable=False),
    Column("created", Double, nullable=False),
    Column("limits", JSON, nullable=False, server_default="{}"),
    Column("subject", Text, nullable=False, server_default=""),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("user_id", ForeignKey("users.id"), nullable=False, index=True),
    Column("name", Text, nullable=False),
    Column("prefix", Text, nullable=False, unique=True),
    Column("hash", LargeBinary, nullable=False),
    Column("terms", JSON, nullable=False),
    Column("created", Double, nullable=False),
    Column("revoked_at", Double),
    Column("version", Integer, nullable=False, index=True),
    Column("origin", Text, nullable=False, server_default="", index=True),
)

models = Table(
    "models",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("revision", Integer, nullable=False),
    Column("enabled", Boolean, nullable=False),
    Column("created", Double, nullable=False),
)

revisions = Table(
    "revisions",
    metadata,
    Column("model_id", ForeignKey("models.id", ondelete="CASCADE"), primary_key=True),
    Column("n", Integer, primary_key=True, autoincrement=False),
    Column("spec", JSON, nullable=False),
    Column("author", Text, nullable=False),
    Column("created", Double, nullable=False),
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("model_id", ForeignKey("models.id", ondelete="CASCADE"), primary_key=True),
    Column("base", Integer, nullable=False),
    Column("target", Integer, nullable=False),
    Column("canary", JSON, nullable=False),
    Column("hold_s", Double, nullable=False),
    Column("deadline_s", Double),
    Column("step", Integer, nullable=False),
    Column("since", Double, nullable=False),
    Column("state", Text, nullable=False),
    Column("why", Text, nullable=False),
)

aliases = Table(
    "aliases",
    metadata,
    Column("name", Text, primary_key=True),
    Column("model_id", ForeignKey("models.id"), primary_key=True),
    Column("weight", Integer, nullable=False),
)

audit = Table(
    "audit",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("at", Double, nullable=False),
    Column("actor", Text, nullable=False),
    Column("address", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("object", Text, nullable=False),
    Column("before", JSON(none_as_null=True)),
    Column("after", JSON(none_as_null=True)),
    sqlite_autoincrement=True,
)

usage = Table(
    "usage",
    metadata,
    Column("source", Text, primary_key=True),
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("call_id", Text, nullable=False),
    Column("key_id", Text, nullable=False, index=True),
    Column("model", Text, nullable=False),
    Column("began", Double, nullable=False, index=True),
    Column("ended", Double),
    Column("prompt", BigInteger, nullable=False),
    Column("cached", BigInteger, nullable=False, server_default="0"),
    Column("output", BigInteger, nullable=False),
    Column("characters", BigInteger, nullable=False, server_default="0"),
    Column("seconds", BigInteger, nullable=False, server_default="0"),
    Column("images", BigInteger, nullable=False, server_default="0"),
    Column("sequences", Integer, nullable=False),
    Column("moves", Integer, nullable=False, server_default="0"),
    Column("reruns", Integer, nullable=False),
    Column("ttft_ms", Double),
    Column("status", Text, nullable=False),
)

usage_daily = Table(
    "usage_daily",
    metadata,
    Column("day", Text, primary_key=True),
    Column("key_id", Text, primary_key=True),
    Column("model", Text, primary_key=True),
    Column("calls", BigInteger, nullable=False),
    Column("prompt", BigInteger, nullable=False),
    Column("cached", BigInteger, nullable=False, server_default="0"),
    Column("output", BigInteger, nullable=False),
    Column("characters", BigInteger, nullable=False, server_default="0"),
    Column("seconds", BigInteger, nullable=False, server_default="0"),
    Column("images", BigInteger, nullable=False, server_default="0"),
)

usage_pruned = Table(
    "usage_pruned",
    metadata,
    Column("source", Text, primary_key=True),
    Column("first", Integer, primary_key=True, autoincrement=False),
    Column("last", Integer, nullable=False),
)

grants = Table(
    "grants",
    metadata,
    Column("source", Text, primary_key=True),
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("key_id", Text, nullable=False, index=True),
    Column("day", Text, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("model", Text, nullable=False, server_default=""),
)

placement = Table(
    "placement",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("wanted", JSON, nullable=False),
)

device_sizes = Table(
    "device_sizes",
    metadata,
    Column("started_as", Text, primary_key=True),
    Column("sizes", JSON(none_as_null=True)),
    Column("measured", BigInteger, nullable=False, server_default="0"),
)

measured_rests = Table(
    "measured_rests",
    metadata,
    Column("engine", Text, primary_key=True),
    Column("device", Text, primary_key=True),
    Column("part", Text, primary_key=True),
    Column("family", Text, primary_key=True),
    Column("eager", Boolean, primary_key=True),
    Column("weights", BigInteger, primary_key=True, autoincrement=False),
    Column("kinds", Text, nullable=False, server_default=""),
    Column("vocabulary", BigInteger, nullable=False, server_default="0"),
    Column("rest", BigInteger, nullable=False),
    Column("model", Text, nullable=False),
    Column("at", Double, nullable=False),
)

leadership = Table(
    "leadership",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("token", BigInteger, nullable=False),
    Column("beat", BigInteger, nullable=False),
    Column("host", Text, nullable=False),
    Column("door", Text, nullable=False, server_default=""),
)
"""One row, see `kvmig.fleet.leadership.LeaderRow`."""

model_files = Table(
    "model_files",
    metadata,
    Column("source", Text, primary_key=True),
    Column("folder", Text, nullable=False, server_default=""),
    Column("revision", Text, nullable=False, server_default=""),
    Column("size", BigInteger, nullable=False, server_default="0"),
    Column("digest", Text, nullable=False, server_default=""),
    Column("pulled", Boolean, nullable=False),
    Column("pinned", Boolean, nullable=False),
    Column("created", Double, nullable=False),
    Column("last_used", Double, nullable=False),
)

workers = Table(
    "workers",
    metadata,
    Column("name", Text, primary_key=True),
    Column("labels", JSON, nullable=False),
    Column("cordoned", Boolean, nullable=False),
    Column("drained_at", Double),
    Column("drain_until", Double),
    Column("node", Text, nullable=False, server_default=""),
)


def upsert(
    connection: Connection,
    table: Table,
    keys: Sequence[str],
    rows: list[dict[str, Any]],
    add: Iterable[str] = (),
) -> None:
    """Write rows in place of those with their keys; add: columns that are added to."""
    insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    statement: Any = insert(table)
    added = set(add)
    changes = {
        name: table.c[name] + statement.excluded[name]
        if name in added
        else statement.excluded[name]
        for name in rows[0]
        if name not in keys
    }
    connection.execute(
        statement.on_conflict_do_update(index_elements=list(keys), set_=changes), rows
    )


def take_turn(connection: Connection) -> None:
    """Wait until no other server changes the ledger, and let none until this transaction's end.

    SQLite has one writer by itself.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": LEDGER_KEY})


class FleetDatabase:
    """A fleet's database. `open` it, then `close` it; one that doesn't lead is closed only."""

    def __init__(
        self,
        url: str,
        wait_s: float = 5.0,
        *,
        host: str = "",
        leads: bool = True,
        statement_s: float = STATEMENT_S,
    ) -> None:
        """wait_s: for a lock that another program has. host: name of the server's host.

        leads: whether it has the lock of the fleet's one leader. Without it, in PostgreSQL only, it
        is for reading, and for the ledger. statement_s: timeout of a statement in PostgreSQL.
        Raises ConfigError.
        """
        self._url = _checked_url(url)
        self._wait_s = wait_s
        self._host = host
        self.door = ""
        """HOST:PORT where this host takes calls of others while it leads, see `_door_of`."""
        self._lock: IO[Any] | None = None
        self._file_lock: IO[Any] | None = None
        self.token = 0
        """The leader's token; 0: it doesn't lead."""
        leader = (lambda: self.token) if leads else None
        self._engine = _engine(self._url, wait_s, statement_s, leader)
        self.name = shown_url(self._url.render_as_string()) if self.path is None else str(self.path)

    @property
    def path(self) -> Path | None:
        """SQLite's file; None for PostgreSQL."""
        if self._url.get_backend_name() != "sqlite":
            return None
        return Path(self._url.database or "")

    def open(self) -> None:
        """Take the database, and bring its tables to the newest schema. Raises StoreError.

        A file that can't be used is left as it is.
        """
        self.token = 0
        try:
            if self.path is not None:
                self._lock = _take_lock(self.path)
                with self._errors():
                    if not self.path.exists():
                        self.path.touch(mode=0o600)
                    self._file_lock = _take_file(self.path)
                    _check_file(self.path)
            with self.transaction() as connection:
                if _schema_of(connection, self.name) < SCHEMA:
                    _migrate(connection)
                attempt = connection.begin_nested()  # SQLite begins to write in a read-only file
                connection.execute(delete(meta))
                attempt.rollback()
                self.door = _door_of(connection, self.door)
                token = _take_lead(connection, self._host, self.door)
            self.token = token
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the database, for the next server."""
        self._engine.dispose()
        for one in (self._file_lock, self._lock):
            if one is not None:
                one.close()
        self._file_lock = self._lock = None

    @contextlib.contextmanager
    def transaction(self, *, reading: bool = False) -> Iterator[Connection]:
        """Commit all that is done within, or nothing of it. Raises StoreError."""
        with self._errors(), self._engine.connect() as connection:
            connection.execution_options(**{READING: reading})
            with connection.begin():
                yield connection

    @contextlib.contextmanager
    def raw(self) -> Iterator[sqlite3.Connection]:
        """SQLite's own connection, in no transaction."""
        with self._engine.raw_connection() as connection:
            found = connection.driver_connection
            assert isinstance(found, sqlite3.Connection)
            yield found

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        dbapi = self._engine.dialect.loaded_dbapi
        try:
            yield
        except DBAPIError as error:
            raise self._error(error.orig) from error
        except (dbapi.Error, OSError) as error:
            raise self._error(error) from error

    def _error(self, error: BaseException | None) -> StoreError:
        code = getattr(error, "sqlite_errorcode", -1) & 0xFF
        lasting = {
            sqlite3.SQLITE_READONLY: "is read-only",
            sqlite3.SQLITE_CORRUPT: "is damaged; restore a backup",
            sqlite3.SQLITE_NOTADB: "is no SQLite database, or a damaged one",
        }
        said = shown_url(str(error).strip().partition("\n")[0])
        passing = {
            sqlite3.SQLITE_BUSY: f"is locked by another program, for {self._wait_s:g} s now",
            sqlite3.SQLITE_FULL: "has no room left",
        }
        if code in lasting:
            return DatabaseUnusable(f"the fleet's database {self.name} {lasting[code]}")
        what = passing.get(code, f"can't be used: {said}")
        return StoreError(f"the fleet's database {self.name} {what}")


def _checked_url(url: str) -> URL:
    found = parse_database_url(url, "the fleet's database")
    if found.drivername == "sqlite" and not Path(found.database or "").is_absolute():
        shown = shown_url(found.render_as_string())
        raise ConfigError(f"the fleet's database is {shown}, must be a file's whole path")
    return found


def _engine(
    url: URL, wait_s: float, statement_s: float, leader: Callable[[], int] | None
) -> Engine:
    """Create an engine of one connection, so that the writer holds PostgreSQL's lock.

    leader: the writer's token; None: connections take no lock.
    """
    lite = url.get_backend_name() == "sqlite"
    arguments: dict[str, Any] = {"timeout": wait_s} if lite else _connection_limits(statement_s)
    try:
        engine = create_engine(
            url, pool_size=1, max_overflow=0, pool_pre_ping=not lite, connect_args=arguments,
            json_deserializer=_read_json,
        )  # fmt: skip
    except ImportError as error:
        raise ConfigError(f"{url.drivername} needs kvmig[postgres]: {error}") from error
    if lite:
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    else:

        @event.listens_for(engine, "connect")
        def set_up(connection: Any, _record: object) -> None:
            name = shown_url(url.render_as_string())
            _set_up_postgres(connection, name, wait_s, statement_s, leader)

    return engine


# -- SQLite


def _set_up_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # transactions begin where `_begin_sqlite` says
    use_wal(connection)
    for pragma in (
        "synchronous = FULL",
        "foreign_keys = ON",
        "recursive_triggers = ON",  # or INSERT OR REPLACE would get round those of `audit`
    ):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    reading = connection.get_execution_options().get(READING)
    connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


def _take_lock(path: Path) -> IO[Any]:
    """The lock of a database's one server: on a file of its own, which holds the server's pid."""
    found = path.resolve()
    beside = found.with_name(found.name + ".lock")
    file = _locked(path, beside, "a+", _named_there)
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _named_there(file: IO[Any]) -> str:
    """The process that has the lock on this file."""
    file.seek(0)
    return f"the server {file.read(20).strip() or '?'}"


def _take_file(path: Path) -> IO[Any]:
    """The same by the file itself, which may have several names: hard links, bind mounts.

    SQLite's own locks are of another kind, and don't meet this one.
    """
    return _locked(path, path, "rb", lambda _: "another server, under another name")


def _locked(database: Path, path: Path, mode: str, holder: Callable[[IO[Any]], str]) -> IO[Any]:
    """A file that no other process has locked. Raises StoreError, which says who has."""
    try:
        file = path.open(mode)
    except OSError as error:
        raise StoreError(f"the fleet's database {database} can't be used: {error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        who = holder(file)
        file.close()
        raise StoreError(f"the fleet's database {database} is in use by {who}") from error
    return file


def _check_file(path: Path) -> None:
    """Look at a file without changing it; a new one is empty."""
    if not path.stat().st_size:
        return
    looking = create_engine(
        "sqlite://",
        creator=lambda: sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True),
        poolclass=NullPool,
    )
    with looking.connect() as connection:
        if path.stat().st_size <= QUICK_CHECK_BYTES:
            said = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
            if said != "ok":
                raise DatabaseUnusable(f"the fleet's database {path} is damaged; restore a backup")
        _schema_of(connection, str(path))


# -- PostgreSQL


def _connection_limits(statement_s: float) -> dict[str, int]:
    """libpq's limits for a network that takes what is sent and gives no sign."""
    dead_s = min(DEAD_S, statement_s)
    return {
        "connect_timeout": round(min(CONNECT_S, statement_s)),
        "keepalives_idle": round(dead_s / 2),
        "keepalives_interval": 1,
        "keepalives_count": round(dead_s / 2),
        "tcp_user_timeout": round(1000 * dead_s),
    }


def _set_up_postgres(
    connection: Any,
    name: str,
    wait_s: float,
    statement_s: float,
    leader: Callable[[], int] | None,
) -> None:
    """Time limits, and the lock; its holder has its own name in `application_name`."""
    wait = f"{1000 * wait_s:.0f}"
    try:
        with connection.cursor() as cursor:
            for setting, value in (
                ("application_name", f"kvmig server {os.getpid()}"),
                ("lock_timeout", wait),
                ("statement_timeout", f"{1000 * statement_s:.0f}"),
                ("idle_in_transaction_session_timeout", f"{1000 * min(IDLE_S, statement_s):.0f}"),
                ("tcp_keepalives_idle", f"{DEAD_S / 2:.0f}"),  # or the lock outlives its host
                ("tcp_keepalives_interval", "1"),
                ("tcp_keepalives_count", f"{DEAD_S / 2:.0f}"),
            ):
                cursor.execute("SELECT set_config(%s, %s, false)", (setting, value))
            connection.commit()
            if leader is None:
                return
            _check_leader(cursor, leader())  # before the wait for a lock that will not come
            try:  # a server that has just been killed has it a moment longer
                cursor.execute("SELECT pg_advisory_lock(%s)", (LOCK_KEY,))
            except Exception as error:
                if getattr(error, "sqlstate", "") != LOCK_NOT_AVAILABLE:
                    raise
                connection.rollback()
                said = f"the fleet's database {name} is in use by {_holder(cursor)}"
                raise StoreError(said) from error
            _check_leader(cursor, leader())
        connection.commit()
    except BaseException:
        connection.close()
        raise


def _check_leader(cursor: Any, token: int) -> None:
    """Raises LeadershipLost if another server has led since this one does. token: 0: it doesn't."""
    if not token:
        return
    cursor.execute("SELECT token, host FROM leadership WHERE id = 1")
    row = cursor.fetchone()
    if row is None or row[0] != token:
        raise LeadershipLost(f"{(row and row[1]) or 'another server'} leads the fleet now")


def _holder(cursor: Any) -> str:
    cursor.execute(
        "SELECT application_name, client_addr FROM pg_locks JOIN pg_stat_activity USING (pid)"
        " WHERE locktype = 'advisory' AND granted AND (classid::bigint << 32 | objid::bigint) = %s",
        (LOCK_KEY,),
    )
    row = cursor.fetchone()
    return "another server" if row is None else " at ".join(str(one) for one in row if one)


# -- the leader


def _take_lead(connection: Connection, host: str, door: str) -> int:
    """Note that this server leads; its token."""
    before, now = int(connection.scalar(select(leadership.c.token)) or 0), 0
    if connection.dialect.name == "postgresql":
        # A replica that takes over may lack the newest token, which must not be used twice.
        now = connection.scalar(
            text("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint")
        )
    token = max(before + 1, now)
    row = {"id": 1, "token": token, "beat": 0, "host": host, "door": door}
    upsert(connection, leadership, ("id",), [row])
    return token


def _door_of(connection: Connection, door: str) -> str:
    """Return HOST:PORT at which others reach this host; empty: they don't. A missing HOST is the
    address from which this host has connected to the database."""
    if not door.startswith(":"):
        return door
    seen = connection.scalar(text("SELECT host(inet_client_addr())")) or "127.0.0.1"
    return f"[{seen}]{door}" if ":" in seen else f"{seen}{door}"


# -- the schema


def _schema_of(connection: Connection, name: str) -> int:
    """The number of the newest migration in a database; 0: it is empty. Raises StoreError."""
    found = set(inspect(connection).get_table_names())
    if not found:
        return 0
    if "alembic_version" not in found:
        raise DatabaseUnusable(f"the database {name} holds something else than a kvmig fleet")
    number = str(connection.scalar(text("SELECT version_num FROM alembic_version")))
    if not number.isdecimal():
        raise DatabaseUnusable(f"the database {name} holds something else than a kvmig fleet")
    if int(number) > SCHEMA:
        raise DatabaseUnusable(
            f"the fleet's database {name} has schema {int(number)}, this kvmig knows schemas up to"
            f" {SCHEMA}: start a newer kvmig, or restore a backup"
        )
    if int(number) < OLDEST_SCHEMA:
        raise DatabaseUnusable(
            f"the fleet's database {name} has schema {int(number)}, of a kvmig before 0.1.0; this"
            f" kvmig knows schemas from {OLDEST_SCHEMA}: restore a backup, or start a new database"
        )
    return int(number)


def _migrate(connection: Connection) -> None:
    from alembic import command  # a start that changes no tables needs it not
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "kvmig.fleet:migrations")
    config.attributes["connection"] = connection
    command.upgrade(config, f"{SCHEMA:04}")
