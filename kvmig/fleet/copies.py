"""Copies of SQLite's file, made while another process may write it."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

PAGES = 256
"""Pages per step: a megabyte."""
PAUSE_S = 0.002
"""Pause between two steps, for other users of the disk."""


def copy_sqlite(path: Path, into: Path) -> None:
    """Copy the file as it is now, without what is written meanwhile. Raises sqlite3.Error.

    Its read transaction keeps what it copies; with a write-ahead log that holds up no writer, and
    no write makes the copy begin again.
    """
    with (
        closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as source,
        closing(sqlite3.connect(into)) as target,
    ):
        source.execute("BEGIN")
        source.execute("SELECT count(*) FROM sqlite_master").fetchone()
        source.backup(target, pages=PAGES, progress=lambda *_: time.sleep(PAUSE_S))
