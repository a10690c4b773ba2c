"""Two requests at one process: whether what befalls one there depends on the other.

A process has its tables once for all requests (`Site.share`; the front end's `RequestTable`).
Here both requests are in one part, over the very same tables, and every event that one may meet
is tried in every pair of states in which the two can be there. Each time it must lead to what it
leads to alone: the same messages, the same next state, whatever the other has done before or
does after, and leave the other be. Then the states of two requests are the pairs of their
states, and in any order of their events each of them goes a way that it goes alone.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from kvmig_tools.check.part import Event, Facts, Letter, Library, Oracle, Outcome, Part

WHICH = ("first", "second")


class Together(Part):
    """Parts of two requests that share what their process has once."""

    def __init__(self, first: Part, second: Part) -> None:
        super().__init__()
        self._parts = (first, second)

    def facts(self) -> Facts:
        """See `beside`."""
        first, second = self._parts
        return beside(first.facts(), second.facts())

    def first(self, name: str, *arguments: object) -> None:
        """An event of the first request."""
        self._happen(self._parts[0], name, arguments)

    def second(self, name: str, *arguments: object) -> None:
        """An event of the second."""
        self._happen(self._parts[1], name, arguments)

    def _happen(self, part: Part, name: str, arguments: tuple[object, ...]) -> None:
        part.oracle = self.oracle
        getattr(part, name)(*arguments)
        part.oracle = Oracle(())
        self.outbox, part.outbox = part.outbox, []


def beside(first: Facts, second: Facts) -> Facts:
    """Facts of both, in no order."""
    return Facts(
        tuple(sorted(first.moves + second.moves)),
        first.deaf | second.deaf,
        tuple(sorted(first.holds + second.holds)),
        tuple(sorted(first.decodes + second.decodes)),
        tuple(sorted(first.links + second.links)),
        f"{first.reply} {second.reply}",
    )


@dataclass
class Compared:
    """states: of both at the process; differs: empty, or what one changes for the other."""

    states: int = 0
    events: int = 0
    differs: str = ""


class Comparison:
    """Of two requests' parts at one process.

    alone: what happens to each without the other, which was found out before. starts: their
    parts' first numbers there. both: the same together. common: events that every request of
    the process meets at the same time, each by itself; they aren't tried.
    """

    def __init__(
        self,
        alone: tuple[Library, Library],
        starts: tuple[int, int],
        both: Together,
        common: frozenset[str] = frozenset(),
    ) -> None:
        self._alone = alone
        self._steps = [_by_part(library, common) for library in alone]
        self._together = Library(ordered=False)
        self._numbers = {starts: self._together.number(both)}
        self._pairs = [starts]
        self._letters: dict[tuple[int, int], int] = {}
        self.found = Compared()

    def run(self) -> Compared:
        """Until all pairs were seen, or something differs."""
        found, at = self.found, 0
        while at < len(self._pairs) and not found.differs:
            self._look(self._pairs[at])
            at += 1
        found.states = len(self._pairs)
        return found

    def _look(self, pair: tuple[int, int]) -> None:
        first, second = (
            library.facts[part] for library, part in zip(self._alone, pair, strict=True)
        )
        if self._together.facts[self._numbers[pair]] != beside(first, second):
            self.found.differs = "what is seen of a request changes beside another request"
            return
        for which in (0, 1):
            for event, message, outcomes in self._steps[which][pair[which]]:
                self._try(pair, which, event, message, outcomes)

    def _try(
        self,
        pair: tuple[int, int],
        which: int,
        event: Event,
        message: int,
        outcomes: tuple[Outcome, ...],
    ) -> None:
        self.found.events += 1
        at, letter = self._numbers[pair], self._letter(which, message)
        came = self._together.step(at, (WHICH[which], *event), letter)
        alone = [self._seen(self._alone[which], one) for one in outcomes]
        if alone != [self._seen(self._together, one) for one in came]:
            self.found.differs = f"{' '.join(event)} ends otherwise beside another request"
            return
        for one, both in zip(outcomes, came, strict=True):
            target = (one.part, pair[1]) if which == 0 else (pair[0], one.part)
            known = self._numbers.get(target)
            if known is None:
                self._numbers[target] = both.part
                self._pairs.append(target)
            elif known != both.part:
                self.found.differs = f"{' '.join(event)} changes something of another request"

    def _letter(self, which: int, message: int) -> int:
        if message < 0:
            return message
        key = (which, message)
        if key not in self._letters:
            self._letters[key] = self._together.letter(self._alone[which].messages[message])
        return self._letters[key]

    def _seen(self, library: Library, one: Outcome) -> tuple[str, int, str, list[Letter]]:
        letters = [Letter(channel, library.messages[number]) for channel, number in one.letters]
        return one.said, one.cost, one.violation, letters


def _by_part(
    library: Library, common: frozenset[str]
) -> defaultdict[int, list[tuple[Event, int, tuple[Outcome, ...]]]]:
    found = defaultdict[int, list[tuple[Event, int, tuple[Outcome, ...]]]](list)
    for (part, event, message), outcomes in library.known.items():
        heard = type(library.messages[message]).__name__ if message >= 0 else ""
        if not {event[0], heard} & common:
            found[part].append((event, message, outcomes))
    return found
