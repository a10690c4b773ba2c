"""Two servers of one real PostgreSQL: who leads, and what an older leader can't do any more."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
from sqlalchemy import Connection, update

from kvmig.accounts.usage import UsageRecord, UsageSpool
from kvmig.core.background import cancel_tasks
from kvmig.core.errors import ConfigError
from kvmig.fleet import standby, tables
from kvmig.fleet.account_lists import ListWindow
from kvmig.fleet.leadership import BEAT_S, LeaderRow
from kvmig.fleet.ledger import merge, sums
from kvmig.fleet.settings import FleetSettings, check_settings
from kvmig.fleet.standby import (
    LeaderHeartbeat,
    StandbyServer,
    end_session,
    leader_of,
    leave_lead,
    look_database,
    raise_beat,
)
from kvmig.fleet.store import FleetStore
from kvmig.fleet.tables import (
    DatabaseUnusable,
    FleetDatabase,
    LeadershipLost,
    StoreError,
    leadership,
    take_turn,
)
from tests.support import postgres
from tests.support.fleet_stores import ANNA, Place
from tests.support.waiting import until


def host(place: Place, name: str) -> FleetSettings:
    """Of a host that shares the pepper, and waits."""
    folder = place.folder / name
    folder.mkdir(exist_ok=True)
    if not (folder / "pepper").exists() and (place.folder / "pepper").exists():
        (folder / "pepper").symlink_to(place.folder / "pepper")
    return FleetSettings(data=str(folder), database=place.url, standby=True)


def store_of(settings: FleetSettings, place: Place) -> FleetStore:
    pepper, name = place.folder / "pepper", standby.host_name(settings)
    return FleetStore(settings.database, pepper, wait_s=0.5, host=name)


@contextmanager
def looking(settings: FleetSettings) -> Iterator[FleetDatabase]:
    database = look_database(settings)
    try:
        yield database
    finally:
        database.close()


@contextmanager
def standing(database: FleetDatabase, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connection]:
    """A transaction that the database ends soon if nothing is done in it; it ends no other one, of
    which each would have to be quick on a busy machine."""
    with ExitStack() as stack:
        with monkeypatch.context() as short:
            short.setattr(tables, "IDLE_S", 0.5)  # read where a connection is made
            connection = stack.enter_context(database.transaction())
        yield connection


@asynccontextmanager
async def leading(settings: FleetSettings, place: Place) -> AsyncIterator[FleetStore]:
    """A leader that beats."""
    store, deposed = store_of(settings, place), list[LeaderRow]()
    store.open()
    heartbeat = LeaderHeartbeat(settings, store.database.token, deposed.append)
    heartbeat.start()
    try:
        yield store
    finally:
        await heartbeat.close()
        store.close()


async def waiting(settings: FleetSettings, store: FleetStore, seen: list[LeaderRow]) -> None:
    """A standby, until its store is open."""

    async def lead() -> None:
        await asyncio.to_thread(store.open)

    await StandbyServer(settings, seen.append).wait(lead)


@pytest.fixture
def place(postgres_place: Place) -> Place:
    return postgres_place


def test_a_standby_is_for_postgresql() -> None:
    for database, shown in (("", "SQLite's file"), ("sqlite:////x/y", "'sqlite:////x/y'")):
        settings = FleetSettings(data="/tmp/x", database=database, standby=True)
        with pytest.raises(
            ConfigError, match=f"--standby is given, --database is {shown}, must be"
        ):
            check_settings(settings)


def test_a_fleet_over_ray_nodes_has_no_standby(place: Place) -> None:
    settings = FleetSettings(data="/tmp/x", database=place.url, standby=True, ray="auto")
    with pytest.raises(ConfigError, match="--ray is 'auto', must not be given together with"):
        check_settings(settings)


def test_a_leader_that_is_followed_hears_of_it_and_writes_nothing_more(place: Place) -> None:
    one, other = store_of(host(place, "a"), place), store_of(host(place, "b"), place)
    one.open()
    token = one.database.token
    one.add_user("bea", "user", ANNA)
    with looking(host(place, "b")) as database:
        assert raise_beat(database, token) is None
        row = leader_of(database)
        assert row is not None
        assert (row.token, row.beat) == (token, 1)
        assert not end_session(database, row._replace(beat=0)), "it has beaten since"
        assert end_session(database, row)
        other.open()
        successor = raise_beat(database, token)
        assert successor is not None
        assert successor.host == standby.host_name(host(place, "b"))
        assert successor.token == other.database.token > token
    with pytest.raises(LeadershipLost, match="b leads the fleet now"):
        one.add_user("carl", "user", ANNA)
    other.add_user("dora", "user", ANNA)
    assert [row.name for row in other.find_users(ListWindow()).rows] == ["bea", "dora"]
    assert other.database.token > token
    one.close()
    other.close()


async def test_a_standby_leads_at_once_when_the_lead_is_left(place: Place) -> None:
    a, b, seen = host(place, "a"), host(place, "b"), list[LeaderRow]()
    async with leading(a, place) as store:
        store.add_user("bea", "user", ANNA)
        b = host(place, "b")  # with the pepper
        other = store_of(b, place)
        task = asyncio.create_task(waiting(b, other, seen))
        await until(lambda: seen)
        assert [one.host for one in seen] == [standby.host_name(a)]
        await asyncio.to_thread(leave_lead, store.database)
        await asyncio.to_thread(store.close)
        async with asyncio.timeout(5):
            await task
    assert [row.name for row in other.find_users(ListWindow()).rows] == ["bea"]
    other.close()


def test_a_leader_that_stands_still_within_a_beat_is_followed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = host(place, "a"), host(place, "b")
    one, other = store_of(a, place), store_of(b, place)
    one.open()
    # What the one that stands still does at last, is refused.
    with looking(a) as beats, suppress(StoreError), standing(beats, monkeypatch) as connection:
        connection.execute(update(leadership).values(beat=leadership.c.beat + 1))
        with looking(b) as database:
            row = leader_of(database)
            assert row is not None
            assert end_session(database, row)
        other.open()
    assert other.database.token > one.database.token
    one.close()
    other.close()


def test_a_server_that_stands_still_in_the_ledger_holds_up_no_other_hosts(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    still, other = (FleetDatabase(place.url, leads=False) for _ in range(2))
    turns = []
    with suppress(StoreError), standing(still, monkeypatch) as connection:
        take_turn(connection)
        with other.transaction() as others:
            take_turn(others)
            turns.append("other")
    assert turns == ["other"]
    still.close()
    other.close()


async def test_a_beat_that_fails_is_not_the_last_one(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([RuntimeError("unforeseen")])

    def beat(database: FleetDatabase, token: int) -> LeaderRow | None:
        for error in failures:
            raise error
        return raise_beat(database, token)

    monkeypatch.setattr(standby, "raise_beat", beat)
    a = host(place, "a")
    async with leading(a, place):
        with looking(a) as database:
            await until(lambda: (row := leader_of(database)) is not None and row.beat > 0)


LEADER = """
import sys, time, asyncio
from pathlib import Path
from kvmig.fleet.settings import FleetSettings
from kvmig.fleet.standby import LeaderHeartbeat, host_name
from kvmig.fleet.store import FleetStore, OrderActor

