"""Which of many tenants' entries goes first where room is short. Pure.

No tenant pushes out the entries of another one that has less than its share.
The next to go is the oldest entry of the tenant whose entries weigh most. So with n tenants, one
that has less than an n-th of the room loses nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from heapq import heappop, heappush
from typing import Generic, TypeVar

Entry = TypeVar("Entry", bound=Hashable)
SPARE_ROWS = 64
"""Outdated rows of the heap that don't count."""


class _TenantEntries(Generic[Entry]):
    """A tenant's entries with their weights; the first was used longest ago."""

    __slots__ = ("entries", "last_use", "newest_row", "tenant", "weight")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.entries: OrderedDict[Entry, int] = OrderedDict()
        self.weight = 0
        """The sum of their weights."""
        self.last_use = 0
        self.newest_row: tuple[int, int, str] | None = None
        """The one of its rows in the heap that was made last."""

    def row(self) -> tuple[int, int, str]:
        """Sorts the heaviest first; of equal ones the one that was used longest ago."""
        return -self.weight, self.last_use, self.tenant


class TenantOrder(Generic[Entry]):
    """Entries by tenant, in the order of their last use."""

    def __init__(self) -> None:
        self._tenants: dict[str, _TenantEntries[Entry]] = {}
        self._tenant_of: dict[Entry, _TenantEntries[Entry]] = {}
        self._uses = 0
        self._rows: list[tuple[int, int, str]] = []
        """A heap. A tenant has one row or several, and the first of them sorts no later than its
        present one: a row is added when its weight grows, and when an outdated one comes first."""

    def __len__(self) -> int:
        return len(self._tenant_of)

    def record_use(self, entry: Entry, tenant: str, weight: int = 1) -> None:
        """The entry is new, or was used. An entry's tenant never changes."""
        its = self._tenants.get(tenant)
        if its is None:
            its = self._tenants[tenant] = _TenantEntries(tenant)
        self._uses += 1
        its.last_use = self._uses
        grown = weight - its.entries.get(entry, 0)
        its.entries[entry] = weight
        its.entries.move_to_end(entry)
        if not grown:
            return
        its.weight += grown
        self._tenant_of[entry] = its
        self._add_row(its)
        if len(self._rows) > SPARE_ROWS + 2 * len(self._tenants):
            self._rows.clear()
            for one in self._tenants.values():
                self._add_row(one)

    def remove_entry(self, entry: Entry) -> None:
        """The entry is gone; ignored if it isn't known."""
        its = self._tenant_of.pop(entry, None)
        if its is None:
            return
        its.weight -= its.entries.pop(entry)
        if not its.entries:
            del self._tenants[its.tenant]

    def find_next(self) -> Entry:
        """The entry that is to go first. Raises IndexError if there is none."""
        while True:
            row = self._rows[0]
            its = self._tenants.get(row[2])
            if its is not None and row == its.row():
                return next(iter(its.entries))
            heappop(self._rows)
            if its is not None and its.newest_row != its.row():
                self._add_row(its)

    def _add_row(self, its: _TenantEntries[Entry]) -> None:
        its.newest_row = its.row()
        heappush(self._rows, its.newest_row)
