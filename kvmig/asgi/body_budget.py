"""The room for bodies in one process, and each account's part of it. Pure.

A body counts from its first byte until the engine has its prompt, a proxy's until it is written to
the deployment, or until its call ends. An account may take as much as is left after that: one alone
takes half of the room, and there is always as much left as the largest one has.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

Full = Literal["", "account", "all"]
"""Which room is full; empty: neither."""


class BodyBudget:
    """Bytes of all bodies that are in."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self._of: Counter[str] = Counter()
        self._seen: set[str] = set()

    def take_seen(self) -> set[str]:
        """Accounts whose bodies were in since the last call."""
        seen, self._seen = self._seen, set(self._of) - {""}
        return seen

    def enter(self, account: str = "") -> BodyShare:
        """Enter one more body, of which nothing has come yet. account: empty: it is unknown."""
        return BodyShare(self, account)

    def used_by(self, account: str) -> int:
        """Bytes of one account's bodies."""
        return self._of[account]

    def full_for(self, account: str, size: int) -> Full:
        """Whether `size` bytes more are too many."""
        left = self.most - self.used - size
        if left < 0:
            return "all"
        return "account" if account and self._of[account] + size > left else ""

    def add(self, account: str, size: int) -> None:
        """Count what is there, or is no more."""
        self.used += size
        self._of[account] += size
        if account:
            self._seen.add(account)
        if not self._of[account]:
            del self._of[account]


class BodyShare:
    """One body's bytes in the budget."""

    def __init__(self, budget: BodyBudget, account: str) -> None:
        self._budget = budget
        self._account = account
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes that count."""
        return self._size

    def count_bytes(self, size: int) -> Full:
        """Count bytes that have come, unless there is no room."""
        full = self._budget.full_for(self._account, size)
        if not full:
            self._budget.add(self._account, size)
            self._size += size
        return full

    def give_back(self) -> None:
        """Free the share. A second call does nothing."""
        size, self._size = self._size, 0
        self._budget.add(self._account, -size)
