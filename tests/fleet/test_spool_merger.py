"""How far the ledger is behind what front ends have counted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvmig.accounts.usage import UsageSpool
from kvmig.fleet import spool_merger
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
