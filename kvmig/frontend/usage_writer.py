"""Keeps what a meter counts in a file, until the fleet's server has it.

What the disk doesn't take goes to the server itself, whose database may be elsewhere. While neither
takes it, it is kept and tried again each second, and soon calls are refused: they would not
be counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from kvmig.accounts.usage import HAND_OVER, HandOver, UsageRecord, UsageSpool
from kvmig.core.background import cancel_tasks
from kvmig.core.clock import TimeSource, monotonic

WRITE_S = 1.0
"""Pause between two writes: the counts that a killed front end may lose."""
ANSWER_S = 2.0
"""Timeout of handing records to the server."""
AT_ONCE = 200
"""Records of one message."""
PATIENCE_S = 10.0
"""Time for which calls are taken though nothing of what they use can be kept."""
MOST = 50_000
"""Calls whose counts wait to be kept, at most."""
LAST_S = 8.0
"""Time at the end for records that aren't kept yet."""
RETRY_S = 0.5

log = logging.getLogger(__name__)


class RecordSource(Protocol):
    """A meter, as far as it is written down."""

    def take_records(self) -> list[UsageRecord]:
        """Records of all calls of which something has changed since."""
        ...


Meter = TypeVar("Meter", bound=RecordSource)


class UsageWriter(Generic[Meter]):
    """Writes what a meter counts into its spool, every second; `run` it as a task, then `close`."""

    def __init__(
        self, meter: Meter, path: Path, server: str = "", clock: TimeSource = monotonic
    ) -> None:
        """server: path of the socket of a server that takes what the disk doesn't; empty: there is
        none."""
        self.meter = meter
        path.parent.mkdir(parents=True, exist_ok=True)
        self._spool = UsageSpool(path)
        # One thread: what `run` has begun to write when it is cancelled comes before what is newer.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="usage")
        self._server = server
        self._clock = clock
        self._unwritten: dict[int, UsageRecord] = {}
        self._since: float | None = None
        """Time since which nothing could be kept."""
        self._why = ""

    def refusal(self) -> str:
        """Why no call is taken now; empty: they are."""
        late = self._since is not None and self._clock() - self._since > PATIENCE_S
        if not late and len(self._unwritten) <= MOST:
            return ""
        return f"what calls use can't be kept ({self._why}), try again"

    async def run(self) -> None:
        """Run until cancelled."""
        reserving = asyncio.create_task(asyncio.to_thread(self._reserve), name="reserve")
        try:
            while True:
                await asyncio.sleep(WRITE_S)
                was_full = self._since is not None
                await self.write()  # also while a slow disk takes its time for the reserve
                if was_full and self._since is None and reserving.done():
                    reserving = asyncio.create_task(asyncio.to_thread(self._reserve))
        finally:
            await cancel_tasks(reserving)

    async def write(self) -> None:
        """Write now. What can't be kept is tried again."""
        self._unwritten.update((one.seq, one) for one in self.meter.take_records())
        records = list(self._unwritten.values())
        if not records:
            return
        try:
            await asyncio.get_running_loop().run_in_executor(
                self._thread, self._spool.write, records
            )
        except OSError as error:
            self._why = str(error)
            if not await self._hand_over(records):
                self._since = self._clock() if self._since is None else self._since
                log.warning("usage of %d calls waits to be written: %s", len(records), error)
                return
        self._unwritten.clear()
        self._since = None

    async def close(self) -> None:
        """Keep all that is left, for which the spool has some room in reserve."""
        try:
            await self._write_last()
        finally:
            self._thread.shutdown(wait=False)

    async def _write_last(self) -> None:
        await self.write()
        deadline = self._clock() + LAST_S
        while self._unwritten:
            self._spool.use_reserve()
            await self.write()
            if self._unwritten and self._clock() > deadline:
                tokens = sum(one.prompt + one.output for one in self._unwritten.values())
                log.error(
                    "usage of %d calls, %d tokens, is lost: %s",
                    len(self._unwritten), tokens, self._why,
                )  # fmt: skip
                return
            await asyncio.sleep(RETRY_S if self._unwritten else 0.0)

    def _reserve(self) -> None:
        try:
            self._spool.create()
            self._spool.reserve()
        except OSError as error:
            log.warning("no room is in reserve for the usage of calls: %s", error)

    async def _hand_over(self, records: Sequence[UsageRecord]) -> bool:
        """Whether the server has them all."""
        if not self._server:
            return False
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(self._server)
                try:
                    for at in range(0, len(records), AT_ONCE):
                        some = HandOver(self._spool.source, records[at : at + AT_ONCE])
                        message = msgspec.json.encode(some)
                        writer.write(HAND_OVER + message + b"\n")
                        if await reader.readline() != HAND_OVER + b"\n":
                            return False
                finally:
                    writer.close()
        except OSError as error:  # a TimeoutError too
            log.warning("usage: %s: %s", self._server, str(error) or "no answer")
            return False
        return True
