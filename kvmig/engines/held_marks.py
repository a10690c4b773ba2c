"""What an engine says of the prompts whose KV it holds: marks that came, and marks that went.

The engine's thread notes what its prefix cache does; the llumlet takes the news from its own.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable

import msgspec

MARK_METHOD = 2
"""How marks are made (`kvmig.core.prefix_marks`): 1 was by a hash. Those of different methods never
equal each other."""
MOST_NEWS = 4096
"""Marks of one piece of news: 32 KB. The rest comes with the next one."""
MOST_MARKS = 1 << 17
"""Marks that are kept; an engine that holds more says nothing of the rest."""


class PrefixNews(msgspec.Struct, frozen=True):
    """Beginnings of prompts (`kvmig.core.prefix_marks`) that an engine holds now, or no more."""

    number: int
    """One more than that of the changes before; of a whole, that of the last changes in it."""
    whole: bool
    """Whether `added` is all that it holds."""
    added: bytes
    """Marks, 8 bytes each."""
    removed: bytes = b""
    method: int = 1
    """`MARK_METHOD` of the sender's version."""


def pack_marks(marks: Iterable[int]) -> bytes:
    """8 bytes each, as in `PrefixNews`."""
    some = list(marks)
    return struct.pack(f">{len(some)}Q", *some)


def unpack_marks(data: bytes) -> tuple[int, ...]:
    """The marks of `PrefixNews`; bytes that make no mark are left out."""
    count = len(data) // 8
    return struct.unpack(f">{count}Q", data[: count * 8])


BlockName = int | bytes
"""A block of an engine's KV cache, or a key of what it keeps on the host."""


class HeldMarks:
    """The marks that one engine holds, and in which of its blocks."""

    def __init__(self) -> None:
        self._blocks: dict[int, set[BlockName]] = {}
        """Blocks of each mark: several may hold the same tokens."""
        self._marks: dict[BlockName, list[int]] = {}
        """Marks of each block."""
        self._events: deque[tuple[int, bool]] = deque()
        """Marks that came (True) and went, in order, that no news has said yet."""
        self._number = 1

    def __len__(self) -> int:
        return len(self._blocks)

    # -- on the engine's thread

    def hold(self, block: BlockName, mark: int) -> None:
        """The block holds the end of what the mark stands for, and others all before it."""
        blocks = self._blocks.get(mark)
        if blocks is None:
            if len(self._blocks) >= MOST_MARKS:
                return
            self._blocks[mark] = {block}
            self._events.append((mark, True))
        elif block in blocks:
            return
        else:
            blocks.add(block)
        self._marks.setdefault(block, []).append(mark)

    def drop(self, block: BlockName) -> None:
        """The block holds other tokens from now on."""
        for mark in self._marks.pop(block, ()):
            blocks = self._blocks[mark]
            blocks.discard(block)
            if not blocks:
                del self._blocks[mark]
                self._events.append((mark, False))

    def clear(self) -> None:
        """The engine has forgotten all that its KV cache held."""
        for block in [one for one in self._marks if isinstance(one, int)]:
            self.drop(block)

    def clear_host(self) -> None:
        """The engine has forgotten all that was on the host."""
        for block in [one for one in self._marks if isinstance(one, bytes)]:
            self.drop(block)

    # -- on the llumlet's

    def news(self) -> PrefixNews | None:
        """What was not said yet, for all that know the rest; None: nothing."""
        last: dict[int, bool] = {}
        while self._events and len(last) < MOST_NEWS:
            mark, came = self._events.popleft()
            last[mark] = came
        if not last:
            return None
        self._number += 1
        added = (mark for mark, came in last.items() if came)
        removed = (mark for mark, came in last.items() if not came)
        return PrefixNews(self._number, False, pack_marks(added), pack_marks(removed), MARK_METHOD)

    def whole(self) -> PrefixNews:
        """The marks that it holds, for one that knows none; then it gets the news that all get.

        Some of it comes again as news, which may be taken in twice: what is said last of a mark
        holds.
        """
        return PrefixNews(self._number, True, pack_marks(list(self._blocks)), method=MARK_METHOD)
