"""What may go wrong for one request.

A fault may lose, repeat or delay what is first in a channel of the handshake, which is more than
TCP does; other channels lose messages as TCP does, with their connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

from kvmig_tools.check.cluster import DEAD, Cluster, Edge, State, ends, part_name

DECIDED = ("Reserve", "Reserved", "Refused", "Chunk", "Follow", "Following", "Tokens", "Commit",
           "Committed", "Abort", "Aborted", "Fence", "Fenced", "Resolve", "Resolved")  # fmt: skip
"""Messages that a fault may lose, repeat or delay by themselves."""


class Faults:
    """Each costs one. orders: the scheduler's channels. cuts: of the front end's connections."""

    def __init__(
        self, cluster: Cluster, orders: tuple[tuple[str, tuple[int, ...]], ...], cuts: bool
    ) -> None:
        self._cluster = cluster
        self._orders = orders
        self._cuts = cuts

    def edges(self, state: State) -> list[Edge]:
        """All that may go wrong now."""
        found: list[Edge] = []
        for channel, content in state.channels:
            what = type(self._cluster.library.messages[content[0]]).__name__
            if what not in DECIDED:
                continue
            where = f"{what} in {channel}"
            first, rest = content[:1], content[1:]
            found.append(Edge(f"{where} is lost", self._cluster.put(state, channel, rest), 1))
            twice = self._cluster.put(state, channel, content + first)
            found.append(Edge(f"{where} comes twice", twice, 1))
            if rest:
                late = self._cluster.put(state, channel, rest + first)
                found.append(Edge(f"{where} is overtaken", late, 1))
        for name in self._cluster.names:
            if self._cluster.part(state, name) != DEAD:
                found += self._crashes(state, name)
                found += self._cuts_of(state, name)
        if state.front != DEAD:
            found += self._crash("F", self._without_front(state))
            if self._cluster.library.facts[state.front].holds:
                after = self._cluster.outcomes(state, "F", ("client_leaves",), "the client leaves")
                found += [edge._replace(cost=1) for edge in after]
        if any(channel[0] == "S" for channel, _ in state.channels):
            gone = self._cluster.drop(state, lambda channel: channel[0] == "S")
            found += self._crash("S", gone)
            again = gone._replace(channels=tuple(sorted((*gone.channels, *self._orders))))
            found += [Edge("the scheduler is restarted and orders the same", again, 1, shared="S+")]
        return found

    def _crashes(self, state: State, name: str) -> Iterator[Edge]:
        into = self._cluster.drop(
            self._cluster.set(state, name, DEAD), lambda one: ends(one)[1] == name
        )
        for kept, sent in self._sent(into, name):
            after = reduce(
                lambda one, other: self._break(one, name, other), self._cluster.names, sent
            )
            after = self._break(after, name, "F")
            yield Edge(f"{name} crashes{kept}", after, 1, shared=f"{name}-{kept}")

    def _cuts_of(self, state: State, name: str) -> Iterator[Edge]:
        """Its connections to where it moves the request, and from the front end."""
        facts = self._cluster.library.facts[self._cluster.part(state, name)]
        if facts.reply and not self._cluster.breaks(state, facts.reply):
            destination, _, mid = ends(facts.reply)
            cut = self._cluster.put(state, facts.reply, (self._cluster.lost,))
            if self._cluster.part(state, destination) != DEAD:
                cut = self._cluster.silently(cut, destination, ("peer_cut", mid))
            for kept, after in self._sent(cut, name, destination):
                label = f"{name}'s connection to {destination} breaks{kept}"
                yield Edge(label, after, 1, shared=f"{name}{destination}{kept}")
        if state.front == DEAD or not self._cuts:
            return
        if name in self._cluster.library.facts[state.front].links and not self._cluster.breaks(
            state, f"{name}>F"
        ):
            cut = self._cluster.silently(state, name, ("front_cut",))
            cut = self._break(self._cluster.drop(cut, f"{name}>F".__eq__), name, "F")
            for kept, after in self._sent(cut, "F", name):
                label = f"the front end's connection to {name} breaks{kept}"
                yield Edge(label, after, 1, shared=f"F{name}{kept}")

    def _crash(self, name: str, after: State) -> list[Edge]:
        return [Edge(f"{part_name(name)} crashes", after, 1, shared=f"{name}-")]

    def _without_front(self, state: State) -> State:
        after = self._cluster.drop(state, lambda channel: "F" in ends(channel)[:2])._replace(
            front=DEAD
        )
        for name in self._cluster.names:
            if self._cluster.part(after, name) != DEAD:
                after = self._cluster.silently(after, name, ("front_cut",))
        return after

    def _sent(self, state: State, name: str, to: str = "") -> list[tuple[str, State]]:
        """What is on its way from there comes still, or doesn't."""

        def on_way(channel: str) -> bool:
            sender, receiver, _ = ends(channel)
            return sender == name and to in ("", receiver)

        gone = self._cluster.drop(state, on_way)
        if len(gone.channels) == len(state.channels):
            return [("", state)]
        return [("", gone), (", what it sent comes still", state)]

    def _break(self, state: State, name: str, other: str) -> State:
        """`other` sees, after all that came, that `name` is lost: front end and sources do."""
        if other == name or self._cluster.part(state, other) == DEAD:
            return state
        if other == "F":
            return self._cluster.lose(state, f"{name}>F")
        facts = self._cluster.library.facts[self._cluster.part(state, other)]
        return self._cluster.lose(state, facts.reply) if name in facts.links else state
