"""The client of one HTTP call, as far as its requests need to know it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

SCOPE = "kvmig.caller"
"""Where an ASGI scope has it."""


class Caller:
    """request_ids: of its live requests; the router keeps them."""

    __slots__ = ("_counted", "_hold", "_submitted", "_unserved", "request_ids")

    def __init__(self) -> None:
        self.request_ids: set[str] = set()
        self._unserved: set[str] = set()
        self._submitted = False
        self._counted = 0
        self._hold: Callable[[int], None] | None = None

    def enter(self, hold: Callable[[int], None]) -> None:
        """Count what waits for its first token; `hold` is told by how much that changes.

        A call whose requests aren't there yet counts as one.
        """
        self._hold = hold
        self._count(0 if self._submitted else 1)

    def leave(self) -> None:
        """The call is over: nothing of it waits."""
        self._count(0)
        self._hold = None

    def submitted(self, request_id: str) -> None:
        """It has one more request."""
        self._submitted = True
        self.request_ids.add(request_id)
        self._unserved.add(request_id)
        self._count(len(self._unserved))

    def began(self, request_id: str) -> None:
        """The request has its first token."""
        self._unserved.discard(request_id)
        self._count(len(self._unserved))

    def ended(self, request_id: str) -> None:
        """The request is over."""
        self.request_ids.discard(request_id)
        self.began(request_id)

    def _count(self, waiting: int) -> None:
        if self._hold is not None and waiting != self._counted:
            self._hold(waiting - self._counted)
            self._counted = waiting


current_caller: ContextVar[Caller | None] = ContextVar("current_caller", default=None)
"""Of the HTTP call that this task works for."""
