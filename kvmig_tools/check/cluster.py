"""The states of one request's cluster: its parts, and the messages between them, by number.

Every pair of processes has a channel a migration, first in, first out: a TCP connection keeps
the order, and messages of different connections overtake each other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from kvmig_tools.check.part import Library, Lost

DEAD = -1


class State(NamedTuple):
    """sites: by instance; front; both DEAD or a number. channels: those that hold messages."""

    sites: tuple[int, ...]
    front: int
    channels: tuple[tuple[str, tuple[int, ...]], ...]


class Edge(NamedTuple):
    """What may happen. shared: a fault that hits all requests at once, by this name."""

    label: str
    state: State
    cost: int = 0
    seconds: float = 0.0
    shared: str = ""
    violation: str = ""


class Step(NamedTuple):
    """An Edge, its state by number."""

    label: str
    target: int
    cost: int
    seconds: float
    shared: str
    violation: str


@cache
def ends(channel: str) -> tuple[str, str, str]:
    """Sender, receiver, migration."""
    pair, _, mid = channel.partition(":")
    sender, _, receiver = pair.partition(">")
    return sender, receiver, mid


class Cluster:
    """The parts of one request at the instances `names`, a letter each."""

    def __init__(self, names: str, library: Library) -> None:
        self.names = names
        self.library = library
        self.lost = library.letter(Lost())

    def part(self, state: State, name: str) -> int:
        """Its number, or DEAD."""
        if name == "F":
            return state.front
        return state.sites[self.names.index(name)] if name in self.names else DEAD

    def set(self, state: State, name: str, part: int) -> State:
        """With another number."""
        if name == "F":
            return State(state.sites, part, state.channels)
        at = self.names.index(name)
        sites = (*state.sites[:at], part, *state.sites[at + 1 :])
        return State(sites, state.front, state.channels)

    def silently(self, state: State, name: str, event: tuple[str, ...]) -> State:
        """After an event that ends in one way and that nobody is told of."""
        (outcome,) = self.library.step(self.part(state, name), event)
        after = self.set(state, name, outcome.part)
        for channel, letter in outcome.letters:
            after = self.post(after, channel, letter)
        return after

    def post(self, state: State, channel: str, letter: int) -> State:
        """After a message was sent; to the dead none can be."""
        sender, receiver, mid = ends(channel)
        if self.part(state, receiver) != DEAD:
            return self.put(state, channel, (*dict(state.channels).get(channel, ()), letter))
        if receiver == "F" or not mid.startswith(sender):
            return state
        return self.lose(state, f"{receiver}>{sender}:{mid}")  # no connection can be made

    def put(self, state: State, channel: str, content: tuple[int, ...]) -> State:
        """With other content."""
        others = [one for one in state.channels if one[0] != channel]
        if content:
            others.append((channel, content))
            others.sort()
        return State(state.sites, state.front, tuple(others))

    def drop(self, state: State, which: Callable[[str], bool]) -> State:
        """Without these channels."""
        return state._replace(channels=tuple(one for one in state.channels if not which(one[0])))

    def lose(self, state: State, channel: str) -> State:
        """What comes last over the channel is that it broke."""
        if self.breaks(state, channel):
            return state
        return self.put(state, channel, (*dict(state.channels).get(channel, ()), self.lost))

    def breaks(self, state: State, channel: str) -> bool:
        """Whether that is on its way already."""
        return self.lost in dict(state.channels).get(channel, ())

    def outcomes(
        self,
        state: State,
        name: str,
        event: tuple[str, ...],
        label: str,
        message: int = -1,
        seconds: float = 0.0,
    ) -> list[Edge]:
        """All ways in which an event may end, before which so much time passes at most."""
        found = []
        for outcome in self.library.step(self.part(state, name), event, message):
            after = self.set(state, name, outcome.part)
            for channel, letter in outcome.letters:
                after = self.post(after, channel, letter)
            said = f"{label}: {outcome.said}" if outcome.said else label
            found.append(Edge(said, after, outcome.cost, seconds, "", outcome.violation))
        return found


def part_name(part: str) -> str:
    """For people."""
    return {"F": "the front end", "S": "the scheduler"}.get(part, part)
