"""Brings what this host's front ends have counted into the ledger.

A server does so whether or not it leads the fleet: several of them may change PostgreSQL's ledger,
one transaction after the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import TypeVar

from kvmig.accounts.usage import SpoolDamaged, SpooledRecord, UsageSpool
from kvmig.core.clock import TimeSource, monotonic
from kvmig.fleet.ledger import AT_ONCE, MergedRecords, merge
from kvmig.fleet.quotas import give_back
from kvmig.fleet.setaside import SetAside, keep_records, keep_spool
from kvmig.fleet.settings import FleetSettings
from kvmig.fleet.tables import FleetDatabase, StoreError

MERGE_S = 1.0
"""Pause between two looks at what front ends have counted."""

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class SpoolMerger:
    """`run` it as a task."""

    def __init__(
        self,
        settings: FleetSettings,
        database: FleetDatabase,
        thread: Executor,
        set_aside: SetAside,
        is_over: Callable[[str], bool],
        spent: Callable[[Mapping[str, int]], Awaitable[None]] | None = None,
        clock: TimeSource = monotonic,
    ) -> None:
        """thread: one, the database's. is_over: whether a deployment has ended. spent: takes tokens
        that are new in the ledger, by keys' ids; it may raise StoreError."""
        self._spools = settings.spools
        self._aside = settings.path("set-aside")
        """Folder of usage that can't be read."""
        self._database = database
        self._thread = thread
        self._set_aside = set_aside
        self._is_over = is_over
        self._spent = spent
        self._clock = clock
        self._merged_at = clock()

    @property
    def behind_s(self) -> float:
        """The time since all usage was in the ledger, in seconds."""
        return self._clock() - self._merged_at

    @property
    def sources(self) -> set[str]:
        """The front ends that have spools here."""
        return {UsageSpool(path).source for path in self._spools.glob("*/*.sqlite")}

    async def run(self) -> None:
        """Merge every MERGE_S, until cancelled."""
        while True:
            await asyncio.sleep(MERGE_S)
            await self.merge_all()

    async def merge_all(self) -> None:
        """Merge what there is. What can't be merged now waits; an unforeseen error is raised once
        the other deployments' usage is merged."""
        whole = True
        unforeseen: Exception | None = None
        for folder in sorted(self._spools.iterdir()):
            over = self._is_over(folder.name)  # it writes nothing any more
            try:
                for path in sorted(folder.glob("*.sqlite")):
                    try:
                        await self._take_spool(path, over)
                    except SpoolDamaged as error:
                        await self._set_spool_aside(path, error)
                if over:
                    await asyncio.to_thread(remove_empty, folder)
            except (StoreError, OSError) as error:
                log.warning("usage in %s waits to be counted: %s", folder, error)
                whole = False
            except Exception as error:
                log.exception("usage in %s waits to be counted", folder)
                unforeseen = error
        if unforeseen is not None:
            raise unforeseen
        if whole:
            self._merged_at = self._clock()

    async def _stored(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def _take_spool(self, path: Path, over: bool) -> None:
        """Raises StoreError, OSError."""
        spool = UsageSpool(path)
        left = spool.left  # before it is read: who ends last has written all by then
        await self._merge(path, over or left)
        if over or left:
            await self._stored(partial(give_back, self._database, [spool.source]))
        if left and not await asyncio.to_thread(spool.rows, most=1):
            await asyncio.to_thread(spool.remove)

    async def _merge(self, spool: Path, over: bool) -> None:
        """Merge the whole spool. Raises StoreError, OSError."""
        merged = MergedRecords(AT_ONCE, {}, 0)
        while merged.records == AT_ONCE:
            call = partial(merge, self._database, spool, over, merged.last)
            merged = await self._stored(call)
            if self._spent is not None:
                await self._spent(merged.tokens)
            if merged.unread:
                await self._set_records_aside(spool, merged.unread)

    async def _set_spool_aside(self, path: Path, why: SpoolDamaged) -> None:
        """What it held is lost to the ledger. Its front end begins another one. Raises OSError."""
        into = await asyncio.to_thread(keep_spool, self._aside, path)
        self._set_aside.add("spool", str(into), why)

    async def _set_records_aside(self, path: Path, unread: Sequence[SpooledRecord]) -> None:
        """Raises OSError."""
        into = await asyncio.to_thread(keep_records, self._aside, path.stem, unread)
        for one in unread:
            self._set_aside.add("record", f"{one.seq} of {into}", one.why)
        await asyncio.to_thread(UsageSpool(path).forget, unread)


def remove_empty(folder: Path) -> None:
    """Remove the spools of a deployment that has ended, once all is counted. Raises OSError."""
    if not any(UsageSpool(path).rows(most=1) for path in folder.glob("*.sqlite")):
        rmtree(folder)
