"""The ledger: what is in a spool counts once, however often it is merged."""

from __future__ import annotations

import base64
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from sqlalchemy import select

from kvmig.accounts.keys import KeyTerms
from kvmig.accounts.usage import (
    HandOver,
    SpoolDamaged,
    SpooledRecord,
    UsageRecord,
    UsageSpool,
    read_record,
)
from kvmig.fleet.ledger import AT_ONCE, SUMS, merge, sums, take
from kvmig.fleet.setaside import keep_records, keep_spool
from kvmig.fleet.store import FleetStore
from kvmig.fleet.tables import usage
from tests.support.examples import examples
from tests.support.fleet_stores import ANNA, Place

DAY = 86400.0


def record(seq: int = 1, **more: Any) -> UsageRecord:
    given: dict[str, Any] = {"seq": seq, "call_id": f"c{seq}", "account": "k1", "model": "a"}
    return UsageRecord(**{**given, "began": 0.0, "sequences": 1, **more})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The spool of a front end."""
    return tmp_path / "front-1.sqlite"


def bring(store: FleetStore, path: Path, *records: UsageRecord) -> None:
    """Records come into the spool, and from there into the ledger."""
    UsageSpool(path).write(records)
    merge(store.database, path)


def total(store: FleetStore) -> tuple[int, int, int]:
    """Calls, prompt and output tokens."""
    (row,) = sums(store.database, ())
    return row["calls"], row["prompt"], row["output"]


def rows(store: FleetStore) -> list[tuple[int, int, str]]:
    """Number, output and status of each call."""
    wanted = select(usage.c.seq, usage.c.output, usage.c.status).order_by(usage.c.seq)
    with store.database.transaction(reading=True) as connection:
        return [(seq, output, status) for seq, output, status in connection.execute(wanted)]


def test_what_a_call_has_used_so_far_is_replaced_by_what_it_has_used_later(
    store: FleetStore, path: Path
) -> None:
    spool = UsageSpool(path)
    spool.write([record(prompt=5, output=10)])
    merge(store.database, path)
    assert total(store) == (1, 5, 10)
    spool.write([record(prompt=5, output=30, ended=9.0, status="finished")])
    merge(store.database, path)
    assert total(store) == (1, 5, 30)
    assert rows(store) == [(1, 30, "finished")]
    assert spool.read() == []


def test_a_merge_that_is_repeated_adds_nothing(
    store: FleetStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that was killed after its transaction has forgotten nothing in the spool."""
    UsageSpool(path).write([record(seq, prompt=1, output=10, ended=9.0) for seq in range(1, 4)])
    with monkeypatch.context() as patch:
        patch.setattr(UsageSpool, "forget", lambda *_: None)
        for _ in range(3):
            merge(store.database, path)
    merge(store.database, path)
    assert total(store) == (3, 3, 30)


