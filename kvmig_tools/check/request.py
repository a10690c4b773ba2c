"""The automaton of one request in its cluster.

What moves by itself does so in any order. A time-out is free where what it waits for can't come
any more; where it still may, a time-out means that it is late, which is a fault.
"""

from __future__ import annotations

from kvmig.frontend.instances import RETRY_S
from kvmig.frontend.requests import RequestTable
from kvmig_tools.check.cluster import DEAD, Cluster, Edge, State, Step, ends, part_name
from kvmig_tools.check.faults import Faults
from kvmig_tools.check.front import Front
from kvmig_tools.check.part import Kind, Library
from kvmig_tools.check.site import Order, Shape, Site

TIMERS: tuple[Kind, ...] = ("timer", "verdict", "lease", "hold")


class Request:
    """The automaton of one request that starts at `names[0]`."""

    def __init__(
        self,
        names: str,
        shape: Shape,
        orders: dict[str, str],
        library: Library | None = None,
        cuts: bool = True,
        name: str = "r",
    ) -> None:
        """names: instances, a letter each. orders: the scheduler's, who obeys -> destinations.

        cuts: whether a fault may break a connection of the front end. name: the request's.
        """
        self.name = name
        self.shape = shape
        self.library = library or Library()
        self.names = names
        self._cluster = Cluster(names, self.library)
        self._orders = tuple(
            (f"S>{at}", tuple(self.library.letter(Order(one)) for one in to))
            for at, to in sorted(orders.items())
        )
        sites = [self.site(at) for at in names]
        sites[0].begin()
        self.start = State(
            tuple(self.library.number(site) for site in sites),
            self.library.number(self.front()),
            self._orders,
        )
        self._faults = Faults(self._cluster, self._orders, cuts)
        self._numbers = {self.start: 0}
        self._states = [self.start]
        self._free: dict[int, list[Step]] = {}
        self._faulty: dict[int, list[Step]] = {}
        self._hit: set[int] = set()
        """Whose faults were looked for."""

    def site(self, instance: str) -> Site:
        """What an instance has of it before it is submitted."""
        return Site(instance, self.shape, self.name)

    def front(self, table: RequestTable | None = None) -> Front:
        """What the front end has of it at first."""
        return Front(sorted(self.names), self.shape.tokens, self.names[0], self.name, table)

    # -- by numbers; 0 is the start

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
            state = self._states[number]
            known += self._steps([*self._faults.edges(state), *self.own_faults(state)])
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

    def state(self, number: int) -> State:
        """Its parts and messages."""
        return self._states[number]

    # -- what holds

    def broken(self, number: int) -> str:
        """What is wrong in this state, in a sentence; empty: nothing."""
        decoding = self.decoding(number)
        return f"{' and '.join(decoding)} decode the request at once" if len(decoding) > 1 else ""

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

    def own_faults(self, state: State) -> list[Edge]:
        """What may go wrong besides `Faults`."""
        return []

    def _find(self, state: State) -> tuple[list[Edge], list[Edge]]:
        own = self._own(state)
        found = [*self._deliveries(state), *own["go"], *self._reconnections(state)]
        busy = bool(found)
        found += own["token"]
        late: list[Edge] = []
        for kind in TIMERS:
            timers = own[kind]
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
            at = self._cluster.part(state, receiver)
            if at == DEAD or channel in self.library.facts[at].deaf:
                continue
            message = content[0]
            rest = self._cluster.put(state, channel, content[1:])
            what = type(self.library.messages[message]).__name__
            label = f"{part_name(receiver)} hears {what} of {part_name(sender)}"
            label += f" ({mid})" if mid else ""
            found += self._cluster.outcomes(rest, receiver, ("hear", channel), label, message)
        return found

    def _own(self, state: State) -> dict[Kind, list[Edge]]:
        """What parts may do by themselves, by its kind."""
        found: dict[Kind, list[Edge]] = {"go": [], "token": [], **{kind: [] for kind in TIMERS}}
        for name, at in zip((*self.names, "F"), (*state.sites, state.front), strict=True):
            if at == DEAD:
                continue
            for move in self.library.facts[at].moves:
                space = "" if move.label[0] in "' " else " "
                label = f"{part_name(name)}{space}{move.label}"
                found[move.kind] += self._cluster.outcomes(
                    state, name, move.event, label, seconds=move.seconds
                )
        return found

    def _reconnections(self, state: State) -> list[Edge]:
        """The front end connects again to instances that it lost."""
        found: list[Edge] = []
        if state.front == DEAD:
            return found
        alive = self.library.facts[state.front].links
        for name, site in zip(self.names, state.sites, strict=True):
            if site != DEAD and name not in alive:
                after = self._cluster.silently(state, "F", ("back", name))
                after = self._cluster.silently(after, name, ("front_back",))
                found.append(Edge(f"the front end reaches {name} again", after, seconds=RETRY_S))
        return found
