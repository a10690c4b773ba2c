"""A new SQLite file that several open at once."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from kvmig.accounts.usage import UsageSpool
from kvmig.core.sqlite_wal import use_wal


def new_file_in_use(path: Path) -> sqlite3.Connection:
    """A connection that makes the file's first table, and has not committed it."""
    file = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    file.execute("BEGIN IMMEDIATE")
    file.execute("CREATE TABLE records (seq INTEGER PRIMARY KEY, record BLOB NOT NULL)")
    return file


def test_a_spool_is_read_though_another_process_makes_its_file(tmp_path: Path) -> None:
    path = tmp_path / "spool.sqlite"
    other = new_file_in_use(path)
    ending = threading.Timer(0.1, other.close)  # which takes back what was not committed
    ending.start()
    assert UsageSpool(path).read() == []
    ending.join()


def test_a_file_that_stays_in_use_is_an_error_after_the_wait(tmp_path: Path) -> None:
    other = new_file_in_use(tmp_path / "spool.sqlite")
    file = sqlite3.connect(tmp_path / "spool.sqlite", timeout=0.02)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        use_wal(file)
    file.close()
    other.close()
