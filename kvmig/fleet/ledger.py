"""The ledger: what every call has used, merged exactly once from the front ends' spools.

A record says all of its call so far. Merging it writes the call's row and adds what is new since
the last merge to the day's sums, in one transaction; so a record that is merged again, after
a process has died in between, adds nothing. Nor does it once its row was deleted
(`kvmig.fleet.retention`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import func, select
from sqlalchemy.engine import Connection

from kvmig.accounts.usage import HandOver, SpooledRecord, UsageRecord, UsageSpool
from kvmig.fleet.pruned import among
from kvmig.fleet.quotas import settle
from kvmig.fleet.tables import (
    FleetDatabase,
    api_keys,
    take_turn,
    upsert,
    usage,
    usage_daily,
    users,
)

FIELDS = ("key", "user", "model", "day")
"""Fields by which sums can be grouped."""
AT_ONCE = 500
"""Records of a transaction: SQLite takes as many variables, and orders wait for its end."""
COUNTS = ("prompt", "cached", "output", "characters", "seconds", "images")
"""Counts of a call: tokens, of which cached ones are part of the prompt, and what isn't counted in
tokens."""
SUMS = ("calls", *COUNTS)


class MergedRecords(NamedTuple):
    """What was taken of a spool."""

    records: int
    tokens: Mapping[str, int]
    """Prompt and output together, by the keys' ids."""
    last: int
    """Number of the last record."""
    unread: Sequence[SpooledRecord] = ()
    """Rows that can't be read; they stay in the spool."""


def merge(
    database: FleetDatabase, spool: Path, over: bool = False, after: int = 0
) -> MergedRecords:
    """Take AT_ONCE of a spool's records into the ledger, or as many as there are, from those with
    greater numbers than `after`. Raises StoreError, OSError.

    Records of calls that run stay in the spool. over: no process writes it any more, so no call
    runs; the front end was killed under those that are marked as running.
    """
    file = UsageSpool(spool)
    kept = file.rows(after, AT_ONCE)
    if not kept:
        return MergedRecords(0, {}, after)
    records = [one.record for one in kept if one.record is not None]
    tokens: Mapping[str, int] = {}
    if records:
        with database.transaction() as connection:
            take_turn(connection)
            tokens = _merge(connection, file.source, records, over)
    file.forget(one for one in kept if one.record and (over or one.record.ended is not None))
    unread = [one for one in kept if one.record is None]
    return MergedRecords(len(kept), tokens, kept[-1].seq, unread)


def take(database: FleetDatabase, handed: HandOver) -> Mapping[str, int]:
    """Records that a front end couldn't write; tokens that are new, by the keys' ids.

    Raises StoreError.
    """
    with database.transaction() as connection:
        take_turn(connection)
        return _merge(connection, handed.source, handed.records)


def _cut(record: UsageRecord) -> UsageRecord:
    running = record.status == "running"
    return msgspec.structs.replace(record, status="cut") if running else record


def _merge(
    connection: Connection, source: str, records: Sequence[UsageRecord], over: bool = False
) -> Counter[str]:
    """Tokens that are new, by the keys' ids. over: none of the calls runs any more."""
    seqs = [one.seq for one in records]
    wanted = select(usage.c.seq, usage.c.status, *(usage.c[name] for name in COUNTS)).where(
        usage.c.source == source, usage.c.seq.in_(seqs)
    )
    before = {
        seq: _Known(status, dict(zip(COUNTS, counts, strict=True)))
        for seq, status, *counts in connection.execute(wanted)
    }
    pruned = among(connection, source, [seq for seq in seqs if seq not in before])
    news = [_news(one, before.get(one.seq)) for one in records if one.seq not in pruned]
    rows = [_cut(one) if over else one for one in news if one is not None]
    if not rows:
        return Counter()
    sums: defaultdict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for one in rows:
        day = sums[_day(one.began), one.account, one.model]
        day["calls"] += one.seq not in before
        known = before[one.seq].counts if one.seq in before else {}
        for name in COUNTS:
            day[name] += getattr(one, name) - known.get(name, 0)
    upsert(connection, usage, ("source", "seq"), [_row(source, one) for one in rows])
    days = [
        {"day": day, "key_id": key_id, "model": model, **{name: sum_[name] for name in SUMS}}
        for (day, key_id, model), sum_ in sums.items()
    ]
    upsert(connection, usage_daily, ("day", "key_id", "model"), days, add=SUMS)
    settle(connection, source, rows)
    tokens: Counter[str] = Counter()
    for (_, key_id, _), sum_ in sums.items():
        tokens[key_id] += sum_["prompt"] + sum_["output"]
    return tokens


class _Known(NamedTuple):
    """What the ledger has of a call."""

    status: str
    counts: Mapping[str, int]
    """The counts by their names in COUNTS."""


def _news(record: UsageRecord, known: _Known | None) -> UsageRecord | None:
    """A record as far as it says more than the ledger has; None: it says less.

    What was handed over may be newer than what the spool has.
    """
    if known is None or record.status != "running":
        return record
    if known.status != "running":
        return None
    newest = {name: max(getattr(record, name), known.counts[name]) for name in COUNTS}
    return msgspec.structs.replace(record, **newest)


def _row(source: str, record: UsageRecord) -> dict[str, Any]:
    fields = msgspec.structs.asdict(record)
    return {"source": source, "key_id": fields.pop("account"), **fields}


def _day(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).date().isoformat()


def sums(
    database: FleetDatabase,
    by: Sequence[str],
    since: str = "",
    until: str = "",
    user: str | None = None,
    limit: int | None = None,
) -> list[dict[str, Any]]:
    """Calls and tokens, by some of FIELDS, largest output first. since, until: days, both included.
    user: only those of this one's keys. limit: most rows; None: all.

    Raises StoreError.
    """
    columns: dict[str, Any] = {
        "key": func.coalesce(api_keys.c.prefix, usage_daily.c.key_id),
        "user": func.coalesce(users.c.name, ""),
        "model": usage_daily.c.model,
        "day": usage_daily.c.day,
    }
    named = [columns[field].label(field) for field in by]
    counted = [func.sum(usage_daily.c[name]).label(name) for name in SUMS]
    wanted = select(*named, *counted).select_from(
        usage_daily.outerjoin(api_keys, api_keys.c.id == usage_daily.c.key_id).outerjoin(
            users, users.c.id == api_keys.c.user_id
        )
    )
    if user is not None:
        wanted = wanted.where(users.c.name == user)
    if since:
        wanted = wanted.where(usage_daily.c.day >= since)
    if until:
        wanted = wanted.where(usage_daily.c.day <= until)
    if named:
        wanted = wanted.group_by(*named)
    wanted = wanted.order_by(func.sum(usage_daily.c.output).desc(), *named).limit(limit)
    with database.transaction(reading=True) as connection:
        return [
            {name: int(value or 0) if name in SUMS else value for name, value in row.items()}
            for row in connection.execute(wanted).mappings()
        ]
