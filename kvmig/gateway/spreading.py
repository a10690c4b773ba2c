"""A migration's pause, spread over the tokens before it.

For a moment nobody decodes a request that moves, so the first token of its new owner comes late.
Its client needn't see that as one long gap: the tokens before it are held back here, each a
little longer than the one before, until the last of them is as late as the next one will be.
They come later, by the pause at most; all that comes after it comes when it would have.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmig.gateway.ports import Item, Sink
from kvmig.ground.clock import Clock, monotonic

MOST_S = 1.0
"""Longer no token is held."""
GIVE_UP_S = 10.0
"""A pause that hasn't come by then doesn't come."""


@dataclass(frozen=True, slots=True)
class Ramp:
    """How long the tokens before a pause are held: pure."""

    pause_s: float
    stretch_s: float

    def delay_s(self, number: int) -> float:
        """Of the `number`th step's tokens since the pause was foretold, from 1 on.

        Example: a pause of 5 ms and a stretch of 2 ms: 2, 4, 5, 5 ms and so on.
        """
        return max(0.0, min(MOST_S, self.pause_s, number * self.stretch_s))


@dataclass(slots=True)
class _Spread:
    ramp: Ramp
    index: int
    ends: asyncio.TimerHandle
    number: int = 0
    held: deque[tuple[float, Item]] = field(default_factory=deque)
    timer: asyncio.TimerHandle | None = None


class Spreading:
    """A `Sink` before the front side's own. What it is told isn't more than advice: tokens come
    in their order, each once, whatever it hears."""

    def __init__(self, sink: Sink, clock: Clock = monotonic) -> None:
        self._sink = sink
        self._clock = clock
        self._spreads: dict[str, _Spread] = {}

    def __len__(self) -> int:
        return len(self._spreads)

    def begin(self, request_id: str, index: int, pause_s: float, stretch_s: float) -> None:
        """Soon a token comes `pause_s` later than usual; until then tokens are from the instance
        of this engine index, and each may come later by `stretch_s` more than the one before."""
        self.end(request_id)
        ends = asyncio.get_running_loop().call_later(GIVE_UP_S, self.end, request_id)
        self._spreads[request_id] = _Spread(Ramp(pause_s, stretch_s), index, ends)

    def end(self, request_id: str) -> None:
        """The pause is over, or doesn't come: what is held goes on, and nothing is held any more.

        Unknown ids are ignored.
        """
        spread = self._spreads.pop(request_id, None)
        if spread is None:
            return
        spread.ends.cancel()
        if spread.timer is not None:
            spread.timer.cancel()
        if spread.held:
            self._sink.deliver(spread.index, [item for _, item in spread.held], None)

    def close(self) -> None:
        """Nothing is delivered any more."""
        for spread in self._spreads.values():
            spread.ends.cancel()
            if spread.timer is not None:
                spread.timer.cancel()
        self._spreads.clear()

    # -- as a `Sink`

    def deliver(self, index: int, items: Sequence[Item], meta: object) -> None:
        """See `Sink`."""
        if self._spreads:
            items = [item for item in items if not self._holds(index, item)]
        self._sink.deliver(index, items, meta)

    def fail(self, request_ids: Sequence[str], reason: str, retry: bool) -> None:
        """See `Sink`."""
        for request_id in request_ids:
            self.end(request_id)
        self._sink.fail(request_ids, reason, retry)

    # -- one request

    def _holds(self, index: int, item: Item) -> bool:
        """Whether the item is kept for later. Else what was kept before it has gone on."""
        request_id = item.request_id
        spread = self._spreads.get(request_id)
        if spread is None:
            return False
        if item.finished or index != spread.index:
            self.end(request_id)
            return False
        spread.number += 1
        delay_s = spread.ramp.delay_s(spread.number)
        spread.held.append((self._clock() + delay_s, item))
        if spread.timer is None:
            self._wait(request_id, spread, delay_s)
        return True

    def _wait(self, request_id: str, spread: _Spread, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        spread.timer = loop.call_later(delay_s, self._pass_on, request_id)

    def _pass_on(self, request_id: str) -> None:
        spread = self._spreads[request_id]
        spread.timer = None
        _, item = spread.held.popleft()
        self._sink.deliver(spread.index, [item], None)
        if spread.held:
            due, _ = spread.held[0]
            self._wait(request_id, spread, max(0.0, due - self._clock()))
