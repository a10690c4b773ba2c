"""Keeps what a meter counts in a file, until the fleet's server has it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from kvmig.accounts.usage import Spool, UsageRecord
from kvmig.gateway.meter import Meter

WRITE_S = 1.0
"""Between two writes: what a front end that is killed may have lost of its counts."""

log = logging.getLogger(__name__)


class UsageWriter:
    """Writes what a meter counts into its spool, every second; `run` it as a task."""

    def __init__(self, meter: Meter, path: Path) -> None:
        self.meter = meter
        path.parent.mkdir(parents=True, exist_ok=True)
        self._spool = Spool(path)
        self._unwritten: dict[int, UsageRecord] = {}

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(WRITE_S)
            await self.write()

    async def write(self) -> None:
        """Write now. What can't be written is kept, and tried again."""
        self._unwritten.update((one.seq, one) for one in self.meter.take())
        records = list(self._unwritten.values())
        if not records:
            return
        try:
            await asyncio.to_thread(self._spool.write, records)
        except OSError as error:
            log.warning("usage of %d calls waits to be written: %s", len(records), error)
            return
        self._unwritten.clear()
