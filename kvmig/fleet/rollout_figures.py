"""What became of a deployment's calls, as the ledger has it."""

from __future__ import annotations

import statistics
from pathlib import Path

from sqlalchemy import select

from kvmig.accounts.usage import UsageSpool
from kvmig.fleet.rollout import CallFigures
from kvmig.fleet.tables import FleetDatabase, usage

NEWEST = 1000
"""Calls at most that are looked at."""


def figures_of(database: FleetDatabase, spools: Path, since: float) -> CallFigures:
    """The newest of a deployment's calls that began since that Unix time.

    spools: the folder in which its front ends count. Raises StoreError.
    """
    sources = [UsageSpool(path).source for path in spools.glob("*.sqlite")]
    wanted = (
        select(usage.c.status, usage.c.ttft_ms)
        .where(usage.c.source.in_(sources), usage.c.began >= since)
        .order_by(usage.c.began.desc())
        .limit(NEWEST)
    )
    with database.transaction(reading=True) as connection:
        rows = connection.execute(wanted).all()
    ended = [status for status, _ in rows if status != "running"]
    times = [ttft_ms for _, ttft_ms in rows if ttft_ms is not None]
    return CallFigures(
        ended=len(ended),
        cut=ended.count("cut"),
        ttft_ms=statistics.median(times) if times else None,
        timed=len(times),
    )
