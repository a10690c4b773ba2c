"""How far the ledger is behind what front ends have counted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvmig.accounts.usage import UsageSpool
from kvmig.fleet import spool_merger
from kvmig.fleet.ledger import MergedRecords
from kvmig.fleet.setaside import SetAside
from kvmig.fleet.settings import FleetSettings
from kvmig.fleet.spool_merger import SpoolMerger
from kvmig.fleet.tables import StoreError
from tests.support.fleet_stores import Place


async def test_the_ledger_is_behind_from_the_last_time_that_it_had_all(
    sqlite_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, now = FleetSettings(data=str(sqlite_place.folder)), 100.0
    store = sqlite_place.store()
    (settings.spools / "d").mkdir(parents=True)
    UsageSpool(settings.spools / "d" / "f.sqlite").create()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(store.open).result()
        merger = SpoolMerger(
            settings, store.database, thread, SetAside(), lambda _: False, clock=lambda: now
        )
        now = 101.0
        await merger.merge_all()
        assert merger.behind_s == 0.0

        def locked(*_: Any) -> None:
            raise StoreError("the database is locked")

        with monkeypatch.context() as patched:
            patched.setattr(spool_merger, "merge", locked)
            now = 131.0
            await merger.merge_all()
        assert merger.behind_s == 30.0
        await merger.merge_all()
        assert merger.behind_s == 0.0
        thread.submit(store.close).result()


async def test_usage_that_can_not_be_merged_for_an_unforeseen_reason_keeps_no_other_back(
    sqlite_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, merged = FleetSettings(data=str(sqlite_place.folder)), list[str]()
    now = 100.0
    store = sqlite_place.store()
    for name in ("d1", "d2"):
        (settings.spools / name).mkdir(parents=True)
        UsageSpool(settings.spools / name / "f.sqlite").create()

    def odd(_: object, spool: Path, *__: object) -> MergedRecords:
        if spool.parent.name == "d1":
            raise ZeroDivisionError
        merged.append(spool.parent.name)
        return MergedRecords(0, {}, 0)

    monkeypatch.setattr(spool_merger, "merge", odd)
    with ThreadPoolExecutor(1) as thread:
        merger = SpoolMerger(
            settings, store.database, thread, SetAside(), lambda _: False, clock=lambda: now
        )
        now = 130.0
        with pytest.raises(ZeroDivisionError):
            await merger.merge_all()
    assert merged == ["d2"]
    assert merger.behind_s == 30.0
