"""Copies that share bandwidth: each gets an equal part of its source's and destination's link.

A fluid model: rates change only when a copy begins or ends.
"""

from __future__ import annotations

from collections import Counter

from kvmig_tools.sim.events import Action, EventQueue, Timer


class Copying:
    """One copy under way."""

    __slots__ = ("destination", "done", "left", "rate", "since", "source", "timer")

    def __init__(self, source: str, destination: str, nbytes: float, done: Action) -> None:
        self.source = source
        self.destination = destination
        self.left = nbytes
        self.done = done
        self.rate = 0.0
        self.since = 0.0
        self.timer: Timer | None = None


class Network:
    """Every instance has one link with `bandwidth` bytes a second each way."""

    def __init__(self, events: EventQueue, bandwidth: float) -> None:
        self._events = events
        self._bandwidth = bandwidth
        self._copies: dict[Copying, None] = {}
        """In the order in which they began: runs repeat."""
        self._out: Counter[str] = Counter()
        self._in: Counter[str] = Counter()
        self.bytes = 0.0

    def copy(self, source: str, destination: str, nbytes: float, done: Action) -> Copying:
        """Begin to copy; `done` is called at the end, unless it is stopped."""
        one = Copying(source, destination, nbytes, done)
        one.since = self._events.now
        self._copies[one] = None
        self._change(one, 1)
        self.bytes += nbytes
        return one

    def stop(self, one: Copying) -> None:
        """Give a copy up. One that has ended is ignored."""
        if one in self._copies:
            del self._copies[one]
            if one.timer is not None:
                one.timer.cancel()
            self._change(one, -1)

    def _change(self, one: Copying, by: int) -> None:
        self._out[one.source] += by
        self._in[one.destination] += by
        for other in self._copies:
            if other.source == one.source or other.destination == one.destination:
                self._pace(other)

    def _pace(self, one: Copying) -> None:
        now = self._events.now
        sharing = max(self._out[one.source], self._in[one.destination])
        rate = self._bandwidth / sharing
        if rate == one.rate:
            return
        one.left -= one.rate * (now - one.since)
        one.since, one.rate = now, rate
        if one.timer is not None:
            one.timer.cancel()
        one.timer = self._events.after(max(0.0, one.left) / rate, lambda: self._ended(one))

    def _ended(self, one: Copying) -> None:
        self.stop(one)
        one.done()