def test_what_is_written_while_it_is_merged_is_not_forgotten(
    store: FleetStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = UsageSpool(path)
    spool.write([record(output=10, ended=9.0)])
    forget = UsageSpool.forget

    def later(self: UsageSpool, merged: list[SpooledRecord]) -> None:
        spool.write([record(output=12, ended=10.0)])  # one more sequence of the call
        forget(self, merged)

    with monkeypatch.context() as patch:
        patch.setattr(UsageSpool, "forget", later)
        merge(store.database, path)
    merge(store.database, path)
    assert total(store) == (1, 0, 12)


def test_calls_of_a_front_end_that_was_killed_count_so_far_and_run_no_more(
    store: FleetStore, path: Path
) -> None:
    spool = UsageSpool(path)
    spool.write([record(1, output=10), record(2, output=7, ended=9.0, status="finished")])
    merge(store.database, path)
    assert len(spool.read()) == 1
    merge(store.database, path, over=True)
    assert rows(store) == [(1, 10, "cut"), (2, 7, "finished")]
    assert spool.read() == []


def test_a_merge_that_fails_changes_nothing_and_can_be_done_again(
    store: FleetStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    UsageSpool(path).write([record(seq, output=1, ended=1.0) for seq in range(1, 101)])
    from kvmig.fleet import ledger, tables

    upsert, done = tables.upsert, 0

    def dies(*args: Any, **more: Any) -> None:
        nonlocal done
        done += 1
        if done == 2:
            raise RuntimeError("killed")
        upsert(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "upsert", dies)
        with pytest.raises(RuntimeError):
            merge(store.database, path)
    assert sums(store.database, ()) == [dict.fromkeys(SUMS, 0)]
    assert merge(store.database, path).records == 100
    assert total(store) == (100, 0, 100)


def test_an_order_waits_for_a_part_of_a_long_spool_alone(store: FleetStore, path: Path) -> None:
    UsageSpool(path).write([record(seq, output=1, ended=1.0) for seq in range(1, AT_ONCE + 3)])
    first = merge(store.database, path)
    assert total(store) == (AT_ONCE, 0, AT_ONCE)
    rest = merge(store.database, path, after=first.last)
    assert (first.records, rest.records) == (AT_ONCE, 2)
    assert total(store) == (AT_ONCE + 2, 0, AT_ONCE + 2)


def test_what_a_prefix_cache_had_is_summed_and_moves_are_kept(
    store: FleetStore, path: Path
) -> None:
    bring(store, path, record(1, prompt=50, cached=32), record(2, prompt=9, ended=1.0))
    bring(store, path, record(1, prompt=50, cached=32, moves=2, ended=2.0))
    assert sums(store.database, ())[0]["cached"] == 32
    with store.database.transaction(reading=True) as connection:
        wanted = select(usage.c.cached, usage.c.moves).order_by(usage.c.seq)
        assert [tuple(row) for row in connection.execute(wanted)] == [(32, 2), (0, 0)]


def test_sums_are_by_key_user_model_and_day(store: FleetStore, path: Path) -> None:
    store.add_user("eve", "user", ANNA)
    key, _ = store.create_key("eve", "", KeyTerms(), ANNA)
    bring(
        store,
        path,
        record(1, account=key.key_id, prompt=1, output=100, ended=1.0),
        record(2, account=key.key_id, model="b", prompt=1, output=10, ended=1.0),
        record(3, account="gone", began=DAY, prompt=1, output=1, ended=1.0),
    )
    by_user = sums(store.database, ("user",))
    assert [(row["user"], row["output"]) for row in by_user] == [("eve", 110), ("", 1)]
    by_both = sums(store.database, ("model", "day"))
    assert [(row["model"], row["day"], row["output"]) for row in by_both] == [
        ("a", "1970-01-01", 100),
        ("b", "1970-01-01", 10),
        ("a", "1970-01-02", 1),
    ]
    assert sums(store.database, (), since="1970-01-02")[0]["output"] == 1
    assert sums(store.database, (), until="1970-01-01")[0]["output"] == 110


@examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 50), st.booleans()), max_size=30))
def test_the_ledger_is_what_was_said_last_of_each_call(
    sqlite_place: Place, steps: list[tuple[int, int, bool]]
) -> None:
    """Outputs grow; merges come at any time."""
    store = sqlite_place.store()
    store.open()
    path = sqlite_place.folder / f"front-{len(list(sqlite_place.folder.iterdir()))}.sqlite"
    before = sums(store.database, ())[0]["output"]
    said: dict[int, int] = {}
    for seq, more, merges in steps:
        said[seq] = said.get(seq, 0) + more
        UsageSpool(path).write([record(seq, output=said[seq], ended=1.0 if more % 2 else None)])
        if merges:
            merge(store.database, path)
    merge(store.database, path)
    assert sums(store.database, ())[0]["output"] - before == sum(said.values())
    store.close()


