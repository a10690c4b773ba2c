"""A fleet's database that can't be used: one sentence, nothing changed; usable again once it is."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from kvmig.accounts.keys import KeyTerms
from kvmig.core.errors import ConfigError
from kvmig.fleet import migrations
from kvmig.fleet.account_lists import ListWindow
from kvmig.fleet.store import FleetStore
from kvmig.fleet.tables import SCHEMA, DatabaseUnusable, LeadershipLost, StoreError, metadata
from tests.support import postgres
from tests.support.fleet_stores import ANNA, Place

NOBODY = 65534
MADE_BY_REVISIONS = Path(__file__).with_name("fleet_schema_8.sql")
"""A user with a key, a model and an alias; its columns are in the revisions' order."""
ITS_PEPPER = bytes.fromhex("f93cc838504813e8928999b7ebb48faaf16fdbcf79bd00432ced44ffe0c15696")


@contextmanager
def opened(place: Place) -> Iterator[FleetStore]:
    store = place.store()
    store.open()
    try:
        yield store
    finally:
        store.close()


@contextmanager
def as_nobody() -> Iterator[None]:
    """As a user who may not write what is root's; nothing else where the tests aren't root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def file_of(place: Place) -> Path:
    return place.folder / "fleet.sqlite"


def refused(place: Place, sentence: str) -> None:
    """At the start, by a sentence; its file stays as it is, and so does one that can be used."""
    before = file_of(place).read_bytes()
    with pytest.raises(DatabaseUnusable, match=sentence) as said:
        place.store().open()
    assert "\n" not in str(said.value)
    assert file_of(place).read_bytes() == before


# -- the schema


def test_the_migrations_make_the_tables(new_place: Place) -> None:
    with opened(new_place) as store, store.database.transaction(reading=True) as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_the_newest_migration_has_the_schemas_number() -> None:
    (folder,) = migrations.__path__
    assert ScriptDirectory(folder).get_current_head() == f"{SCHEMA:04}"


def set_schema(place: Place, number: str) -> None:
    with opened(place) as store, store.database.transaction() as connection:
        connection.execute(text(f"UPDATE alembic_version SET version_num = '{number}'"))


@pytest.mark.parametrize(
    ("number", "error", "sentence"),
    [
        ("0099", StoreError, "has schema 99, this kvmig knows schemas up to"),
        ("0007", DatabaseUnusable, r"has schema 7, of a kvmig before 0\.1\.0"),
    ],
    ids=["newer", "before the first release"],
)
def test_a_schema_that_is_not_known_is_refused(
    place: Place, number: str, error: type[Exception], sentence: str
) -> None:
    set_schema(place, number)
    with pytest.raises(error, match=sentence):
        place.store().open()


def test_a_newer_schemas_file_stays_as_it_is(empty_place: Place) -> None:
    set_schema(empty_place, "0099")
    refused(empty_place, "start a newer kvmig, or restore a backup")


def test_a_database_that_the_seven_revisions_of_before_0_1_0_made_is_opened(
    empty_place: Place,
) -> None:
    with closing(sqlite3.connect(file_of(empty_place))) as file:
        file.executescript(MADE_BY_REVISIONS.read_text())
    (empty_place.folder / "pepper").write_bytes(ITS_PEPPER)
    with opened(empty_place) as store:
        with store.database.transaction(reading=True) as connection:
            assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        assert [user.name for user in store.find_users(ListWindow()).rows] == ["bea"]
        assert [key.prefix for key in store.keys("bea")] == ["4jez2qq5"]
        assert [model.name for model in store.models()] == ["qwen"]
        store.add_user("carl", "user", ANNA)
        store.set_user("carl", ANNA, role="admin")


def test_another_programs_database_is_refused(empty_place: Place) -> None:
    with closing(sqlite3.connect(file_of(empty_place))) as other:
        other.execute("CREATE TABLE bookmarks (id)")
    refused(empty_place, "holds something else than a kvmig fleet")


def test_another_programs_alembic_is_refused(empty_place: Place) -> None:
    with closing(sqlite3.connect(file_of(empty_place))) as other:
        other.execute("CREATE TABLE alembic_version (version_num)")
        other.execute("INSERT INTO alembic_version VALUES ('ae1027a6')")
        other.commit()
    refused(empty_place, "holds something else than a kvmig fleet")


# -- files


def test_a_file_that_is_no_database_is_refused(empty_place: Place) -> None:
    file_of(empty_place).write_bytes(b"certainly no database, " * 500)
    refused(empty_place, "is no SQLite database, or a damaged one")


@pytest.mark.parametrize("keep", [0.3, 0.7])
def test_a_file_that_was_cut_is_refused(empty_place: Place, keep: float) -> None:
    fill(empty_place)
    whole = file_of(empty_place).read_bytes()
    file_of(empty_place).write_bytes(whole[: int(len(whole) * keep)])
    refused(empty_place, "damaged")


def test_a_file_with_a_page_of_noise_is_refused(empty_place: Place) -> None:
    fill(empty_place)
    damaged = bytearray(file_of(empty_place).read_bytes())
    damaged[8192:12288] = os.urandom(4096)
    file_of(empty_place).write_bytes(damaged)
    refused(empty_place, "damaged")


def fill(place: Place) -> None:
    with opened(place) as store:
        store.add_user("bea", "user", ANNA)
        make_keys(store, 30)


def make_keys(store: FleetStore, count: int) -> None:
    for number in range(count):
        store.create_key("bea", f"key {number}", KeyTerms(), ANNA)


def test_a_read_only_file_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Place(f"sqlite:///{folder}/fleet.sqlite", Path(folder))
        with opened(place):
            pass
        Path(folder).chmod(0o777)
        file_of(place).chmod(0o444)
        (place.folder / "fleet.sqlite.lock").chmod(0o666)
        before = file_of(place).read_bytes()
        with (
            as_nobody(),
            pytest.raises(DatabaseUnusable, match=r"fleet\.sqlite is read-only"),
        ):
            place.store().open()
        assert file_of(place).read_bytes() == before


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    place = Place(f"sqlite:///{tmp_path}/nowhere/fleet.sqlite", tmp_path)
    with pytest.raises(StoreError, match="nowhere"):
        place.store().open()


def test_the_files_are_for_their_user_alone(empty_place: Place) -> None:
    with opened(empty_place):
        for name in ("fleet.sqlite", "fleet.sqlite-wal", "pepper"):
            assert (empty_place.folder / name).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("fleet.sqlite", "is no URL, must be"),
        ("sqlite:///fleet.sqlite", "must be a file's whole path"),
        ("sqlite://", "must be a file's whole path"),
        ("mysql://anna:secret@host/fleet", r"mysql://anna:\*\*\*@host/fleet, must be"),
        ("postgresql://host/fleet", "must be"),
    ],
)
def test_a_url_is_checked(tmp_path: Path, url: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        FleetStore(url, tmp_path / "pepper")


# -- one server


def test_a_second_server_is_refused_by_the_firsts_name(place: Place) -> None:
    with opened(place), pytest.raises(StoreError, match=rf"is in use by .*{os.getpid()}"):
        place.store().open()
    with opened(place):
        pass


def test_a_start_that_failed_holds_no_lock(place: Place) -> None:
    with opened(place):
        pepper = (place.folder / "pepper").read_bytes()
    (place.folder / "pepper").unlink()
    with pytest.raises(StoreError, match="pepper is gone"):
        place.store().open()
    (place.folder / "pepper").write_bytes(pepper)
    with opened(place):
        pass


def test_a_first_start_that_was_cut_off_is_begun_again(place: Place) -> None:
    (place.folder / "pepper.part").write_bytes(b"half")
    with opened(place) as store:
        assert (place.folder / "pepper").read_bytes() == store.pepper
    assert not (place.folder / "pepper.part").exists()


def test_the_wrong_pepper_is_refused(place: Place) -> None:
    with opened(place):
        pass
    (place.folder / "pepper").write_bytes(bytes(32))
    with pytest.raises(DatabaseUnusable, match="isn't the pepper of the fleet's database"):
        place.store().open()
    (place.folder / "pepper").write_bytes(b"short")
    with pytest.raises(StoreError, match="holds 5 bytes, must hold 32"):
        place.store().open()


# -- while it runs


def test_a_locked_database_is_waited_for_and_then_usable(empty_place: Place) -> None:
    with opened(empty_place) as store, closing(sqlite3.connect(file_of(empty_place))) as other:
        other.execute("BEGIN IMMEDIATE")
        for _ in range(3):
            with pytest.raises(StoreError, match=r"is locked by another program, for 0\.2 s now"):
                store.add_model(empty_place.spec(), ANNA)
            assert store.models() == []  # reading goes on
        other.rollback()
        store.add_model(empty_place.spec(), ANNA)
        assert len(store.audit()) == 1


def test_a_short_lock_is_not_noticed(empty_place: Place) -> None:
    with opened(empty_place) as store:
        other = sqlite3.connect(file_of(empty_place), check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        threading.Timer(0.05, other.rollback).start()
        store.add_model(empty_place.spec(), ANNA)
        other.close()


def test_a_full_disk_leaves_whole_orders_only(empty_place: Place) -> None:
    with opened(empty_place) as store:
        store.add_user("bea", "user", ANNA)
        set_most_pages(store, 1)
        with pytest.raises(StoreError, match="has no room left"):
            make_keys(store, 1000)
        made = store.keys()
        assert len(made) == len(store.audit(limit=2000)) - 1
        set_most_pages(store, 1 << 20)
        store.create_key("bea", "one more", KeyTerms(), ANNA)
        assert len(store.keys()) == len(made) + 1


def set_most_pages(store: FleetStore, most: int) -> None:
    """Not below what there is."""
    with store.database.transaction(reading=True) as connection:
        connection.exec_driver_sql(f"PRAGMA max_page_count = {most}")


KILLED = """
import itertools, sys
from pathlib import Path
from tests.support.fleet_stores import ANNA, Place

