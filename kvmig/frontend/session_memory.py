"""What a front end remembers of the sessions that it served last, so that they can be moved. Pure.

An instance keeps blocks by hashes, and not whose they are. So the front end keeps each session's
last request: what was submitted, the tokens that it gave, and where. The engine finds the blocks by
that. It is kept in memory alone, within bounds, and no longer than `KEPT_S`.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from kvmig.asgi.errors import UnknownSession
from kvmig.core.clock import TimeSource
from kvmig.core.prefix_marks import MARK_TOKENS
from kvmig.core.tenant_order import TenantOrder
from kvmig.engines.base import Frames

KEPT_S = 3600.0
"""How long a session is remembered after its last request."""
MOST_SESSIONS = 4096
MOST_BYTES = 64 << 20
"""Bound for all sessions together. Of the tenant that takes most of both bounds, the one that was
used longest ago goes first."""
FIXED_BYTES = 1024
"""What a session takes besides its request and tokens."""
UNKNOWN = f"no request of such a session has ended here in the last {KEPT_S / 60:g} minutes"
"""Why a session isn't found."""


@dataclass(eq=False, slots=True)
class RememberedSession:
    """A session's last request."""

    owner: int
    """The owner's session, see `kvmig.asgi.session_id.session_key`."""
    name: int
    """The same for every owner of a session of that id."""
    instance: str
    payload: Frames
    """The request as it was submitted."""
    output_token_ids: array[int]
    marks: Sequence[int] = ()
    """Marks of its prompt (`kvmig.core.prefix_marks`), where they are known."""
    tenant: str = ""
    """The account that it counts for; empty: it is unknown."""
    ended_at: float = 0.0

    @property
    def nbytes(self) -> int:
        """Memory that it takes, about."""
        tokens = len(self.output_token_ids) * self.output_token_ids.itemsize
        return FIXED_BYTES + sum(map(len, self.payload)) + tokens + 8 * len(self.marks)


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many of their first entries are the same."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class SessionMemory:
    """The sessions that were used last, by owner and id."""

    def __init__(
        self, clock: TimeSource, most: int = MOST_SESSIONS, most_bytes: int = MOST_BYTES
    ) -> None:
        self._clock = clock
        self._most = most
        self._most_bytes = most_bytes
        self._sessions: OrderedDict[int, RememberedSession] = OrderedDict()
        self._order = TenantOrder[int]()
        self.nbytes = 0
        """Memory of all that are kept."""

    def __len__(self) -> int:
        return len(self._sessions)

    def remember_session(self, session: RememberedSession) -> None:
        """A request of it has ended; nothing is kept of one that is too large."""
        self._drop(session.owner)
        if session.nbytes <= self._most_bytes:
            session.ended_at = self._clock()
            self._sessions[session.owner] = session
            weight = session.nbytes + self._most_bytes // self._most
            self._order.record_use(session.owner, session.tenant, weight)
            self.nbytes += session.nbytes
        self.forget_old()

    def find(self, owner: int) -> RememberedSession:
        """The session of this owner. Raises UnknownSession."""
        session = self.find_if_known(owner)
        if session is None:
            raise UnknownSession(UNKNOWN)
        return session

    def find_if_known(self, owner: int) -> RememberedSession | None:
        """The session of this owner; None: it isn't known."""
        self.forget_old()
        return self._sessions.get(owner)

    def find_all(
        self, name: int | None = None, owner: int | None = None
    ) -> list[RememberedSession]:
        """The sessions of an id, or of an owner; None: of any."""
        self.forget_old()
        return [
            one
            for one in self._sessions.values()
            if name in (None, one.name) and owner in (None, one.owner)
        ]

    def note_move(self, owner: int, source: str, destination: str) -> None:
        """What `source` had of the session is at `destination` now. A later turn that ended
        meanwhile left only its own tokens there, without their beginning."""
        session = self._sessions.get(owner)
        if session is not None and session.instance == source:
            session.instance = destination

    def forget_at(self, owner: int, instance: str) -> None:
        """Forget a session that may or may not be at this instance."""
        session = self._sessions.get(owner)
        if session is not None and session.instance == instance:
            self._drop(owner)

    def find_shared_tokens(self, session: RememberedSession) -> int:
        """The first tokens that another session at its instance has, too."""
        others = (
            one.marks
            for one in self._sessions.values()
            if one is not session and one.instance == session.instance
        )
        same = (common_length(session.marks, marks) for marks in others)
        return MARK_TOKENS * max(same, default=0)

    def forget(self, instance: str) -> None:
        """The instance is gone, with all that it held."""
        for owner in [key for key, one in self._sessions.items() if one.instance == instance]:
            self._drop(owner)

    def forget_old(self) -> None:
        """Keep to the bounds."""
        oldest = self._clock() - KEPT_S
        while self._sessions:
            first = next(iter(self._sessions.values()))
            if first.ended_at <= oldest:
                self._drop(first.owner)
            elif len(self._sessions) > self._most or self.nbytes > self._most_bytes:
                self._drop(self._order.find_next())
            else:
                return

    def _drop(self, owner: int) -> None:
        dropped = self._sessions.pop(owner, None)
        if dropped is not None:
            self.nbytes -= dropped.nbytes
            self._order.remove_entry(owner)