async def lead():
    settings = FleetSettings(data=sys.argv[2], database=sys.argv[1], standby=True)
    store = FleetStore(settings.database, Path(sys.argv[3]), wait_s=0.5, host=host_name(settings))
    store.open()
    lost = asyncio.Event()
    heartbeat = LeaderHeartbeat(settings, store.database.token, lambda leader: lost.set())
    heartbeat.start()
    number = 0
    while not lost.is_set():
        number += 1
        try:
            store.add_user(f"u{number}", "user", OrderActor("anna"))
            print(number, flush=True)
        except Exception as error:
            print(type(error).__name__, flush=True)
            break
        await asyncio.sleep(0.001)
    print("lost", flush=True)

asyncio.run(lead())
"""


@contextmanager
def leader_process(settings: FleetSettings, place: Place) -> Iterator[subprocess.Popen[str]]:
    """A leader that makes users and says which, until it leads no more."""
    words = [sys.executable, "-c", LEADER, place.url, settings.data, str(place.folder / "pepper")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


@pytest.mark.parametrize(
    "how", [pytest.param(signal.SIGKILL, marks=pytest.mark.long), signal.SIGSTOP]
)
async def test_a_leader_that_is_killed_or_stands_still_loses_no_order_and_does_none_more(
    place: Place, how: signal.Signals
) -> None:
    a = host(place, "a")
    with leader_process(a, place) as process:
        assert process.stdout is not None
        said = [process.stdout.readline().strip() for _ in range(50)]
        b, seen = host(place, "b"), list[LeaderRow]()
        other = store_of(b, place)
        task = asyncio.create_task(waiting(b, other, seen))
        await until(lambda: seen)
        await asyncio.sleep(4 * BEAT_S)  # it was seen to beat
        process.send_signal(how)
        began = time.monotonic()
        async with asyncio.timeout(20):
            await task
        took = time.monotonic() - began
        other.add_user("zoe", "user", ANNA)
        process.send_signal(signal.SIGCONT)
        rest, _ = await asyncio.to_thread(process.communicate, timeout=20)
    said += rest.split()
    numbers = [one for one in said if one.isdecimal()]
    names = {row.name for row in other.find_users(ListWindow()).rows}
    audited = [row.object for row in other.audit(limit=100_000)]
    assert {f"u{number}" for number in numbers} <= names, "what was answered is there"
    assert sorted(audited) == sorted(names), "each order once, with its row of the audit"
    assert audited[0] == "zoe", "nothing comes after the new leader's first order"
    if how == signal.SIGSTOP:
        assert said[-1] == "lost"
    assert took < 10
    other.close()


@pytest.mark.long
async def test_a_database_that_restarts_leaves_the_leader_in_place(
    place: Place, postgres_cluster: postgres.Cluster
) -> None:
    a, seen = host(place, "a"), list[LeaderRow]()
    async with leading(a, place) as store:
        token = store.database.token
        b = host(place, "b")
        other = store_of(b, place)
        task = asyncio.create_task(waiting(b, other, seen))
        await until(lambda: seen)
        postgres_cluster.stop()
        try:
            await asyncio.sleep(3)
        finally:
            await asyncio.to_thread(postgres_cluster.start)
        await asyncio.sleep(3)
        assert not task.done()
        store.add_user("bea", "user", ANNA)
        assert store.database.token == token
        await cancel_tasks(task)


async def test_a_standby_with_another_pepper_is_refused_before_it_leads(place: Place) -> None:
    async with leading(host(place, "a"), place):
        b = place.folder / "c"
        b.mkdir()
        (b / "pepper").write_bytes(os.urandom(32))
        settings = FleetSettings(data=str(b), database=place.url, standby=True)
        with pytest.raises(DatabaseUnusable, match="isn't the pepper of the fleet's database"):
            await waiting(settings, store_of(settings, place), [])


# -- the ledger of two servers


def record(seq: int) -> UsageRecord:
    return UsageRecord(
        seq=seq, call_id=f"c{seq}", account="k", model="m", began=1e9, ended=1e9 + 1,
        prompt=3, output=4, sequences=1, status="finished",
    )  # fmt: skip


def test_a_server_that_does_not_lead_counts_what_its_calls_used(
    place: Place, tmp_path: Path
) -> None:
    """Two hosts merge at once what they have counted of one key: the sums are exact."""
    leader = store_of(host(place, "a"), place)
    leader.open()
    ledgers = [FleetDatabase(place.url, leads=False) for _ in range(2)]

    def count(at: int) -> None:
        spool = tmp_path / f"s{at}.sqlite"
        for begin in range(1, 101, 10):
            UsageSpool(spool).write(record(seq) for seq in range(begin, begin + 10))
            merge(ledgers[at], spool)

    threads = [threading.Thread(target=count, args=(at,)) for at in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    (total,) = sums(leader.database, ())
    assert (total["calls"], total["prompt"], total["output"]) == (200, 600, 800)
    for database in ledgers:
        database.close()
    leader.close()


def test_nobody_leads_a_new_database(new_place: Place) -> None:
    with looking(host(new_place, "a")) as database:
        assert leader_of(database) is None
        with pytest.raises(StoreError):
            raise_beat(database, 1)


def test_the_row_of_a_leader_that_left_is_nobodys(place: Place) -> None:
    store = store_of(host(place, "a"), place)
    store.open()
    leave_lead(store.database)
    token = store.database.token
    store.close()
    with looking(host(place, "a")) as database:
        assert leader_of(database) == LeaderRow(token, 0, "")
