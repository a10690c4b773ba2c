"""Quotas of keys and users, of all their tokens or of one model's: tokens are granted to calls in
pieces, so that all never get more.

A grant is written before it is sent, and stands until the call's final record is merged, in the
same transaction. What is left of a quota is what neither the ledger nor a grant has. A front end
that is killed leaves its grants behind. Once all that its spool has kept is merged, they are given
back: its calls cost what the ledger says of them, which lacks what they used in the last second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Table, case, delete, exists, func, or_, select
from sqlalchemy.engine import Connection

from kvmig.accounts.allowances import SMALL, TokenGrant, TokenRequest
from kvmig.accounts.keys import (
    AppliedQuota,
    KeyGrant,
    Period,
    quota_reserved,
    quota_too_small,
    quota_used_up,
    quotas_of,
)
from kvmig.accounts.usage import HAND_OVER, HandOver, UsageRecord
from kvmig.fleet.pruned import among
from kvmig.fleet.tables import (
    FleetDatabase,
    StoreError,
    api_keys,
    grants,
    take_turn,
    upsert,
    usage,
    usage_daily,
)
from kvmig.process.unix_server import UnixServer
from kvmig.proxy.messages import QuotaLeft

OVER = "the call is over"
LINE_BYTES = 1 << 20
"""Most bytes of a front end's message."""
MOST_NAMED = 1000
"""Accounts that a query names; one about more of them reads those of all."""

log = logging.getLogger(__name__)


def period_of(kind: Period, at: float) -> str:
    """The beginning of the days of a period, which also names it; empty: all days."""
    day = datetime.fromtimestamp(at, UTC).date().isoformat()
    return {"day": day, "month": day[:7], "total": ""}[kind]


