"""How long the ledger keeps a row for each call; the sums of days stay.

Rows are deleted a piece at a time, each in a transaction of its own, so that merges, grants and
orders go on between two of them. What was deleted is remembered (`kvmig.fleet.pruned`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

from sqlalchemy import bindparam, delete, exists, select

from kvmig.core.clock import monotonic
from kvmig.fleet.audit import AuditedOrder, add_to_audit
from kvmig.fleet.pruned import remember
from kvmig.fleet.store import OrderActor
from kvmig.fleet.tables import FleetDatabase, StoreError, grants, take_turn, usage

AT_ONCE = 2_000
"""Rows of a transaction: others wait for its end."""
LOOK_S = 3600.0
"""Pause between two looks for rows that have become too old."""
KEEPER = OrderActor("kvmig up --keep-usage-days")

log = logging.getLogger(__name__)


def beginning_of(day: str) -> float:
    """Unix time."""
    return datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()


def day_before(now: float, days: int) -> str:
    """The day (UTC) that was `days` days ago."""
    return (datetime.fromtimestamp(now, UTC).date() - timedelta(days=days)).isoformat()


def prune(database: FleetDatabase, before: str, actor: OrderActor | None, now: float) -> int:
    """Delete up to AT_ONCE rows of calls that began before a day, the oldest first; how many.

    Those that run stay, and those that hold tokens of a quota. actor: for the audit; None: it
    knows. Raises StoreError.
    """
    held = exists().where(grants.c.source == usage.c.source, grants.c.seq == usage.c.seq)
    wanted = (
        select(usage.c.source, usage.c.seq)
        .where(usage.c.began < beginning_of(before), usage.c.status != "running", ~held)
        .order_by(usage.c.began)
        .limit(AT_ONCE)
    )
    with database.transaction() as connection:
        take_turn(connection)
        rows = [(source, seq) for source, seq in connection.execute(wanted)]
        if not rows:
            return 0
        seqs: defaultdict[str, list[int]] = defaultdict(list)
        for source, seq in rows:
            seqs[source].append(seq)
        for source, of_source in seqs.items():
            remember(connection, source, of_source)
        one = delete(usage).where(
            usage.c.source == bindparam("of_source"), usage.c.seq == bindparam("of_seq")
        )
        connection.execute(one, [{"of_source": source, "of_seq": seq} for source, seq in rows])
        if actor is not None:
            order = AuditedOrder("usage.prune", before, after={"before": before})
            add_to_audit(connection, order, actor, now)
    return len(rows)


class UsageRetention:
    """Deletes old rows when an admin orders it, and each day by itself."""

    def __init__(
        self,
        prune_some: Callable[[str, OrderActor | None, float], Awaitable[int]],
        wall: Callable[[], float],
    ) -> None:
        """prune_some: `prune`, on the store's thread. wall: Unix time."""
        self._prune_some = prune_some
        self._wall = wall
        self._one_at_a_time = asyncio.Lock()
        self._closed = False

    async def prune(
        self, before: str, actor: OrderActor, most_s: float = math.inf
    ) -> tuple[int, bool]:
        """Delete what is older than a day, for most_s at most; how many rows, and whether there are
        more. Raises StoreError: then only some are deleted.
        """
        total = 0
        async with self._one_at_a_time:
            until = monotonic() + most_s
            while not self._closed and monotonic() < until:
                noting = None if total else actor
                some = await self._prune_some(before, noting, self._wall())
                total += some
                if some < AT_ONCE:
                    return total, False
        return total, True

    async def run(self, keep_days: int) -> None:
        """Keep rows for `keep_days` days, until cancelled."""
        while True:
            before = day_before(self._wall(), keep_days)
            try:
                count, _ = await self.prune(before, KEEPER)
                if count:
                    log.info("%d rows of calls before %s are deleted", count, before)
            except StoreError as error:
                log.warning("rows of calls before %s stay for now: %s", before, error)
            await asyncio.sleep(LOOK_S)

    def close(self) -> None:
        """End what is being deleted after its present piece."""
        self._closed = True
