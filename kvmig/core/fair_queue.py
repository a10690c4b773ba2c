"""The order of requests that wait for instances: by class, then by turns of tenants. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

Waiting = TypeVar("Waiting")


class FairQueue(Generic[Waiting]):
    """A tenant with many requests makes another one's first wait for one of its own, not for all.

    Within a tenant the first to come is the first to go. A tenant that comes again is the last of
    the round.
    """

    def __init__(self) -> None:
        self._classes: dict[int, OrderedDict[str, deque[Waiting]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def enter(self, priority: int, tenant: str, one: Waiting) -> None:
        """One more waits. The smaller priority goes first."""
        tenants = self._classes.setdefault(priority, OrderedDict())
        tenants.setdefault(tenant, deque()).append(one)
        self._count += 1

    def remove_waiting(self, priority: int, tenant: str, one: Waiting) -> None:
        """Take a request out, whether its turn has come or not."""
        tenants = self._classes.get(priority, OrderedDict())
        if one in tenants.get(tenant, ()):
            tenants[tenant].remove(one)
            self._count -= 1
            self._tidy(priority, tenant)

    def pop(self) -> Waiting | None:
        """The request whose turn it is; None: the queue is empty."""
        if not self._classes:
            return None
        priority = min(self._classes)
        tenants = self._classes[priority]
        tenant, queue = next(iter(tenants.items()))
        one = queue.popleft()
        tenants.move_to_end(tenant)
        self._count -= 1
        self._tidy(priority, tenant)
        return one

    def _tidy(self, priority: int, tenant: str) -> None:
        tenants = self._classes[priority]
        if not tenants[tenant]:
            del tenants[tenant]
        if not tenants:
            del self._classes[priority]
