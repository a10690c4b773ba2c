"""What is on disk and can't be read: named in the log once, counted, and passed over.

One record that was cut short, or that a newer kvmig wrote, must not end the server: if one
of a call, key or model can't be read, all others go on.
"""

from __future__ import annotations

import base64
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from sqlalchemy import RowMapping

from kvmig.accounts.usage import SpooledRecord
from kvmig.core.errors import ConfigError
from kvmig.fleet.tables import StoreError

Row = TypeVar("Row")

log = logging.getLogger(__name__)


class SetAside:
    """The records of one server that could not be read."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        """Things that could not be read, by kind."""
        self._named: set[tuple[str, str]] = set()

    def add(self, kind: str, name: str, why: object) -> None:
        """Log that an entry is set aside; logged once for each."""
        if (kind, name) not in self._named:
            self._named.add((kind, name))
            self.count[kind] += 1
            log.error("%s %s can't be read, and is set aside: %s", kind, name, why)

    def readable(
        self, kind: str, rows: Iterable[RowMapping], make: Callable[[RowMapping], Row]
    ) -> list[Row]:
        """What can be read of rows of the database; the rest stays there, and is set aside."""
        found = []
        for row in rows:
            try:
                found.append(make(row))
            except UNREADABLE as error:
                self.add(kind, str(row.get("prefix") or row["name"]), error)
        return found


def converted(row: RowMapping, column: str, kind: type[Row]) -> Row:
    """Raises StoreError for what another kvmig wrote, or none."""
    try:
        return msgspec.convert(row[column], kind)
    except msgspec.ValidationError as error:
        raise StoreError(f"{column} of {row['name']!r} can't be read: {error}") from error


UNREADABLE = (StoreError, ConfigError, msgspec.MsgspecError, KeyError, TypeError, ValueError)
"""The errors of reading a row that holds what it must not hold."""


def keep_records(folder: Path, source: str, records: Sequence[SpooledRecord]) -> Path:
    """Write a spool's records that can't be read where people find them, as they are (base64), a
    line each. Raises OSError.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{source}.jsonl"
    lines = [
        json.dumps({"seq": one.seq, "why": one.why, "record": _as_text(one.raw)}) for one in records
    ]
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w") as file:
        file.write("".join(f"{line}\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())
    return path


def _as_text(raw: object) -> str:
    return base64.b64encode(raw if isinstance(raw, bytes) else repr(raw).encode()).decode()


def keep_spool(folder: Path, spool: Path) -> Path:
    """Move a spool that is no database any more, with what belongs to it. Raises OSError."""
    folder.mkdir(mode=0o700, exist_ok=True)
    into = folder / spool.name
    number = 1
    while into.exists():
        number += 1
        into = folder / f"{spool.stem}.{number}{spool.suffix}"
    for ending in ("-wal", "-shm", ""):
        part = Path(f"{spool}{ending}")
        if part.exists():
            part.replace(f"{into}{ending}")
    return into
