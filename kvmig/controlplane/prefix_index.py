"""An index of the prompts' beginnings that instances hold, as reported, and as sent to them.

Pure. One integer a mark has a bit for each instance, so that a look costs as much however many
instances there are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice, repeat
from typing import TypeVar

from kvmig.core.prefix_marks import MARK_TOKENS
from kvmig.engines.held_marks import MARK_METHOD, MOST_MARKS, PrefixNews, unpack_marks

SOON_S = 5.0
"""Least time for which a prompt counts as held where it was sent, and half of the most. Then the
instance's own word counts."""
MOST_SENT = 100_000
"""Marks that count so for longer than that."""

MOST_GROUPS = 1000

_Length = TypeVar("_Length", int, float)


class SentMarks:
    """Marks that were sent to instances lately."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.bits: dict[int, int] = {}
        self.seats = 0
        """A bit for each instance that was sent any."""


class PrefixIndex:
    """The marks of all instances."""

    def __init__(self) -> None:
        self._bits: dict[int, int] = {}
        """The instances that hold a mark."""
        self._sent = SentMarks(0.0)
        self._sent_before = SentMarks(0.0)
        self._seats: dict[str, int] = {}
        self._names: list[str | None] = []
        self._held: dict[str, set[int]] = {}
        self._numbers: dict[str, int] = {}
        """The last news of each instance that reports marks; 0: what it holds isn't known now."""
        self._groups: dict[int, dict[str, None]] = {}
        """The names of instances that were found together, by their bits. Names come as the keys
        of a dictionary: one with other values is made from it without hashing."""

    def learn(self, instance: str, news: PrefixNews) -> None:
        """Take news in. Where a piece is missing, nothing is known until the next whole."""
        if news.method != MARK_METHOD:
            return  # of an older or newer version: such marks equal none of ours
        known = self._numbers.get(instance, 0)
        if news.number <= known:
            return  # an older report, which came late
        if not news.whole and (not known or news.number != known + 1):
            if known:
                self.forget(instance)
            self._numbers[instance] = 0
            return
        self._numbers[instance] = news.number
        bit = 1 << self._seat(instance)
        held = self._held.setdefault(instance, set())
        added = set(unpack_marks(news.added))
        for mark in held - added if news.whole else held.intersection(unpack_marks(news.removed)):
            held.discard(mark)
            self._clear(mark, bit)
        for mark in islice(added - held, max(0, MOST_MARKS - len(held))):
            held.add(mark)
            others = self._bits.get(mark)
            self._bits[mark] = bit if others is None else others | bit  # most have one, the same

    def has_report_of(self, instance: str) -> bool:
        """Whether the instance reports what it holds."""
        return self._numbers.get(instance, 0) > 0

    def forget(self, instance: str) -> None:
        """The instance is gone, or began again: nothing is known of it."""
        self._numbers.pop(instance, None)
        seat = self._seats.pop(instance, None)
        if seat is not None:
            for mark in self._held.pop(instance, ()):
                self._clear(mark, 1 << seat)
            self._names[seat] = None
            self._groups.clear()

    def expect(self, instance: str, marks: Sequence[int], now: float) -> None:
        """Note that a prompt with these marks was sent there; ignored of an instance that reports
        no marks, since its engine may keep nothing."""
        if not marks or instance not in self._numbers:
            return
        self._turn_over(now)
        bit = 1 << self._seat(instance)
        sent = self._sent.bits
        # Marks come with all that are before them: the first ones were sent before, to some
        # instance; of these the first were sent to this one.
        known = bisect_left(marks, True, key=lambda mark: mark not in sent)
        sent.update(zip(marks[known:], repeat(bit)))
        for mark in reversed(marks[:known]):
            if sent[mark] & bit:
                break
            sent[mark] |= bit
        self._sent.seats |= bit

    def find_tokens(self, marks: Sequence[int], now: float) -> dict[str, int]:
        """Tokens of the prompt, from its first on, that an instance holds; those with none are left
        out. What an instance holds it holds from the first mark on, so that a few looks are enough.
        """
        return _names_with(self._find_ends(marks, now))

    def find_blocks(self, marks: Sequence[int], now: float, block_tokens: int) -> dict[str, float]:
        """The same in blocks of `block_tokens` tokens."""
        ends = self._find_ends(marks, now)
        return _names_with([(names, tokens / block_tokens) for names, tokens in ends])

    def _find_ends(self, marks: Sequence[int], now: float) -> list[tuple[dict[str, None], int]]:
        """The instances that hold equally many tokens of the prompt, and how many."""
        self._turn_over(now)
        if not marks:
            return []
        reported, sent, before = self._bits.get, self._sent.bits.get, self._sent_before.bits.get
        # The instances of a mark are those of all three. A function for that would be called ten
        # times, and a call takes as long as a look.
        mark = marks[0]
        first = reported(mark, 0) | sent(mark, 0) | before(mark, 0)
        if not first:
            return []
        last = len(marks) - 1
        mark = marks[last]
        whole = first & (reported(mark, 0) | sent(mark, 0) | before(mark, 0))
        ends = [(self._names_of(whole), len(marks) * MARK_TOKENS)] if whole else []
        # (place, those that hold its mark, a later place, those of them that hold that one's)
        spans = [(0, first, last, whole)]
        while spans:
            low, some, high, fewer = spans.pop()
            while some != fewer and high - low > 1:
                place = (low + high) // 2
                mark = marks[place]
                here = some & (reported(mark, 0) | sent(mark, 0) | before(mark, 0) | fewer)
                if here == some:
                    low = place
                    continue
                if here != fewer:
                    spans.append((place, here, high, fewer))
                high, fewer = place, here
            if some != fewer:
                ends.append((self._names_of(some & ~fewer), high * MARK_TOKENS))
        return ends

    def _names_of(self, seats: int) -> dict[str, None]:
        names = self._groups.get(seats)
        if names is None:
            if len(self._groups) >= MOST_GROUPS:
                self._groups.clear()
            named = (name for at, name in enumerate(self._names) if seats >> at & 1)
            names = self._groups[seats] = dict.fromkeys(name for name in named if name is not None)
        return names

    def _seat(self, instance: str) -> int:
        seat = self._seats.get(instance)
        if seat is None:
            used = self._sent.seats | self._sent_before.seats  # some by those that are gone
            free = (at for at, name in enumerate(self._names) if name is None)
            seat = next((at for at in free if not used >> at & 1), len(self._names))
            if seat == len(self._names):
                self._names.append(instance)
            self._names[seat] = instance
            self._seats[instance] = seat
            self._groups.clear()
        return seat

    def _turn_over(self, now: float) -> None:
        """Forget what was sent long ago."""
        if now - self._sent.began >= SOON_S or len(self._sent.bits) >= MOST_SENT:
            self._sent_before, self._sent = self._sent, SentMarks(now)

    def _clear(self, mark: int, bit: int) -> None:
        left = self._bits[mark] & ~bit
        if left:
            self._bits[mark] = left
        else:
            del self._bits[mark]


def _names_with(ends: Sequence[tuple[dict[str, None], _Length]]) -> dict[str, _Length]:
    """The names of all groups, each with the length of its own."""
    found: dict[str, _Length] = {}
    for names, length in ends:
        some = dict.fromkeys(names, length)
        found = found | some if found else some
    return found
