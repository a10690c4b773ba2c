"""Rows of old calls are deleted: sums stay, and nothing counts twice or is granted again."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from sqlalchemy import select

from kvmig.accounts.allowances import TokenRequest
from kvmig.accounts.keys import KeyGrant, KeyTerms
from kvmig.accounts.usage import HandOver, UsageRecord, UsageSpool
from kvmig.core.background import cancel_tasks
from kvmig.fleet import retention
from kvmig.fleet.disk import DiskWatch, disks_of
from kvmig.fleet.ledger import merge, sums, take
from kvmig.fleet.pruned import joined
from kvmig.fleet.quotas import OVER, grant
from kvmig.fleet.retention import UsageRetention, day_before, prune
from kvmig.fleet.store import FleetStore, OrderActor
from kvmig.fleet.tables import usage, usage_pruned
from tests.support.examples import examples
from tests.support.fleet_stores import ANNA

DAY = 86400.0


def record(seq: int, day: int = 0, **more: Any) -> UsageRecord:
    """Of a call that has ended, on a day of January 1970."""
    given: dict[str, Any] = {"call_id": f"c{seq}", "account": "k1", "model": "a", "sequences": 1}
    over = {"ended": day * DAY + 9.0, "status": "finished"}
    return UsageRecord(**{"seq": seq, **given, "began": day * DAY, **over, "output": 10, **more})


def running(seq: int, day: int = 0) -> UsageRecord:
    return record(seq, day, ended=None, status="running")


def count(
    store: FleetStore, folder: Path, *records: UsageRecord, source: str = "front-1"
) -> UsageSpool:
    path = folder / f"{source}.sqlite"
    UsageSpool(path).write(records)
    merge(store.database, path)
    return UsageSpool(path)


def seqs(store: FleetStore) -> list[int]:
    with store.database.transaction(reading=True) as connection:
        return list(connection.execute(select(usage.c.seq).order_by(usage.c.seq)).scalars())


def runs(store: FleetStore) -> list[tuple[str, int, int]]:
    with store.database.transaction(reading=True) as connection:
        rows = connection.execute(select(usage_pruned).order_by("source", "first"))
        return [(source, first, last) for source, first, last in rows]


def pruned(store: FleetStore, before: str, actor: OrderActor | None = None) -> int:
    return prune(store.database, before, actor, 5.0)


def test_rows_of_old_calls_are_deleted_and_the_days_sums_stay(
    store: FleetStore, tmp_path: Path
) -> None:
    count(store, tmp_path, *(record(seq, day=seq) for seq in range(1, 6)))
    before = sums(store.database, ("day", "key", "model"))
    assert len(before) == 5
    assert pruned(store, "1970-01-04") == 2
    assert seqs(store) == [3, 4, 5]
    assert sums(store.database, ("day", "key", "model")) == before


def test_a_record_that_comes_again_after_its_row_was_deleted_adds_nothing(
    store: FleetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a spool that a server could not shorten, or from a front end that got no answer."""
    monkeypatch.setattr(UsageSpool, "forget", lambda *_: None)
    spool = count(store, tmp_path, record(1), record(2), record(3, day=9))
    before = sums(store.database, ("day",))
    assert pruned(store, "1970-01-05") == 2
    count(store, tmp_path)
    take(store.database, HandOver(spool.source, [record(1), record(2, output=12), record(3, 9)]))
    assert sums(store.database, ("day",)) == before
    assert seqs(store) == [3]
    count(store, tmp_path, record(1), source="front-2")  # another front end's is another call
    assert sum(row["calls"] for row in sums(store.database, ())) == 4


def test_calls_that_run_keep_their_rows_and_count_on(store: FleetStore, tmp_path: Path) -> None:
    count(store, tmp_path, record(1), running(2), record(3))
    assert pruned(store, "1970-01-02") == 2
    count(store, tmp_path, record(2, output=30))
    (row,) = sums(store.database, ())
    assert (row["calls"], row["output"]) == (3, 50)
    assert pruned(store, "1970-01-02") == 1
    assert runs(store) == [("front-1", 1, 3)]


def key(store: FleetStore) -> KeyGrant:
    store.add_user("bea", "user", ANNA)
    terms = KeyTerms(quota=1000, period="total")
    row, _ = store.create_key("bea", "laptop", terms, ANNA)
    return next(one for one in store.key_changes().granted if one.prefix == row.prefix)


def asking(seq: int) -> TokenRequest:
    return TokenRequest(7, "front-1", seq, "", 0.0, 1, 256, "a")


def test_a_row_whose_call_holds_tokens_of_a_quota_stays(store: FleetStore, tmp_path: Path) -> None:
    """Its front end was killed; without the row all that was granted would count beside the sum."""
    grant(store.database, key(store), asking(1))
    count(store, tmp_path, running(1), record(2))
    merge(store.database, tmp_path / "front-1.sqlite", over=True)
    assert pruned(store, "1970-01-02") == 1
    assert seqs(store) == [1]


def test_a_call_whose_row_is_deleted_is_granted_nothing(store: FleetStore, tmp_path: Path) -> None:
    count(store, tmp_path, record(1))
    pruned(store, "1970-01-02")
    found = grant(store.database, key(store), asking(1))
    assert (found.tokens, found.why) == (0, OVER)


