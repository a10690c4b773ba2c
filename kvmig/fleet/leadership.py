"""When a server that stands by may lead the fleet in place of another one. Pure.

The leader raises a number in the database, its beat, several times a second. A standby looks at
that number as often. It takes the lead when it has seen for long enough that the number stands
still, though the database answered all the time. No clock of another host counts.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Chance = Literal["none", "free", "silent"]
"""Whether a standby may lead. none: another server does. free: no server does, or this host's own
did, and the database's lock shows whether it is gone. silent: the server that leads shows no
life, and its session is to be ended first."""

BEAT_S = 0.3
"""Pause between two beats of the leader."""
LOOK_S = 0.25
"""Pause between two looks of a standby."""
SILENT_S = 1.5
"""A leader that was seen to beat has lost the lead after this time without a beat."""
UNSEEN_S = 6.0
"""The same for one that wasn't seen to beat since the database was away, since this standby began,
or since it leads: it may be about to connect."""
GAP_S = 1.0
"""Time between two looks that counts as silence at most: before it, too much may have happened."""


class LeaderRow(NamedTuple):
    """What the database has of the leader."""

    token: int
    """Rises with every leader: what an older one writes is refused."""
    beat: int
    host: str
    """The leader's name; empty: the last one has left."""
    door: str = ""
    """HOST:PORT at which its proxies take calls that other hosts relay; empty: they take none."""


class StandbyWatch:
    """What one standby has seen of the leader."""

    def __init__(self, host: str) -> None:
        """host: this one's name, the same for all servers of its folder."""
        self._host = host
        self._seen: LeaderRow | None = None
        self._looked_at = 0.0
        self._silent_s = 0.0
        self._beats = False
        """Whether this leader was seen to beat since the database was away."""

    def take_row(self, row: LeaderRow | None, now: float) -> Chance:
        """What a look has found. row: None: no server has ever led. now: of a steady clock."""
        before, gap_s = self._seen, now - self._looked_at
        self._seen, self._looked_at = row, now
        if row is None or row.host in ("", self._host):
            return "free"
        if row != before:
            self._beats = before is not None and before.token == row.token
            self._silent_s = 0.0
        elif gap_s <= GAP_S:
            self._silent_s += gap_s
        else:
            self._miss()
        return "silent" if self._silent_s >= (SILENT_S if self._beats else UNSEEN_S) else "none"

    def note_miss(self) -> None:
        """A look has failed: the database is away, for the leader as well."""
        self._seen = None
        self._miss()

    def _miss(self) -> None:
        self._silent_s, self._beats = 0.0, False


class LeadProof:
    """What a leader knows of its lead, before it gives an order. Make it when it takes the lead."""

    def __init__(self, now: float) -> None:
        self._beaten_at = now
        self._away = False

    def note_beat(self, now: float) -> None:
        """The database has taken a beat that was begun at this time."""
        self._beaten_at, self._away = now, False

    def note_away(self, now: float) -> None:
        """A beat that was begun at this time has failed: the database is away, and no other server
        can take the lead by it from then on."""
        self._away = self.holds(now)

    def holds(self, now: float) -> bool:
        """Whether no other server can lead yet, as far as this one can know. One that stood still
        has to beat first."""
        return self._away or now - self._beaten_at < SILENT_S