place = Place(sys.argv[1], Path(sys.argv[2]))
store = place.store()
store.open()
for number in itertools.count(len(store.models())):
    store.add_model(place.spec(f"m{number}"), ANNA)
    print(number, flush=True)
"""


def test_a_killed_server_leaves_whole_orders_only(place: Place) -> None:
    for _ in range(3):
        command = [sys.executable, "-c", KILLED, place.url, str(place.folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            said = [int(server.stdout.readline()) for _ in range(10)]
            server.send_signal(signal.SIGKILL)
            said += [int(line) for line in server.stdout if line.endswith("\n")]
        store = place.store(wait_s=5)
        store.open()
        named = {row.name for row in store.models()}
        assert {row.object for row in store.audit(limit=10_000)} == named
        assert {f"m{number}" for number in said} <= named
        store.close()


def test_postgres_that_stops_is_used_again_once_it_is_back(
    postgres_place: Place, postgres_cluster: postgres.Cluster
) -> None:
    with opened(postgres_place) as store:
        postgres_cluster.stop()
        try:
            for _ in range(3):
                with pytest.raises(StoreError, match="can't be used: ") as said:
                    store.add_model(postgres_place.spec(), ANNA)
                assert "\n" not in str(said.value)
        finally:
            postgres_cluster.start()
        store.add_model(postgres_place.spec(), ANNA)
        assert len(store.models()) == len(store.audit()) == 1


def test_a_transaction_that_postgres_cuts_is_not_half_done(
    postgres_place: Place, postgres_cluster: postgres.Cluster
) -> None:
    with opened(postgres_place) as store:
        store.add_user("bea", "user", ANNA)

        def cut() -> None:
            with store.database.transaction() as connection:
                connection.execute(text("UPDATE users SET role = 'admin'"))
                postgres_cluster.stop()
                postgres_cluster.start()
                connection.execute(text("UPDATE users SET disabled = true"))

        with pytest.raises(StoreError, match="can't be used"):
            cut()
        assert [(row.role, row.disabled) for row in store.find_users(ListWindow()).rows] == [
            ("user", False)
        ]


def test_another_server_may_take_over_what_postgres_cut(postgres_place: Place) -> None:
    """The lock goes with the connection: the first server never writes again."""
    with opened(postgres_place) as first:
        with (
            pytest.raises(StoreError, match="can't be used"),
            first.database.transaction() as connection,
        ):
            connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
        with opened(postgres_place) as second:
            with pytest.raises(LeadershipLost, match="another server leads the fleet now"):
                first.add_model(postgres_place.spec(), ANNA)
            second.add_model(postgres_place.spec(), ANNA)
        with pytest.raises(LeadershipLost):
            first.models()
    with opened(postgres_place) as third:
        assert len(third.models()) == 1


def test_a_token_is_greater_than_all_before_it(place: Place) -> None:
    tokens = []
    for _ in range(3):
        with opened(place) as store:
            tokens.append(store.database.token)
    assert tokens == sorted(set(tokens))


def test_no_postgres_at_all_is_one_sentence(tmp_path: Path) -> None:
    place = Place(f"postgresql+psycopg://kvmig@/fleet?host={tmp_path}", tmp_path)
    with pytest.raises(StoreError, match=r"fleet's database postgresql.* can't be used") as said:
        place.store().open()
    assert "\n" not in str(said.value)


# -- backups


def test_a_backup_is_a_fleets_database(empty_place: Place) -> None:
    with opened(empty_place) as store:
        added = store.add_model(empty_place.spec(), ANNA)
        store.backup(empty_place.folder / "saved")
        store.remove_model("qwen", ANNA)
    saved = Place(f"sqlite:///{empty_place.folder / 'saved'}", empty_place.folder)
    assert (empty_place.folder / "saved").stat().st_mode & 0o777 == 0o600
    with opened(saved) as store:
        assert store.models() == [added]


def test_a_backup_overwrites_nothing(empty_place: Place) -> None:
    saved = empty_place.folder / "saved"
    saved.write_text("precious")
    with opened(empty_place) as store:
        with pytest.raises(ConfigError, match="saved is there already, must be a new file"):
            store.backup(saved)
        with pytest.raises(StoreError, match=r"nowhere/saved can't be written"):
            store.backup(empty_place.folder / "nowhere" / "saved")
        with pytest.raises(StoreError, match="can't be written"):
            store.backup(empty_place.folder / ("x" * 300))
        for odd in (Path("saved"), empty_place.folder / "a\0b", Path("/")):
            with pytest.raises(ConfigError):
                store.backup(odd)
    assert saved.read_text() == "precious"
    assert list(empty_place.folder.glob("*.part")) == []


def test_a_backup_leaves_what_is_beside_it_alone(empty_place: Place) -> None:
    """Another user's link, for example, in a folder of several users."""
    other = empty_place.folder / "saved.part"
    other.write_text("precious")
    with opened(empty_place) as store:
        store.backup(empty_place.folder / "saved")
    assert other.read_text() == "precious"
    assert (empty_place.folder / "saved").stat().st_mode & 0o777 == 0o600


def test_postgres_is_saved_by_its_own_tools(postgres_place: Place) -> None:
    with opened(postgres_place) as store, pytest.raises(ConfigError, match="run pg_dump"):
        store.backup(postgres_place.folder / "saved")
