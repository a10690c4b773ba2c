"""What a fleet's files are shared with: backups, other servers, other programs in a folder."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from kvmig.accounts.keys import KeyTerms
from kvmig.core.errors import ConfigError
from kvmig.fleet.copies import copy_sqlite
from kvmig.fleet.settings import FleetSettings, make_folders
from kvmig.fleet.store import FleetStore
from kvmig.fleet.tables import StoreError
from tests.support.fleet_stores import ANNA, Place


def test_orders_are_carried_out_during_a_backup(sqlite_place: Place) -> None:
    store = sqlite_place.store()
    store.open()
    store.add_user("bea", "user", ANNA)
    with store.database.transaction() as connection:
        connection.exec_driver_sql("CREATE TABLE ballast (it BLOB)")
        for _ in range(100):
            connection.exec_driver_sql("INSERT INTO ballast VALUES (randomblob(1000000))")
    saved = sqlite_place.folder / "saved"
    copying = threading.Thread(target=store.backup, args=(saved,))
    copying.start()
    longest, orders = 0.0, 0
    while copying.is_alive():
        began = time.monotonic()
        store.create_key("bea", f"k{orders}", KeyTerms(), ANNA)
        longest, orders = max(longest, time.monotonic() - began), orders + 1
    copying.join()
    store.close()
    assert orders > 10, f"{orders} orders, the longest took {longest:.3f} s"
    with closing(sqlite3.connect(saved)) as copy:
        assert copy.execute("PRAGMA quick_check").fetchone() == ("ok",)
        assert copy.execute("SELECT count(*) FROM ballast").fetchone() == (100,)


def test_a_copy_is_of_one_moment_whatever_is_written_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with closing(sqlite3.connect(path)) as file:
        file.execute("PRAGMA journal_mode = WAL")
        file.execute("CREATE TABLE a (it BLOB)")
        with file:
            file.executemany("INSERT INTO a VALUES (?)", [(b"x" * 100_000,)] * 200)
        copying = threading.Thread(target=copy_sqlite, args=(path, tmp_path / "b.sqlite"))
        copying.start()
        while copying.is_alive():
            with file:
                file.execute("INSERT INTO a VALUES ('y')")
        copying.join()
    with closing(sqlite3.connect(tmp_path / "b.sqlite")) as copy:
        assert copy.execute("PRAGMA quick_check").fetchone() == ("ok",)


def by_symlink(path: Path, other: Path) -> None:
    other.symlink_to(path)


def by_folder(path: Path, other: Path) -> None:
    other.parent.rmdir()
    other.parent.symlink_to(path.parent)


@pytest.mark.parametrize("how", [by_symlink, os.link, by_folder])
def test_two_servers_never_have_one_database_whatever_its_name(
    how: object, sqlite_place: Place, tmp_path: Path
) -> None:
    assert callable(how)
    store = sqlite_place.store()
    store.open()
    folder = tmp_path / "other"
    folder.mkdir()
    how(tmp_path / "fleet.sqlite", folder / "fleet.sqlite")
    second = FleetStore(f"sqlite:///{folder}/fleet.sqlite", tmp_path / "pepper", wait_s=0.2)
    with pytest.raises(StoreError, match="in use by"):
        second.open()
    store.close()
    second.open()
    second.close()


def test_a_folder_of_others_is_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o755)
    (folder / "theirs").write_text("x")
    with pytest.raises(ConfigError, match="for this user alone"):
        make_folders(FleetSettings(data=str(folder)))
    assert folder.stat().st_mode & 0o777 == 0o755
    assert [one.name for one in folder.iterdir()] == ["theirs"]


@pytest.mark.parametrize("made", ["new", "empty", "a fleet's", "private"])
def test_a_folder_of_ones_own_is_taken(made: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    if made != "new":
        folder.mkdir(mode=0o700 if made == "private" else 0o755)
    if made == "a fleet's":
        (folder / "run").mkdir()
    if made == "private":
        (folder / "notes").write_text("x")
    make_folders(FleetSettings(data=str(folder)))
    assert folder.stat().st_mode & 0o777 == 0o700
