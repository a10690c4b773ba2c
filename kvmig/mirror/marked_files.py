"""Files that are marked for a while, such as those of which wrong content came. Pure."""

from __future__ import annotations

from collections import OrderedDict

MOST_MARKS = 100_000


class MarkedFiles:
    """The oldest marks go where there are too many."""

    def __init__(self, lasting_s: float) -> None:
        """lasting_s: seconds for which a mark holds."""
        self._lasting_s = lasting_s
        self._until: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def mark(self, etag: str, now: float) -> None:
        """Mark a file, and forget marks that are over."""
        self._until.pop(etag, None)
        self._until[etag] = now + self._lasting_s  # the last one to end: all hold as long
        while next(iter(self._until.values())) <= now or len(self) > MOST_MARKS:
            self._until.popitem(last=False)

    def has(self, etag: str, now: float) -> bool:
        """Whether a file is marked."""
        return self._until.get(etag, now) > now
