"""An index of the prompts' beginnings that instances hold, as reported, and as sent to them.

Pure. One integer a mark has a bit for each instance, so that a look costs as much however many
instances there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvmig.core.prefix_marks import MARK_TOKENS
from kvmig.engines.held_marks import MARK_METHOD, MOST_MARKS, PrefixNews, unpack_marks

SOON_S = 5.0
"""Least time for which a prompt counts as held where it was sent, and half of the most. Then the
instance's own word counts."""
MOST_SENT = 100_000
"""Marks that count so for longer than that."""

MOST_GROUPS = 1000


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
        self._groups: dict[int, tuple[str, ...]] = {}
        """The names of instances that were found together, by their bits."""

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
            self._bits[mark] = self._bits.get(mark, 0) | bit

    def has_report_of(self, instance: str) -> bool:
        """Whether the instance reports what it holds."""
        return instance in self._numbers

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
        """Note that a prompt with these marks was sent there."""
        if not marks:
            return
        self._turn_over(now)
        bit = 1 << self._seat(instance)
        sent = self._sent.bits
        for mark in marks:
            sent[mark] = sent.get(mark, 0) | bit
        self._sent.seats |= bit

    def find_tokens(self, marks: Sequence[int], now: float) -> dict[str, int]:
        """Tokens of the prompt, from its first on, that an instance holds; those with none are left
        out. What an instance holds it holds from the first mark on, so that a few looks are enough.
        """
        self._turn_over(now)
        found: dict[str, int] = {}
        if marks:
            holders = self._holders(marks[0])
            last = len(marks) - 1
            kept = holders & self._holders(marks[last])
            self._find_ends(marks, (0, holders), (last, kept), found)
            self._note(found, kept, len(marks))
        return found

    def _find_ends(
        self,
        marks: Sequence[int],
        begin: tuple[int, int],
        end: tuple[int, int],
        found: dict[str, int],
    ) -> None:
        """Note those that hold the mark `begin` and not the mark `end`: where theirs end.

        begin, end: a mark's place and those of whom it is asked that hold it.
        """
        (low, before), (high, after) = begin, end
        if before == after:
            return
        if high - low == 1:
            self._note(found, before & ~after, high)
            return
        place = (low + high) // 2
        middle = place, before & (self._holders(marks[place]) | after)
        self._find_ends(marks, begin, middle, found)
        self._find_ends(marks, middle, end, found)

    def _holders(self, mark: int) -> int:
        return (
            self._bits.get(mark, 0)
            | self._sent.bits.get(mark, 0)
            | self._sent_before.bits.get(mark, 0)
        )

    def _note(self, found: dict[str, int], seats: int, count: int) -> None:
        if not seats:
            return
        names = self._groups.get(seats)
        if names is None:
            if len(self._groups) >= MOST_GROUPS:
                self._groups.clear()
            names = self._groups[seats] = self._names_of(seats)
        found.update(dict.fromkeys(names, count * MARK_TOKENS))

    def _names_of(self, seats: int) -> tuple[str, ...]:
        named = (name for at, name in enumerate(self._names) if seats >> at & 1)
        return tuple(name for name in named if name is not None)

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
