"""What a call has used, and the file in which a front end keeps that until it is merged.

A record says all of a call so far; a later one of the same number takes its place. So a record may
be written, read and merged again and again, and counts once.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from kvmig.core.sqlite_wal import use_wal

WAIT_S = 5.0
"""Time to wait for others that write to the file."""
DAMAGES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
Status = Literal["running", "finished", "cut"]


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One call, as far as it has come. Tokens are those that went to the client."""

    seq: int
    """Unique among those of its file."""
    call_id: str
    """The x-request-id, which clients may choose."""
    account: str
    """Id of the key; empty: without one."""
    model: str
    """Name of the deployment's model."""
    began: float
    """Unix time."""
    ended: float | None = None
    prompt: int = 0
    """Tokens, once a prompt, however many answers it has."""
    cached: int = 0
    """Tokens of the prompt that a prefix cache had; 0 where the engine doesn't report it."""
    output: int = 0
    characters: int = 0
    """Characters of text that was made speech."""
    seconds: int = 0
    """Seconds of recordings that were made text, rounded up for each."""
    images: int = 0
    """Images that were made."""
    sequences: int = 0
    moves: int = 0
    """Migrations of its sequences, after which the client's tokens came from elsewhere."""
    reruns: int = 0
    ttft_ms: float | None = None
    status: Status = "running"
    """finished: the client was sent the whole answer. cut: it left, or got an error, or its front
    end was killed, which leaves `ended` unknown."""


HAND_OVER = b"usage "
"""Begins a line in which a front end hands records over, and its answer once they are kept."""


class HandOver(msgspec.Struct, frozen=True):
    """Records that a front end can't write into its spool."""

    source: str
    records: Sequence[UsageRecord]


RESERVE_BYTES = 2 << 20
"""Reserve for the last records of a front end whose disk is full: some thousands of calls."""


class SpooledRecord(NamedTuple):
    """A record as a spool has it."""

    seq: int
    raw: object
    """The row's bytes, or what else is there."""
    record: UsageRecord | None
    """The record; None: it can't be read."""
    why: str = ""
    """Why it can't."""


MOST_COUNT = 2**53
MOST_NUMBER = 2**31 - 1
MOST_TIME = 1e11


def read_record(seq: int, raw: object) -> SpooledRecord:
    """Read what may be cut short, of another kvmig, or anything."""
    if not isinstance(raw, bytes):
        return SpooledRecord(seq, raw, None, "it is no text")
    try:
        record = msgspec.json.decode(raw, type=UsageRecord)
    except msgspec.MsgspecError as error:
        return SpooledRecord(seq, raw, None, str(error))
    wrong = _wrong(seq, record)
    return SpooledRecord(seq, raw, None if wrong else record, wrong)


def _wrong(seq: int, record: UsageRecord) -> str:
    """Which field has a value that no call has; empty: none."""
    if record.seq != seq:
        return f"its seq is {record.seq}, must be {seq}"
    for name, most in (
        ("seq", MOST_NUMBER),
        ("prompt", MOST_COUNT),
        ("cached", MOST_COUNT),
        ("output", MOST_COUNT),
        ("characters", MOST_COUNT),
        ("seconds", MOST_COUNT),
        ("images", MOST_COUNT),
        ("sequences", MOST_NUMBER),
        ("moves", MOST_NUMBER),
        ("reruns", MOST_NUMBER),
        ("began", MOST_TIME),
        ("ended", MOST_TIME),
    ):
        value = getattr(record, name)
        if value is not None and not 0 <= value <= most:
            return f"its {name} is {value}, must be 0 to {most:g}"
    for name in ("call_id", "account", "model"):
        if "\0" in getattr(record, name):
            return f"its {name} has a NUL"
    return ""


class SpoolDamaged(OSError):
    """A spool is no database, or a damaged one."""


class UsageSpool:
    """A SQLite file of records. The front end writes, the fleet's server takes. Blocking."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def source(self) -> str:
        """The front end's name, as in the ledger."""
        return self._path.stem

    @property
    def _reserved(self) -> Path:
        return self._path.with_suffix(".reserve")

    def create(self) -> None:
        """Be there, without any record: a front end without a spool is gone. Raises OSError."""
        with self._open():
            pass

    def reserve(self) -> None:
        """Take room on the disk that nothing else may have. Raises OSError."""
        with self._reserved.open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)

    def use_reserve(self) -> None:
        """Leave that room to the next records."""
        self._reserved.unlink(missing_ok=True)

    def write(self, records: Iterable[UsageRecord]) -> None:
        """Keep records, in place of older ones with their numbers. Raises OSError."""
        rows = [(one.seq, msgspec.json.encode(one)) for one in records]
        with self._open() as file, file:
            file.executemany(
                "INSERT INTO records VALUES (?, ?) ON CONFLICT (seq) DO UPDATE SET record ="
                " excluded.record",
                rows,
            )

    def read(self, after: int = 0, most: int = 5_000) -> list[UsageRecord]:
        """What can be read of `rows`. Raises OSError."""
        return [one.record for one in self.rows(after, most) if one.record is not None]

    def rows(self, after: int = 0, most: int = 5_000) -> list[SpooledRecord]:
        """The rows with numbers greater than `after`, in order, readable or not.

        Raises OSError.
        """
        with self._open() as file:
            rows = file.execute(
                "SELECT seq, record FROM records WHERE seq > ? ORDER BY seq LIMIT ?", (after, most)
            )
            return [read_record(seq, raw) for seq, raw in rows]

    def forget(self, kept: Iterable[SpooledRecord]) -> None:
        """Drop those that are kept elsewhere, unless others have taken their places.

        Raises OSError.
        """
        rows = [(one.seq, one.raw) for one in kept]
        with self._open() as file, file:
            file.executemany(
                "DELETE FROM records WHERE seq = ? AND CAST(record AS BLOB) IS CAST(? AS BLOB)",
                rows,
            )

    def mark_left(self) -> None:
        """Release the spool: its front end has ended. Raises OSError."""
        self._left.touch()

    @property
    def left(self) -> bool:
        """Whether it is not written any more."""
        return self._left.exists()

    @property
    def _left(self) -> Path:
        return self._path.with_suffix(".left")

    def remove(self) -> None:
        """Remove the spool's files. Raises OSError."""
        for ending in ("", "-wal", "-shm"):
            Path(f"{self._path}{ending}").unlink(missing_ok=True)
        self.use_reserve()
        self._left.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            file = sqlite3.connect(self._path, timeout=WAIT_S)
        except sqlite3.Error as error:
            raise OSError(f"{self._path}: {error}") from error
        file.text_factory = bytes
        try:
            use_wal(file)
            file.execute("PRAGMA synchronous = NORMAL")  # a killed process loses nothing
            file.execute(
                "CREATE TABLE IF NOT EXISTS records (seq INTEGER PRIMARY KEY, record BLOB NOT NULL)"
            )
            yield file
        except sqlite3.Error as error:
            if (getattr(error, "sqlite_errorcode", 0) & 0xFF) in DAMAGES:
                raise SpoolDamaged(f"{self._path}: {error}") from error
            raise OSError(f"{self._path}: {error}") from error
        finally:
            file.close()
