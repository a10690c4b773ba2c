"""Bandwidth caps of an instance: `FairShare` decides who sends next, `BandwidthThrottle` makes them
wait.

Two kinds of token bucket, one for the instance and one for each pair (this instance and
a destination). A bucket that isn't in debt lets a whole chunk through and may go into debt
with it, so over any T seconds at most `burst + rate * T` bytes and one chunk go. Among
those that wait, the one that has had least goes first (start-time fair queueing); one
whose pair is in debt holds up no other.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import count

from kvmig.core.clock import monotonic
from kvmig.core.errors import MigrationRefused

BURST_S = 0.02
"""A bucket saves up as much as goes in this time at full rate."""
ROUNDING = 1e-3
"""Bytes of debt that count as none."""


class TokenBucket:
    """A token bucket of `rate` bytes per second, 0 for no cap; full at the start."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._level = rate * BURST_S
        self._at = 0.0

    def ready_at(self, now: float) -> float:
        """When the bucket is out of debt: `now` if it isn't in any."""
        if not self._rate:
            return now
        self._fill(now)
        return now + max(0.0, -self._level) / self._rate if self._level < -ROUNDING else now

    def take_bytes(self, nbytes: int, now: float) -> None:
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
        """Bytes per second out of the instance and to one destination; 0: no cap."""
        self._all = TokenBucket(rate)
        self._pair_rate = pair_rate
        self._pairs: dict[str, TokenBucket] = {}
        self._asks: list[_Ask] = []
        self._served: dict[str, float] = {}
        self._virtual = 0.0
        self._order = count()

    def request_turn(self, flow: str, pair: str, nbytes: int) -> None:
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
        """When the next turn comes, if no other asks; None when none waits."""
        return min((self._ready_at(ask, now) for ask in self._asks), default=None)

    def charge(self, flow: str, pair: str, nbytes: int, now: float) -> None:
        """More bytes than were asked for; a negative number for fewer."""
        self._all.take_bytes(nbytes, now)
        self._pair(pair).take_bytes(nbytes, now)
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

    def _pair(self, pair: str) -> TokenBucket:
        return self._pairs.setdefault(pair, TokenBucket(self._pair_rate))


class BandwidthThrottle:
    """Makes the flows of one instance wait for their turns. Bytes per second, 0 for no cap."""

    def __init__(self, rate: float, pair_rate: float, timeout_s: float) -> None:
        """timeout_s: longest wait for a turn, then the migration is given up."""
        self.timeout_s = timeout_s
        self.share = FairShare(rate, pair_rate) if rate or pair_rate else None
        self.waiting: dict[str, asyncio.Future[None]] = {}
        """Waiters by flow; each is done when its turn has come."""
        self._timer: asyncio.TimerHandle | None = None

    def line(self, flow: str, pair: str) -> MigrationLine:
        """One migration's bandwidth to `pair`."""
        return MigrationLine(self, flow, pair)

    def grant(self) -> None:
        """Wake those whose turn it is, and come back when the next one's is."""
        if self.share is None:
            return
        now = monotonic()
        for flow in self.share.grant(now):
            self.waiting.pop(flow).set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (at := self.share.next_at(now)) is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, at - now), self.grant)


class MigrationLine:
    """One migration's bandwidth: a turn is reserved, then committed for one chunk."""

    def __init__(self, throttle: BandwidthThrottle, flow: str, pair: str) -> None:
        self._throttle = throttle
        self._flow = flow
        self._pair = pair
        self._held = 0

    async def reserve(self, nbytes: int) -> None:
        """Have a turn for about `nbytes`; at once if there is one already.

        Raises MigrationRefused when that takes too long.
        """
        throttle, share = self._throttle, self._throttle.share
        if self._held or share is None:
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        throttle.waiting[self._flow] = turn
        share.request_turn(self._flow, self._pair, nbytes)
        throttle.grant()
        try:
            async with asyncio.timeout(throttle.timeout_s):
                await asyncio.shield(turn)
        except BaseException as error:
            if throttle.waiting.pop(self._flow, None) is None:
                self._charge(-nbytes)  # its turn came in the same moment
            else:
                share.withdraw(self._flow)
            if isinstance(error, TimeoutError):
                raise MigrationRefused(
                    "timeout", f"no bandwidth for {nbytes} bytes within {throttle.timeout_s:g} s"
                ) from None
            raise
        self._held = nbytes

    def commit(self, nbytes: int) -> None:
        """The turn's chunk was of `nbytes`."""
        self._charge(nbytes - self._held)
        self._held = 0

    def give_back(self, nbytes: int) -> None:
        """A chunk of `nbytes` that was committed doesn't go."""
        self._charge(-nbytes)

    def release(self) -> None:
        """End the flow; returns an unused turn."""
        self.commit(0)
        if self._throttle.share is not None:
            self._throttle.share.forget(self._flow)
            self._throttle.grant()

    def _charge(self, nbytes: int) -> None:
        """Charge `nbytes` more (or fewer) than were asked for."""
        if self._throttle.share is not None:
            self._throttle.share.charge(self._flow, self._pair, nbytes, monotonic())