def test_a_file_that_is_no_spool_is_refused_by_name(store: FleetStore, tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    path.write_bytes(b"nonsense " * 100)
    with pytest.raises(OSError, match=r"x\.sqlite: file is not a database"):
        merge(store.database, path)


def handed(*records: UsageRecord) -> HandOver:
    return HandOver("front-1", records)


def test_what_was_handed_over_is_not_taken_back_by_what_the_spool_has(
    store: FleetStore, path: Path
) -> None:
    UsageSpool(path).write([record(1, output=3), record(2, output=5)])
    last = record(1, output=10, ended=9.0, status="finished")
    take(store.database, handed(last, record(2, output=9)))
    for over in (False, True):
        merge(store.database, path, over=over)
        assert total(store) == (2, 0, 19)
    assert rows(store) == [(1, 10, "finished"), (2, 9, "cut")]


def test_what_is_handed_over_again_adds_nothing(store: FleetStore) -> None:
    for _ in range(2):
        take(store.database, handed(record(1, output=10, ended=9.0, status="finished")))
    assert total(store) == (1, 0, 10)


def spoiled(path: Path, seq: int, raw: object) -> None:
    """Put anything into a spool in place of a record."""
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("INSERT OR REPLACE INTO records VALUES (?, ?)", (seq, raw))


BAD = {
    "cut short": b'{"seq":2,"call_id":"c',
    "of a newer kvmig": b'{"seq":2,"call_id":"c","account":"k","model":"a","began":"2026-01-01"}',
    "another number": b'{"seq":7,"call_id":"c","account":"k","model":"a","began":1}',
    "far away": b'{"seq":2,"call_id":"c","account":"k","model":"a","began":1e300}',
    "too many": b'{"seq":2,"call_id":"c","account":"k","model":"a","began":1,"output":1' + b"0" * 30
    + b"}",
    "less than none": b'{"seq":2,"call_id":"c","account":"k","model":"a","began":1,"output":-1}',
    "NUL": b'{"seq":2,"call_id":"c\\u0000","account":"k","model":"a","began":1}',
    "text": "no bytes",
    "a number": 7,
    "nothing of that": b"",
}  # fmt: skip


@pytest.mark.parametrize("raw", BAD.values(), ids=list(BAD))
def test_a_record_that_cannot_be_read_is_told_and_the_others_are_merged(
    raw: object, store: FleetStore, path: Path
) -> None:
    spool = UsageSpool(path)
    spool.write([record(seq, output=10, ended=1.0) for seq in (1, 2, 3)])
    spoiled(path, 2, raw)
    merged = merge(store.database, path)
    assert total(store) == (2, 0, 20)
    assert [one.seq for one in merged.unread] == [2]
    spool.forget(merged.unread)
    assert spool.rows() == []


def test_a_record_with_fields_that_this_kvmig_does_not_know_counts_and_goes(
    store: FleetStore, path: Path
) -> None:
    spool = UsageSpool(path)
    spool.write([])
    newer = json.loads(msgspec.json.encode(record(1, output=10, ended=1.0)))
    spoiled(path, 1, json.dumps({**newer, "carbon_g": 3}).encode())
    merge(store.database, path)
    assert total(store) == (1, 0, 10)
    assert spool.rows() == []


def test_a_spool_that_is_no_database_is_told_by_its_own_error_and_set_aside(
    store: FleetStore, path: Path, tmp_path: Path
) -> None:
    path.write_bytes(b"anything" * 1000)
    with pytest.raises(SpoolDamaged, match=r"front-1\.sqlite"):
        merge(store.database, path)
    first = keep_spool(tmp_path / "aside", path)
    path.write_bytes(b"again")
    second = keep_spool(tmp_path / "aside", path)
    assert first.read_bytes() == b"anything" * 1000
    assert second.read_bytes() == b"again"
    assert not path.exists()


def test_records_that_are_set_aside_are_kept_as_they_are(tmp_path: Path) -> None:
    path = keep_records(
        tmp_path / "aside", "front-1", [read_record(2, b"\xff{"), read_record(3, 7)]
    )
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(one["seq"], base64.b64decode(one["record"])) for one in kept] == [
        (2, b"\xff{"),
        (3, b"7"),
    ]
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_is_not_counted_in_tokens_is_summed_too(store: FleetStore, path: Path) -> None:
    bring(store, path, record(1, characters=40), record(2, seconds=7, ended=1.0))
    bring(store, path, record(1, characters=90, ended=2.0), record(3, images=2, ended=2.0))
    (row,) = sums(store.database, ("model",))
    assert (row["characters"], row["seconds"], row["images"]) == (90, 7, 2)
