"""Two servers of one PostgreSQL: the leader shows that it lives, the other waits to lead.

What they decide is in `kvmig.fleet.leadership`. What makes it safe is PostgreSQL's lock, which one
connection has at a time, and the token that a leader must still have when its connection is made
again.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable

from sqlalchemy import inspect, select, text, update

from kvmig.core.clock import monotonic
from kvmig.fleet.leadership import BEAT_S, LOOK_S, LeaderRow, LeadProof, StandbyWatch
from kvmig.fleet.pepper import check_pepper, kept_pepper, read_pepper
from kvmig.fleet.settings import FleetSettings
from kvmig.fleet.tables import (
    LOCK_KEY,
    DatabaseUnusable,
    FleetDatabase,
    StoreError,
    leadership,
)
from kvmig.process.child import say

QUICK_S = 2.0
"""Timeout of a beat or a look: the database is away after it."""

log = logging.getLogger(__name__)


def host_name(settings: FleetSettings) -> str:
    """The name of the servers of a folder, for those of other hosts."""
    return f"{socket.gethostname()}:{settings.data}"


def look_database(settings: FleetSettings) -> FleetDatabase:
    """A connection for beats and looks. Raises ConfigError."""
    return FleetDatabase(settings.database_url, QUICK_S, leads=False, statement_s=QUICK_S)


def leader_of(database: FleetDatabase) -> LeaderRow | None:
    """Look who leads; None: no server ever has. Raises StoreError."""
    with database.transaction(reading=True) as connection:
        looking = inspect(connection)
        if not looking.has_table(leadership.name):
            return None
        there = {one["name"] for one in looking.get_columns(leadership.name)}
        # A database that an older kvmig leads has fewer columns.
        row = connection.execute(
            select(*(leadership.c[name] for name in LeaderRow._fields if name in there))
        ).first()
        return None if row is None else LeaderRow(*row)


def raise_beat(database: FleetDatabase, token: int) -> LeaderRow | None:
    """Show that the leader lives. Returns the one that leads in its place; None: none does. Raises
    StoreError."""
    mine = leadership.c.token == token
    with database.transaction() as connection:
        beat = update(leadership).where(mine).values(beat=leadership.c.beat + 1)
        if connection.execute(beat).rowcount:
            return None
    return leader_of(database) or LeaderRow(token + 1, 0, "")


def leave_lead(database: FleetDatabase) -> None:
    """Let the next server lead at once. database: the leader's. Raises StoreError."""
    mine = leadership.c.token == database.token
    with database.transaction() as connection:
        connection.execute(update(leadership).where(mine).values(host=""))


def end_session(database: FleetDatabase, silent: LeaderRow) -> bool:
    """End the session that has the leader's lock, unless the leader has beaten since; whether there
    was one. Raises StoreError: also where the leader connects as another user of PostgreSQL."""
    ends = text(
        "SELECT pg_terminate_backend(locks.pid) FROM pg_locks AS locks, leadership"
        " WHERE locks.locktype = 'advisory' AND locks.granted"
        " AND locks.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        " AND (locks.classid::bigint << 32 | locks.objid::bigint) = :key"
        " AND leadership.token = :token AND leadership.beat = :beat"
    )
    values = {"key": LOCK_KEY, "token": silent.token, "beat": silent.beat}
    with database.transaction() as connection:
        return bool(connection.execute(ends, values).scalars().all())


def check_standby(database: FleetDatabase, settings: FleetSettings) -> bool:
    """Refuse a pepper of this host by which a server could not lead; whether there is one to
    compare with. Raises StoreError."""
    with database.transaction(reading=True) as connection:
        kept = kept_pepper(connection) if inspect(connection).has_table("meta") else None
    if kept is None:
        return False
    path = settings.path("pepper")
    check_pepper(path, read_pepper(path, make=False), kept, database.name)
    return True


class LeaderHeartbeat:
    """Shows standbys that this server leads, on a thread of its own: a busy event loop is no end of
    a leader. `start` it, then `close` it."""

    def __init__(
        self,
        settings: FleetSettings,
        token: int,
        deposed: Callable[[LeaderRow], object],
        leads: Callable[[], object] = lambda: None,
    ) -> None:
        """deposed: called on the event loop, with the server that leads now. leads: called there
        after each beat."""
        self.proof = LeadProof(monotonic())
        self._leads = leads
        self._database = look_database(settings)
        self._token = token
        self._deposed = deposed
        self._loop = asyncio.get_running_loop()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leader", daemon=True)
        self.start = self._thread.start

    async def close(self) -> None:
        """Beat no more."""
        self._over.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, 2 * QUICK_S)
        self._database.close()

    def _run(self) -> None:
        while not self._over.wait(BEAT_S):
            began = monotonic()
            try:
                leader = raise_beat(self._database, self._token)
            except StoreError as error:  # no server can lead by a database that is away
                log.info("no beat: %s", error)
                self.proof.note_away(began)
                self._loop.call_soon_threadsafe(self._leads)
                continue
            except Exception:  # without beats another server leads, and this one learns nothing
                log.exception("a beat failed, and the next one comes")
                continue
            if leader is not None:
                self._loop.call_soon_threadsafe(self._deposed, leader)
                return
            self.proof.note_beat(began)
            self._loop.call_soon_threadsafe(self._leads)


class StandbyServer:
    """Waits until this server may lead."""

    def __init__(self, settings: FleetSettings, led_by: Callable[[LeaderRow], None]) -> None:
        """led_by: called with each server of another host that is seen to lead.

        Raises ConfigError.
        """
        self._settings = settings
        self._led_by = led_by
        self._leader = 0
        """The term of the leader that was seen last."""
        self._database = look_database(settings)
        self._watch = StandbyWatch(host_name(settings))
        self._said = ""

    async def wait(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Return once `lead` has taken the database, which raises StoreError while another server
        has it. Raises DatabaseUnusable where this server never could."""
        checked = False
        try:
            while True:
                try:
                    if not checked:
                        database, settings = self._database, self._settings
                        checked = await asyncio.to_thread(check_standby, database, settings)
                    if await self._may_lead():
                        await lead()
                        return
                except DatabaseUnusable:
                    raise
                except StoreError as error:
                    self._watch.note_miss()
                    self._say(f"standby: {error}")
                await asyncio.sleep(LOOK_S)
        finally:
            self._database.close()

    async def _may_lead(self) -> bool:
        """Raises StoreError."""
        row = await asyncio.to_thread(leader_of, self._database)
        chance = self._watch.take_row(row, monotonic())
        if row is None or chance == "free":
            return True
        if row.token != self._leader:
            self._leader = row.token
            self._led_by(row)
        if chance == "none":
            self._say(f"standby: {row.host} leads, this host takes over when it is gone")
        else:
            say(f"standby: {row.host} shows no life, this host takes over")
            await asyncio.to_thread(end_session, self._database, row)
        return chance != "none"

    def _say(self, sentence: str) -> None:
        if sentence != self._said:
            self._said = sentence
            say(sentence)
