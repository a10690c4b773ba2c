"""Who may send next under a cap of bytes a second: pure, the time is passed in.

Two kinds of token bucket, one for the instance and one a pair (this instance and a
destination). A bucket that isn't in debt lets a whole chunk through and may go into debt
with it, so over any T seconds at most `burst + rate * T` bytes and one chunk go. Among
those who wait, whoever has had least goes first (start-time fair queueing); one whose
pair is in debt stands in nobody's way.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

BURST_S = 0.02
"""What a bucket saves up while nothing goes: this long at full rate."""
ROUNDING = 1e-3
"""Bytes of debt that are none."""


class Bucket:
    """`rate` bytes a second, 0 for no cap; full at the start."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._level = rate * BURST_S
        self._at = 0.0

    def ready_at(self, now: float) -> float:
        """When it is out of debt: `now` if it isn't in any."""
        if not self._rate:
            return now
        self._fill(now)
        return now + max(0.0, -self._level) / self._rate if self._level < -ROUNDING else now

    def take(self, nbytes: int, now: float) -> None:
        """Let bytes through; a negative number gives some back."""
        self._fill(now)
        self._level -= nbytes

    def _fill(self, now: float) -> None:
        gained = self._rate * max(0.0, now - self._at)
        self._level = min(self._rate * BURST_S, self._level + gained)
        self._at = max(self._at, now)


@dataclass(frozen=True, slots=True, order=True)
class _Ask:
    start: float
    order: int
    flow: str
    pair: str
    nbytes: int


class FairShare:
    """Flows (migrations) that wait for their turn to send a chunk; one ask a flow at a time."""

    def __init__(self, rate: float, pair_rate: float) -> None:
        """Bytes a second out of the instance and to one destination; 0: no cap."""
        self._all = Bucket(rate)
        self._pair_rate = pair_rate
        self._pairs: dict[str, Bucket] = {}
        self._asks: list[_Ask] = []
        self._served: dict[str, float] = {}
        self._virtual = 0.0
        self._order = count()

    def ask(self, flow: str, pair: str, nbytes: int) -> None:
        """Wait for a turn to send `nbytes` to `pair`."""
        start = max(self._virtual, self._served.get(flow, 0.0))
        self._asks.append(_Ask(start, next(self._order), flow, pair, nbytes))

    def grant(self, now: float) -> list[str]:
        """Flows whose turn it is now, in order; their bytes are charged."""
        granted: list[str] = []
        while (ask := self._next(now)) is not None:
            self._asks.remove(ask)
            self._virtual = max(self._virtual, ask.start)
            self._served[ask.flow] = ask.start
            self.charge(ask.flow, ask.pair, ask.nbytes, now)
            granted.append(ask.flow)
        return granted

    def next_at(self, now: float) -> float | None:
        """When the next turn comes, if nobody else asks; None when nobody waits."""
        return min((self._ready_at(ask, now) for ask in self._asks), default=None)

    def charge(self, flow: str, pair: str, nbytes: int, now: float) -> None:
        """More bytes than were asked for; a negative number for fewer."""
        self._all.take(nbytes, now)
        self._pair(pair).take(nbytes, now)
        self._served[flow] = self._served.get(flow, self._virtual) + nbytes

    def withdraw(self, flow: str) -> None:
        """The flow waits no more."""
        self._asks = [ask for ask in self._asks if ask.flow != flow]

    def forget(self, flow: str) -> None:
        """The flow has ended."""
        self.withdraw(flow)
        self._served.pop(flow, None)

    def _next(self, now: float) -> _Ask | None:
        return min((ask for ask in self._asks if self._ready_at(ask, now) <= now), default=None)

    def _ready_at(self, ask: _Ask, now: float) -> float:
        return max(self._all.ready_at(now), self._pair(ask.pair).ready_at(now))

    def _pair(self, pair: str) -> Bucket:
        return self._pairs.setdefault(pair, Bucket(self._pair_rate))