def test_an_order_is_in_the_audit_once_and_only_if_it_deletes_something(
    store: FleetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "AT_ONCE", 2)
    count(store, tmp_path, *(record(seq) for seq in range(1, 6)))
    assert asyncio.run(ordered(store, "1970-01-01")) == (0, False)
    assert asyncio.run(ordered(store, "1970-01-02")) == (5, False)
    (row,) = store.audit()
    assert (row.actor, row.address) == ANNA
    assert (row.action, row.object, row.after) == (
        "usage.prune", "1970-01-02", {"before": "1970-01-02"},
    )  # fmt: skip


async def ordered(store: FleetStore, before: str, most_s: float = 60.0) -> tuple[int, bool]:
    with ThreadPoolExecutor(1) as thread:
        return await keeper(store, thread).prune(before, ANNA, most_s)


def keeper(store: FleetStore, thread: ThreadPoolExecutor, now: float = 0.0) -> UsageRetention:
    async def some(before: str, actor: OrderActor | None, at: float) -> int:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(thread, prune, store.database, before, actor, at)

    return UsageRetention(some, lambda: now)


def test_an_order_whose_time_is_up_says_that_there_is_more(
    store: FleetStore, tmp_path: Path
) -> None:
    count(store, tmp_path, record(1))
    assert asyncio.run(ordered(store, "1970-01-02", most_s=0.0)) == (0, True)
    assert seqs(store) == [1]


async def test_orders_are_carried_out_between_the_pieces(
    store: FleetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "AT_ONCE", 10)
    count(store, tmp_path, *(record(seq) for seq in range(1, 201)))
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as thread:
        deleting = asyncio.create_task(keeper(store, thread).prune("1970-01-02", ANNA))
        left = [200]
        while not deleting.done():
            await loop.run_in_executor(thread, store.version)
            left.append(len(await loop.run_in_executor(thread, seqs, store)))
        assert await deleting == (200, False)
    assert len(set(left)) > 5, left
    assert all(a - b <= 20 for a, b in pairwise(left)), left


async def test_a_server_keeps_rows_for_so_many_days_by_itself(
    store: FleetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "LOOK_S", 0.01)
    count(store, tmp_path, *(record(seq, day=seq) for seq in range(1, 40)))
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as thread:
        running = asyncio.create_task(keeper(store, thread, now=39.5 * DAY).run(30))
        async with asyncio.timeout(20):
            while len(await loop.run_in_executor(thread, seqs, store)) > 31:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await cancel_tasks(running)
    assert seqs(store) == list(range(9, 40))
    assert [row.actor for row in store.audit()] == ["kvmig up --keep-usage-days"]


def test_days_are_counted_back_from_today() -> None:
    assert day_before(39.5 * DAY, 0) == "1970-02-09"
    assert day_before(39.5 * DAY, 9) == "1970-01-31"


NUMBERS = st.integers(1, 40)


@given(known=st.sets(NUMBERS), more=st.sets(NUMBERS))
def test_runs_hold_all_numbers_and_no_others_and_never_touch(
    known: set[int], more: set[int]
) -> None:
    found = joined(joined([], known), more)
    assert {seq for first, last in found for seq in range(first, last + 1)} == known | more
    assert all(last + 1 < first for (_, last), (first, _) in pairwise(found))


class Step(NamedTuple):
    kind: str
    seq: int
    day: int


STEPS = st.lists(
    st.builds(
        Step, st.sampled_from(["begin", "end", "prune"]), st.integers(1, 6), st.integers(0, 3)
    )
)


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_whatever_comes_again_between_whatever_is_deleted_each_call_counts_once(
    store: FleetStore, steps: list[Step]
) -> None:
    with store.database.transaction() as connection:
        for table in ("usage", "usage_daily", "usage_pruned"):
            connection.exec_driver_sql(f"DELETE FROM {table}")
    begun = set()
    for kind, seq, day in steps:
        if kind == "prune":
            pruned(store, f"1970-01-0{day + 1}")
            continue
        made = record(seq, seq % 3) if kind == "end" else running(seq, seq % 3)
        take(store.database, HandOver("front-1", [made]))
        begun.add(seq)
    found = {row["day"]: row["calls"] for row in sums(store.database, ("day",))}
    wanted = [seq % 3 for seq in begun]
    assert found == {f"1970-01-0{day + 1}": wanted.count(day) for day in set(wanted)}


def test_a_disk_that_is_nearly_full_is_said_once_until_it_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = [0]

    class Usage(NamedTuple):
        total: int
        used: int
        free: int

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(10**12, 0, free[0]))
    disks = disks_of(tmp_path, tmp_path / "kvmig.sqlite")
    said = []
    with caplog.at_level(logging.WARNING):
        for free[0] in (6 * 10**10, 4 * 10**10, 3 * 10**10, 51 * 10**9, 4 * 10**10, 10**11, 10**9):
            disks.warn_full_disks()
            said.append(len(caplog.records))
    assert said == [0, 1, 1, 1, 1, 1, 2]
    assert "40.00 of 1000.00 GB are free" in caplog.messages[0]
    assert disks.free() == {"data": 10**9}


def test_the_database_may_be_on_a_disk_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    found = disks_of(tmp_path, tmp_path / "other" / "kvmig.sqlite").free()
    assert found.keys() == {"data", "database"}


def test_a_folder_that_is_gone_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert DiskWatch({"data": tmp_path / "gone"}).free() == {}
    assert "can't be asked for its room" in caplog.text