def begins_anew(kind: Period, at: float) -> float | None:
    """Unix time of the next period; None: there is none."""
    day = datetime.fromtimestamp(at, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if kind == "total":
        return None
    if kind == "day":
        return (day + timedelta(days=1)).timestamp()
    return (day.replace(day=1) + timedelta(days=32)).replace(day=1).timestamp()


def grant(database: FleetDatabase, key: KeyGrant, ask: TokenRequest) -> TokenGrant:
    """Grant what there is, and keep that it was granted. Raises StoreError."""
    quotas = quotas_of(key, ask.model)
    given = ask.want
    if not quotas:
        return TokenGrant(ask.number, given)
    with database.transaction() as connection:
        take_turn(connection)
        if _is_over(connection, ask):
            return TokenGrant(ask.number, 0, OVER)
        for one in quotas:
            period = period_of(one.period, ask.began)
            spare = left_of(connection, one, period)
            piece = max(ask.least, SMALL, spare // _open(connection, one, period))
            given = min(given, spare, piece)
            if given < ask.least:
                reserved = _reserved(connection, one, period, ask)
                return _refusal(ask, one, spare, reserved)
        row = {
            "source": ask.source, "seq": ask.seq, "key_id": key.key_id,
            "model": ask.model, "day": period_of("day", ask.began), "tokens": given,
        }  # fmt: skip
        upsert(connection, grants, ("source", "seq"), [row], add=("tokens",))
        return TokenGrant(ask.number, given)


def _refusal(ask: TokenRequest, quota: AppliedQuota, spare: int, reserved: int) -> TokenGrant:
    """Why there are fewer than it needs. spare: what no call has. reserved: by other calls."""
    anew = begins_anew(quota.period, ask.began)
    if spare + reserved >= ask.least:
        again = quota_reserved(quota, spare + reserved).message
        return TokenGrant(ask.number, 0, again, again=True)
    if spare > 0:
        return TokenGrant(ask.number, 0, quota_too_small(quota, spare, ask.least, anew).message)
    return TokenGrant(ask.number, 0, quota_used_up(quota, anew).message)


def _is_over(connection: Connection, ask: TokenRequest) -> bool:
    """Whether the call's last record is or was here: its question waited longer than it ran."""
    over = (usage.c.status != "running") | usage.c.ended.is_not(None)
    wanted = select(usage.c.seq).where(usage.c.source == ask.source, usage.c.seq == ask.seq, over)
    if connection.execute(wanted).first() is not None:
        return True
    return bool(among(connection, ask.source, [ask.seq]))


def _counts(rows: Table, quota: AppliedQuota, period: str) -> ColumnElement[bool]:
    """Which rows count for a quota: those of all keys that were rotated one into another, or of all
    of a user's, and of its model.
    """
    whose = quota.whose.id
    keys = select(api_keys.c.id).where((api_keys.c.origin == whose) | (api_keys.c.user_id == whose))
    found = rows.c.key_id.in_(keys) & rows.c.day.startswith(period)
    return found & (rows.c.model == quota.model) if quota.model else found


def _open(connection: Connection, quota: AppliedQuota, period: str) -> int:
    """Calls that have grants, among whom the rest of a quota is shared; at least 1."""
    counted = select(func.count()).where(_counts(grants, quota, period))
    return max(1, int(connection.execute(counted).scalar() or 0))


def left_of(connection: Connection, quota: AppliedQuota, period: str) -> int:
    """Tokens of a quota that are neither used nor granted."""
    used = _used(quota, period)
    open_ = _ahead().where(_counts(grants, quota, period))
    spent = sum(int(connection.execute(one).scalar() or 0) for one in (used, open_))
    return quota.tokens - spent


def _used(quota: AppliedQuota, period: str) -> Any:
    """Tokens of a quota that the ledger has."""
    return select(func.sum(usage_daily.c.prompt + usage_daily.c.output)).where(
        _counts(usage_daily, quota, period)
    )


def _ahead() -> Any:
    """Tokens that calls were granted, and that the ledger doesn't have."""
    ahead = grants.c.tokens - func.coalesce(usage.c.prompt + usage.c.output, 0)
    return select(func.sum(case((ahead > 0, ahead), else_=0))).select_from(
        grants.outerjoin(usage, (usage.c.source == grants.c.source) & (usage.c.seq == grants.c.seq))
    )


def _reserved(connection: Connection, quota: AppliedQuota, period: str, ask: TokenRequest) -> int:
    """Tokens of a quota that other calls were granted and may give back. What this one was granted
    it has used, or it would not ask; and calls that have ended give nothing back."""
    others = (grants.c.source != ask.source) | (grants.c.seq != ask.seq)
    runs = func.coalesce(usage.c.status, "running") == "running"
    wanted = _ahead().where(_counts(grants, quota, period), others, runs)
    return int(connection.execute(wanted).scalar() or 0)


def settle(connection: Connection, source: str, records: Sequence[UsageRecord]) -> None:
    """What ended calls were granted and haven't used is left again."""
    ended = [one.seq for one in records if one.ended is not None]
    wanted = delete(grants).where(grants.c.source == source, grants.c.seq.in_(ended))
    if ended:
        connection.execute(wanted)


def sweep(database: FleetDatabase) -> int:
    """Take back what was granted to calls that have ended since; how many. Raises StoreError.

    There are none, as long as messages come in the order in which they were sent.
    """
    ended = exists().where(
        usage.c.source == grants.c.source, usage.c.seq == grants.c.seq, usage.c.ended.is_not(None)
    )
    with database.transaction() as connection:
        take_turn(connection)
        return int(connection.execute(delete(grants).where(ended)).rowcount)


def give_back(database: FleetDatabase, sources: Collection[str]) -> int:
    """Take back what calls of front ends were granted that are gone, and whose spools are merged:
    the ledger has all that will ever be known of them. How many calls. Raises StoreError.
    """
    with database.transaction() as connection:
        take_turn(connection)
        return int(connection.execute(delete(grants).where(grants.c.source.in_(sources))).rowcount)


def idle_sources(database: FleetDatabase) -> set[str]:
    """Front ends whose calls were granted tokens, and of which the ledger has no call that runs.

    Raises StoreError.
    """
    runs = exists().where(usage.c.source == grants.c.source, usage.c.status == "running")
    with database.transaction(reading=True) as connection:
        found = connection.execute(select(grants.c.source).where(~runs).distinct())
        return {str(source) for (source,) in found}


def left(database: FleetDatabase, keys: Iterable[KeyGrant], now: float) -> dict[str, QuotaLeft]:
    """What isn't used of the quotas of keys and their users in this period, by `AppliedQuota.id`.
    What of it calls have reserved, they may give back.

    However many quotas there are, the ledger is asked once. Raises StoreError.
    """
    every = {one.id: one for key in keys for one in quotas_of(key)}
    if not every:
        return {}
    accounts = {one.whose.id for one in every.values()}
    with database.transaction(reading=True) as connection:
        used = _used_by(connection, accounts, {one.period for one in every.values()}, now)
    return {
        one.id: QuotaLeft(
            one.tokens - used[one.whose.id, one.period, one.model], begins_anew(one.period, now)
        )
        for one in every.values()
    }


def _used_by(
    connection: Connection, accounts: Collection[str], kinds: Collection[Period], now: float
) -> Counter[tuple[str, Period, str]]:
    """Tokens that the ledger has of this period, by account, kind of period, and model; the model
    is empty for those of all models together. accounts: ids of users, and origins of keys.
    """
    periods = {kind: period_of(kind, now) for kind in kinds}
    day, tokens = usage_daily.c.day, usage_daily.c.prompt + usage_daily.c.output
    sums = [func.sum(case((day.startswith(begin), tokens), else_=0)) for begin in periods.values()]
    whose = (api_keys.c.origin, api_keys.c.user_id)
    wanted = (
        select(*whose, usage_daily.c.model, *sums)
        .join_from(usage_daily, api_keys, usage_daily.c.key_id == api_keys.c.id)
        .where(day >= min(periods.values()))
        .group_by(*whose, usage_daily.c.model)
    )
    if len(accounts) <= MOST_NAMED:
        wanted = wanted.where(or_(*(one.in_(sorted(accounts)) for one in whose)))
    used: Counter[tuple[str, Period, str]] = Counter()
    for origin, user, model, *counts in connection.execute(wanted):
        for kind, count in zip(periods, counts, strict=True):
            for account, of in product((origin, user), {"", model}):
                used[account, kind, of] += int(count)
    return used


class QuotaSocket:
    """The socket at which front ends ask. `open` it inside a running event loop, then `close` it.

    Its messages are lines of JSON, and not framed as in `rpc.unix_stream`: front ends outlive the
    server, so that the next version's server must read what those of this one send.
    """

    def __init__(
        self,
        path: str,
        answer: Callable[[TokenRequest], Awaitable[TokenGrant]],
        take: Callable[[HandOver], Awaitable[None]],
    ) -> None:
        """answer, take: may raise StoreError; the front end tries again then."""
        self._answer = answer
        self._take = take
        self._server = UnixServer(path, self._serve, LINE_BYTES)
        self.open = self._server.open
        """Raises ConfigError."""
        self.close = self._server.close
        """Disconnects all."""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                if line.startswith(HAND_OVER):
                    handed = msgspec.json.decode(line.removeprefix(HAND_OVER), type=HandOver)
                    await self._take(handed)
                    writer.write(HAND_OVER + b"\n")
                    continue
                granted = await self._answer(msgspec.json.decode(line, type=TokenRequest))
                writer.write(msgspec.json.encode(granted) + b"\n")
        except (StoreError, msgspec.DecodeError, ValueError, ConnectionError) as error:
            log.warning("quota: %s", error)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
