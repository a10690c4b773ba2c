"""SQLite's write-ahead log, switched on while others may open the same new file."""

from __future__ import annotations

import sqlite3

ATTEMPTS = 100


def use_wal(file: sqlite3.Connection) -> None:
    """Let readers and a writer work side by side from now on.

    SQLite waits for others here only if it is asked for the whole file: it does so as long as the
    connection's timeout says. Raises sqlite3.OperationalError.
    """
    for left in reversed(range(ATTEMPTS)):
        try:
            file.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or not left:
                raise
        file.execute("BEGIN EXCLUSIVE")
        file.rollback()
