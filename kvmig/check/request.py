"""One request in its cluster: its parts, the messages between them, and what may go wrong.

A state is four tuples of numbers. Every pair of processes has a channel a migration, first in,
first out: a TCP connection keeps the order, and messages of different connections overtake each
other. A fault may lose, repeat or delay what is first in a channel of the handshake; the others
lose messages as TCP does, with their connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, reduce
from typing import NamedTuple

from kvmig.check.front import Front
from kvmig.check.part import Kind, Library, Lost, Move
from kvmig.check.site import Order, Shape, Site
from kvmig.controlplane.messages import Submit
from kvmig.gateway.links import RETRY_S

DEAD = -1
DECIDED = ("Reserve", "Reserved", "Refused", "Chunk", "Follow", "Following", "Tokens", "Commit",
           "Committed", "Abort", "Aborted", "Fence", "Fenced", "Resolve", "Resolved")  # fmt: skip
"""Messages that a fault may lose, repeat or delay by themselves."""


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


class Request:
    """The automaton of one request that starts at `names[0]`."""

    def __init__(
        self,
        names: str,
        shape: Shape,
        orders: dict[str, str],
        library: Library | None = None,
        cuts: bool = True,
    ) -> None:
        """names: instances, a letter each. orders: the scheduler's, instance -> destination.

        cuts: whether a fault may break a connection of the front end.
        """
        self.names = names
        self._cuts = cuts
        self.library = library or Library()
        self._orders = tuple(
            (f"S>{at}", (self.library.letter(Order(to)),)) for at, to in sorted(orders.items())
        )
        sites = [Site(name, shape) for name in names]
        sites[0].hear(f"F>{names[0]}", Submit("r"))
        self.start = State(
            tuple(self.library.number(site) for site in sites),
            self.library.number(Front(sorted(names), shape.tokens, names[0])),
            self._orders,
        )
        self._lost = self.library.letter(Lost())
        self._numbers = {self.start: 0}
        self._states = [self.start]
        self._free: dict[int, list[Step]] = {}
        self._faulty: dict[int, list[Step]] = {}
        self._hit: set[int] = set()
        """Whose faults were looked for."""

    # -- by numbers; 0 is the start

    def state(self, number: int) -> State:
        """The state of that number."""
        return self._states[number]

    def free(self, number: int) -> list[Step]:
        """What may happen without a fault."""
        known = self._free.get(number)
        if known is None:
            free, faults = self._find(self._states[number])
            known = self._free[number] = self._steps(free)
            self._faulty[number] = self._steps(faults)
        return known

    def faults(self, number: int) -> list[Step]:
        """What may happen with a fault, or more."""
        self.free(number)
        known = self._faulty[number]
        if number not in self._hit:
            self._hit.add(number)
            known += self._steps(self._faults(self._states[number]))
        return known

    def _steps(self, edges: list[Edge]) -> list[Step]:
        steps = []
        for label, state, cost, seconds, shared, violation in edges:
            number = self._numbers.get(state)
            if number is None:
                number = self._numbers[state] = len(self._states)
                self._states.append(state)
            steps.append(Step(label, number, cost, seconds, shared, violation))
        return steps

    # -- what holds

    def decoding(self, number: int) -> list[str]:
        """Instances whose tokens reach the client."""
        state = self._states[number]
        if state.front == DEAD:
            return []
        front = self.library.facts[state.front]
        return [
            name
            for name, site in zip(self.names, state.sites, strict=True)
            if site != DEAD
            for one in self.library.facts[site].decodes
            if one[0] in front.holds and one not in front.decodes
        ]

    def waits(self, number: int) -> bool:
        """Whether a client waits for tokens, and an instance is there that could decode."""
        state = self._states[number]
        alive = any(site != DEAD for site in state.sites)
        return alive and state.front != DEAD and bool(self.library.facts[state.front].holds)

    def held(self, number: int) -> list[str]:
        """What is not given back."""
        facts = self.library.facts
        return [
            f"{name} holds {what}"
            for name, site in zip(self.names, self._states[number].sites, strict=True)
            if site != DEAD
            for what in facts[site].holds
        ]

    # -- what may happen

    def _find(self, state: State) -> tuple[list[Edge], list[Edge]]:
        found = [*self._deliveries(state), *self._own(state, "go"), *self._reconnections(state)]
        busy = bool(found)
        found += self._own(state, "token")
        late: list[Edge] = []
        kinds: tuple[Kind, ...] = ("timer", "lease", "hold")
        for kind in kinds:
            timers = self._own(state, kind)
            if busy:
                # What is waited for may still come: that it comes too late is a fault.
                late += [edge._replace(cost=edge.cost + 1) for edge in timers]
            else:
                found += timers
                busy = bool(timers)
        free = [edge for edge in found if edge.cost == 0]
        return free, [*(edge for edge in found if edge.cost), *late]

    def _deliveries(self, state: State) -> list[Edge]:
        found: list[Edge] = []
        for channel, content in state.channels:
            sender, receiver, mid = ends(channel)
            at = self._part(state, receiver)
            if at == DEAD or channel in self.library.facts[at].deaf:
                continue
            message = content[0]
            rest = self._put(state, channel, content[1:])
            what = type(self.library.messages[message]).__name__
            label = f"{_name(receiver)} hears {what} of {_name(sender)}"
            label += f" ({mid})" if mid else ""
            found += self._outcomes(rest, receiver, ("hear", channel), label, message)
        return found

    def _own(self, state: State, kind: Kind) -> list[Edge]:
        found: list[Edge] = []
        for name in (*self.names, "F"):
            at = self._part(state, name)
            if at == DEAD:
                continue
            for move in self.library.facts[at].moves:
                if move.kind == kind:
                    found += self._move(state, name, move)
        return found

    def _move(self, state: State, name: str, move: Move) -> Iterator[Edge]:
        space = "" if move.label[0] in "' " else " "
        label = f"{_name(name)}{space}{move.label}"
        for edge in self._outcomes(state, name, move.event, label):
            yield edge._replace(seconds=move.seconds)

    def _outcomes(
        self, state: State, name: str, event: tuple[str, ...], label: str, message: int = -1
    ) -> list[Edge]:
        found = []
        for outcome in self.library.step(self._part(state, name), event, message):
            after = self._set(state, name, outcome.part)
            for channel, letter in outcome.letters:
                after = self._post(after, channel, letter)
            said = f"{label}: {outcome.said}" if outcome.said else label
            found.append(Edge(said, after, outcome.cost, violation=outcome.violation))
        return found

    def _reconnections(self, state: State) -> list[Edge]:
        """The front end connects again to instances that it lost."""
        found: list[Edge] = []
        if state.front == DEAD:
            return found
        alive = self.library.facts[state.front].links
        for name, site in zip(self.names, state.sites, strict=True):
            if site != DEAD and name not in alive:
                after = self._silently(state, "F", ("back", name))
                after = self._silently(after, name, ("front_back",))
                found.append(Edge(f"the front end reaches {name} again", after, seconds=RETRY_S))
        return found

    # -- faults

    def _faults(self, state: State) -> list[Edge]:
        found: list[Edge] = []
        for channel, content in state.channels:
            what = type(self.library.messages[content[0]]).__name__
            if what not in DECIDED:
                continue
            where = f"{what} in {channel}"
            first, rest = content[:1], content[1:]
            found.append(Edge(f"{where} is lost", self._put(state, channel, rest), 1))
            twice = self._put(state, channel, content + first)
            found.append(Edge(f"{where} comes twice", twice, 1))
            if rest:
                late = self._put(state, channel, rest + first)
                found.append(Edge(f"{where} is overtaken", late, 1))
        for name in self.names:
            found += self._instance_faults(state, name)
        found += self._pair_faults(state)
        if state.front != DEAD:
            found += self._crash("F", self._without_front(state))
            if self.library.facts[state.front].holds:
                after = self._outcomes(state, "F", ("client_leaves",), "the client leaves")
                found += [edge._replace(cost=1) for edge in after]
        if any(channel[0] == "S" for channel, _ in state.channels):
            gone = self._drop(state, lambda channel: channel[0] == "S")
            found += self._crash("S", gone)
            again = gone._replace(channels=tuple(sorted((*gone.channels, *self._orders))))
            found += [Edge("the scheduler is restarted and orders the same", again, 1, shared="S+")]
        return found

    def _instance_faults(self, state: State, name: str) -> list[Edge]:
        if self._part(state, name) == DEAD:
            return []
        into = self._drop(self._set(state, name, DEAD), lambda one: ends(one)[1] == name)
        found = []
        for kept, sent in self._sent(into, name):
            after = reduce(lambda one, other: self._break(one, name, other), self.names, sent)
            after = self._break(after, name, "F")
            found.append(Edge(f"{name} crashes{kept}", after, 1, shared=f"{name}-{kept}"))
        if state.front == DEAD or not self._cuts:
            return found
        if name in self.library.facts[state.front].links and not self._breaks(state, f"{name}>F"):
            cut = self._silently(state, name, ("front_cut",))
            cut = self._break(self._drop(cut, f"{name}>F".__eq__), name, "F")
            for kept, after in self._sent(cut, "F", name):
                label = f"the front end's connection to {name} breaks{kept}"
                found.append(Edge(label, after, 1, shared=f"F{name}{kept}"))
        return found

    def _pair_faults(self, state: State) -> list[Edge]:
        """The connection from one instance to another breaks, once something went over it."""
        found = []
        pairs = {ends(channel)[:2] for channel, _ in state.channels}
        for sender, receiver in sorted(pairs):
            if sender not in self.names or receiver not in self.names:
                continue
            mids = {ends(one)[2] for one, _ in state.channels if set(ends(one)[:2]) ==
                    {sender, receiver}}  # fmt: skip
            for mid in sorted(mids - {"-"}):
                source = mid[0]
                destination = receiver if source == sender else sender
                if sender != source and f"{source}>{destination}:{mid}" in dict(state.channels):
                    continue  # found from the other side
                found += self._cut(state, source, destination, mid)
        return found

    def _cut(self, state: State, source: str, destination: str, mid: str) -> list[Edge]:
        replies = f"{destination}>{source}:{mid}"
        if self._part(state, source) == DEAD or self._breaks(state, replies):
            return []
        cut = self._put(state, replies, (self._lost,))
        if self._part(state, destination) != DEAD:
            cut = self._silently(cut, destination, ("peer_cut", mid))
        label = f"{source}'s connection to {destination} breaks"
        return [
            Edge(f"{label}{kept}", after, 1, shared=f"{source}{destination}{kept}")
            for kept, after in self._sent(cut, source, destination)
        ]

    def _crash(self, name: str, after: State) -> list[Edge]:
        return [Edge(f"{_name(name)} crashes", after, 1, shared=f"{name}-")]

    def _without_front(self, state: State) -> State:
        after = self._drop(state, lambda channel: "F" in ends(channel)[:2])._replace(front=DEAD)
        for name in self.names:
            if self._part(after, name) != DEAD:
                after = self._silently(after, name, ("front_cut",))
        return after

    def _sent(self, state: State, name: str, to: str = "") -> list[tuple[str, State]]:
        """What is on its way from there comes still, or doesn't."""

        def on_way(channel: str) -> bool:
            sender, receiver, _ = ends(channel)
            return sender == name and to in ("", receiver)

        gone = self._drop(state, on_way)
        if len(gone.channels) == len(state.channels):
            return [("", state)]
        return [("", gone), (", what it sent comes still", state)]

    def _break(self, state: State, name: str, other: str) -> State:
        """`other` sees, after all that came, that `name` is lost: front end and sources do."""
        if other == name or self._part(state, other) == DEAD:
            return state
        if other == "F":
            return self._lose(state, f"{name}>F")
        facts = self.library.facts[self._part(state, other)]
        return self._lose(state, facts.reply) if name in facts.links else state

    def _lose(self, state: State, channel: str) -> State:
        if self._breaks(state, channel):
            return state
        return self._put(state, channel, (*dict(state.channels).get(channel, ()), self._lost))

    def _breaks(self, state: State, channel: str) -> bool:
        return self._lost in dict(state.channels).get(channel, ())

    # -- states

    def _part(self, state: State, name: str) -> int:
        if name == "F":
            return state.front
        return state.sites[self.names.index(name)] if name in self.names else DEAD

    def _set(self, state: State, name: str, part: int) -> State:
        if name == "F":
            return state._replace(front=part)
        at = self.names.index(name)
        return state._replace(sites=(*state.sites[:at], part, *state.sites[at + 1 :]))

    def _silently(self, state: State, name: str, event: tuple[str, ...]) -> State:
        (outcome,) = self.library.step(self._part(state, name), event)
        after = self._set(state, name, outcome.part)
        for channel, letter in outcome.letters:
            after = self._post(after, channel, letter)
        return after

    def _post(self, state: State, channel: str, letter: int) -> State:
        sender, receiver, mid = ends(channel)
        if self._part(state, receiver) != DEAD:
            return self._put(state, channel, (*dict(state.channels).get(channel, ()), letter))
        if receiver == "F" or not mid.startswith(sender):
            return state
        return self._lose(state, f"{receiver}>{sender}:{mid}")  # no connection can be made

    def _put(self, state: State, channel: str, content: tuple[int, ...]) -> State:
        others = [one for one in state.channels if one[0] != channel]
        if content:
            others.append((channel, content))
            others.sort()
        return state._replace(channels=tuple(others))

    def _drop(self, state: State, which: Callable[[str], bool]) -> State:
        return state._replace(channels=tuple(one for one in state.channels if not which(one[0])))


def _name(part: str) -> str:
    return {"F": "the front end", "S": "the scheduler"}.get(part, part)
