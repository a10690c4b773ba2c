"""Bounds the memory of entries that an engine's application keeps for users between calls. Pure.

vLLM keeps stored responses, their messages and their events until its process ends. Here the oldest
ones give way: those of the user first whose entries take most.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TypeVar

from kvmig.frontend.isolation import OwnEntries

Value = TypeVar("Value")

MOST_BYTES = 32 << 20
"""Bytes of all entries of one kind."""
COUNTED = 64
"""Items of a list that are looked at, if it has more."""
OBJECT_BYTES = 64
"""Bytes of any object, with what refers to it."""


class StoredEntries(OwnEntries[Value]):
    """Entries of users, which take a limited number of bytes together."""

    def __init__(
        self,
        size: Callable[[Value], int] | None = None,
        *,
        grows: bool = False,
        most: int = MOST_BYTES,
    ) -> None:
        """size: of an entry, in bytes; None: by all that it holds. grows: whether entries do, so
        that each one is measured again with each new one."""
        super().__init__()
        self._size = size or rough_size
        self._grows = grows
        self._most = most
        self._sizes: dict[tuple[str, str], int] = {}

    def __setitem__(self, key: str, value: Value) -> None:
        self.pop(key, None)  # the newest is the last
        super().__setitem__(key, value)
        for one, kept in self._entries.items():
            if self._grows or one not in self._sizes:
                self._sizes[one] = self._size(kept)
        self._make_room()

    def __delitem__(self, key: str) -> None:
        name = self.name_of(key)
        super().__delitem__(key)
        self._sizes.pop(name, None)

    def _make_room(self) -> None:
        taken: Counter[str] = Counter()
        for (owner, _), size in self._sizes.items():
            taken[owner] += size
        total = taken.total()
        while total > self._most:
            (owner, _), *_ = taken.most_common(1)
            oldest = next(one for one in self._entries if one[0] == owner)
            del self._entries[oldest]
            size = self._sizes.pop(oldest)
            taken[owner] -= size
            total -= size


def rough_size(value: object) -> int:
    """Bytes of a value with all that it holds, roughly: of a long list by some of its items."""
    if isinstance(value, str | bytes):
        return OBJECT_BYTES + len(value)
    if isinstance(value, Mapping):
        return OBJECT_BYTES + sum(rough_size(key) + rough_size(one) for key, one in value.items())
    if isinstance(value, list | tuple | deque):
        step = max(1, len(value) // COUNTED)
        some = list(islice(value, 0, None, step))
        return OBJECT_BYTES + sum(map(rough_size, some)) * len(value) // max(1, len(some))
    if hasattr(value, "__dict__"):
        return OBJECT_BYTES + rough_size(vars(value))
    return OBJECT_BYTES
