"""The instance of each session's last request: a hint for its next one, never a pin. Pure.

Marks of prompts (`prefix_index`) show what instances hold. An engine that reports none, and a
prompt that is shorter than a mark, leave only the session to go by.
"""

from __future__ import annotations

from typing import NamedTuple

from kvmig.core.tenant_order import TenantOrder

MOST_SESSIONS = 20_000
"""Sessions that are kept; of the tenant with the most, the one that was used longest ago goes
first."""
TRUST = 0.5
"""Part of a session's last prompt that counts as held where it was sent."""


class SessionPlace(NamedTuple):
    """The last request of a session."""

    instance: str
    blocks: float
    """KV blocks of its prompt."""
    tenant: str = ""
    """The account that sent it; empty: it is unknown."""

    def presumed_blocks(self, demand_blocks: float) -> float:
        """Blocks of the next prompt that count as held there, where no report shows it."""
        return TRUST * min(self.blocks, demand_blocks)


class SessionHints:
    """The last instance of each of the sessions that were used last."""

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most = most
        self._places: dict[int, SessionPlace] = {}
        self._order = TenantOrder[int]()

    def __len__(self) -> int:
        return len(self._places)

    def remember_place(self, session: int, place: SessionPlace) -> None:
        """A request of the session was sent there."""
        self._places[session] = place
        self._order.record_use(session, place.tenant)
        if len(self._places) > self._most:
            self.forget_session(self._order.find_next())

    def find(self, session: int) -> SessionPlace | None:
        """The place of the session's last request; None: it isn't known."""
        return self._places.get(session)

    def forget_session(self, session: int) -> None:
        """The place isn't known any more."""
        if self._places.pop(session, None) is not None:
            self._order.remove_entry(session)

    def forget(self, instance: str) -> None:
        """The instance is gone, or began again: it holds nothing."""
        for session in [key for key, place in self._places.items() if place.instance == instance]:
            self.forget_session(session)
