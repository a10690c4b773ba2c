"""A part of the model: what one process holds of one request, and how it changes.

A part is plain Python around the machines that run. It is asked what happens at one event;
where the world may answer in several ways (`choose`), it is asked again for each. What comes
out is kept, so each part's code runs once for a state and an event, and the explorer only
puts numbers together.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvmig.core.errors import KvmigError
from kvmig_tools.check.freeze import freeze

Kind = Literal["go", "token", "timer", "verdict", "lease", "hold"]
"""go: as soon as it gets its turn; token: a step of an engine; the others are time-outs, those
that come first before those that come after."""

Event = tuple[str, ...]
"""Name of the part's method, and its arguments."""


class Violation(Exception):
    """An invariant is broken; one sentence says which."""


class Letter(NamedTuple):
    """A message for a channel, by the channel's name."""

    channel: str
    message: object


class Lost(NamedTuple):
    """Comes last over a connection that broke."""


class Move(NamedTuple):
    """Something that a part may do by itself, and how much time passes at most before."""

    label: str
    event: Event
    kind: Kind = "go"
    seconds: float = 0.0


@dataclass(frozen=True)
class Facts:
    """What the explorer needs to know of a part's state.

    deaf: channels whose messages wait. holds: what isn't given back yet. decodes: epoch of
    each run that it decodes. links: instances that it is connected to; reply: the channel over
    which a source hears its destination. Of a session: cache: what an instance has of it; place:
    where the front end remembers it.
    """

    moves: tuple[Move, ...] = ()
    deaf: frozenset[str] = frozenset()
    holds: tuple[str, ...] = ()
    decodes: tuple[tuple[str, int], ...] = ()
    links: tuple[str, ...] = ()
    reply: str = ""
    cache: str = ""
    place: str = ""


class Oracle:
    """Answers `choose` from a script, and the first answer after its end."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self.asked: list[int] = []
        """How many answers each question had."""
        self.said: list[str] = []
        self.cost = 0
        self._script = script

    def choose(self, *answers: tuple[str, int]) -> str:
        """answers: each with the faults that it costs."""
        at = len(self.asked)
        self.asked.append(len(answers))
        name, cost = answers[self._script[at] if at < len(self._script) else 0]
        self.cost += cost
        if name:
            self.said.append(name)
        return name


class Part:
    """Base of all parts. Pickled with all that it holds; so no lambdas."""

    def __init__(self) -> None:
        self.outbox: list[Letter] = []
        self.oracle = Oracle(())

    def hear(self, channel: str, message: object) -> None:
        """A message came."""
        raise NotImplementedError

    def facts(self) -> Facts:
        """Of the present state."""
        raise NotImplementedError


class Outcome(NamedTuple):
    """One way in which an event may end. violation: what is broken then."""

    said: str
    cost: int
    part: int
    letters: tuple[tuple[str, int], ...]
    violation: str = ""


@dataclass
class Library:
    """Parts and messages by number; what happens at events, once it was found out.

    ordered: see `freeze`. known: outcomes by part, event and message (-1: none).
    """

    facts: list[Facts] = field(default_factory=list)
    messages: list[object] = field(default_factory=list)
    _parts: list[bytes] = field(default_factory=list)
    _numbers: dict[Hashable, int] = field(default_factory=dict)
    known: dict[tuple[int, Event, int], tuple[Outcome, ...]] = field(default_factory=dict)
    ordered: bool = True

    def number(self, part: Part) -> int:
        """Of this part in this state."""
        part.oracle = _NO_ORACLE
        key = freeze(part, self.ordered)
        at = self._numbers.get(key)
        if at is None:
            at = self._numbers[key] = len(self._parts)
            self._parts.append(pickle.dumps(part))
            self.facts.append(part.facts())
        return at

    def letter(self, message: object) -> int:
        """Number of a message."""
        key = ("message", freeze(message))
        at = self._numbers.get(key)
        if at is None:
            at = self._numbers[key] = len(self.messages)
            self.messages.append(message)
        return at

    def part(self, number: int) -> Part:
        """A copy: our own bytes of a moment ago, whence the mark for ruff."""
        part: Part = pickle.loads(self._parts[number])  # noqa: S301
        return part

    def step(self, part: int, event: Event, message: int = -1) -> tuple[Outcome, ...]:
        """All that may come of an event; `message` is its last argument, if it has one."""
        key = (part, event, message)
        known = self.known.get(key)
        if known is None:
            known = self.known[key] = tuple(self._outcomes(part, event, message))
        return known

    def _outcomes(self, number: int, event: Event, message: int) -> list[Outcome]:
        outcomes, scripts = [], [()]  # type: list[Outcome], list[tuple[int, ...]]
        while scripts:
            script = scripts.pop()
            part, oracle, violation = self.part(number), Oracle(script), ""
            part.oracle = oracle
            name, *arguments = event
            more = [] if message < 0 else [self.messages[message]]
            try:
                getattr(part, name)(*arguments, *more)
            except (Violation, KvmigError) as error:
                violation = str(error)
            for at in range(len(script), len(oracle.asked)):
                taken = script + (0,) * (at - len(script))
                scripts += [(*taken, other) for other in range(1, oracle.asked[at])]
            letters = tuple((channel, self.letter(one)) for channel, one in part.outbox)
            part.outbox = []
            after = number if violation else self.number(part)
            outcomes.append(Outcome(", ".join(oracle.said), oracle.cost, after, letters, violation))
        return outcomes


_NO_ORACLE = Oracle(())
