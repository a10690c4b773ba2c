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

from kvmig.asgi.errors import AmbiguousSession, UnknownSession
from kvmig.core.clock import Clock
from kvmig.core.prefix_marks import MARK_TOKENS
from kvmig.engines.base import Frames

KEPT_S = 3600.0
"""How long a session is remembered after its last request."""
MOST_SESSIONS = 4096
MOST_BYTES = 64 << 20
"""Bound for all sessions together; the one that was used longest ago goes first."""
FIXED_BYTES = 1024
"""What a session takes besides its request and tokens."""


@dataclass(slots=True)
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
        self, clock: Clock, most: int = MOST_SESSIONS, most_bytes: int = MOST_BYTES
    ) -> None:
        self._clock = clock
        self._most = most
        self._most_bytes = most_bytes
        self._sessions: OrderedDict[int, RememberedSession] = OrderedDict()
        self.nbytes = 0
        """Memory of all that are kept."""

    def __len__(self) -> int:
        return len(self._sessions)

    def remember_session(self, session: RememberedSession) -> None:
        """A request of it has ended; nothing is kept of one that is too large."""
        self._drop(session.owner)
        session.ended_at = self._clock()
        self._sessions[session.owner] = session
        self.nbytes += session.nbytes
        self.forget_old()

    def find(self, name: int, owner: int | None = None) -> RememberedSession:
        """The session. owner: None: any.

        Raises UnknownSession, and AmbiguousSession if several have one of that id.
        """
        self.forget_old()
        found = [
            one
            for one in self._sessions.values()
            if (one.name == name if owner is None else one.owner == owner)
        ]
        if len(found) > 1:
            raise AmbiguousSession(f"{len(found)} accounts have a session of that id, name one")
        if not found:
            raise UnknownSession(
                f"no request of such a session has ended here in the last {KEPT_S / 60:g} minutes"
            )
        return found[0]

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
            crowded = len(self._sessions) > self._most or self.nbytes > self._most_bytes
            if not crowded and first.ended_at > oldest:
                return
            self._drop(first.owner)

    def _drop(self, owner: int) -> None:
        dropped = self._sessions.pop(owner, None)
        if dropped is not None:
            self.nbytes -= dropped.nbytes
