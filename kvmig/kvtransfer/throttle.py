"""Keeps an instance's migrations under its bandwidth caps: `FairShare` on the event loop."""

from __future__ import annotations

import asyncio

from kvmig.ground.clock import Clock, monotonic
from kvmig.ground.errors import MigrationRefused
from kvmig.kvtransfer.fair_share import FairShare


class Throttle:
    """All turns of one instance. Bytes a second, 0 for no cap."""

    def __init__(
        self, rate: float, pair_rate: float, timeout_s: float, clock: Clock = monotonic
    ) -> None:
        """timeout_s: longest wait for a turn, then the migration is given up."""
        self._timeout_s = timeout_s
        self._clock = clock
        self._share = FairShare(rate, pair_rate) if rate or pair_rate else None
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def line(self, flow: str, pair: str) -> Line:
        """The turns of one migration, to `pair`."""
        return Line(self, flow, pair)

    async def turn(self, flow: str, pair: str, nbytes: int) -> None:
        """Wait until `nbytes` may go. Raises MigrationRefused when that takes too long."""
        if self._share is None:
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[flow] = turn
        self._share.ask(flow, pair, nbytes)
        self._grant()
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.shield(turn)
        except BaseException as error:
            self._give_up(flow, pair, nbytes)
            if isinstance(error, TimeoutError):
                raise MigrationRefused(
                    "timeout", f"no bandwidth for {nbytes} bytes within {self._timeout_s:g} s"
                ) from None
            raise

    def _give_up(self, flow: str, pair: str, nbytes: int) -> None:
        if self._waiting.pop(flow, None) is None:
            self.charge(flow, pair, -nbytes)  # its turn came in the same moment
        elif self._share is not None:
            self._share.withdraw(flow)

    def charge(self, flow: str, pair: str, nbytes: int) -> None:
        """So many bytes more (or fewer) went than were asked for."""
        if self._share is not None:
            self._share.charge(flow, pair, nbytes, self._clock())

    def forget(self, flow: str) -> None:
        """The migration has ended."""
        if self._share is not None:
            self._share.forget(flow)
            self._grant()

    def _grant(self) -> None:
        """Wake those whose turn it is, and come back when the next one's is."""
        if self._share is None:
            return
        now = self._clock()
        for flow in self._share.grant(now):
            self._waiting.pop(flow).set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (at := self._share.next_at(now)) is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, at - now), self._grant)


class Line:
    """One migration's place in the throttle: a turn is taken, then used for one chunk."""

    def __init__(self, throttle: Throttle, flow: str, pair: str) -> None:
        self._throttle = throttle
        self._flow = flow
        self._pair = pair
        self._held = 0

    async def wait(self, nbytes: int) -> None:
        """Have a turn for about `nbytes`; at once if there is one already."""
        if not self._held:
            await self._throttle.turn(self._flow, self._pair, nbytes)
            self._held = nbytes

    def use(self, nbytes: int) -> None:
        """The turn's chunk was of `nbytes`."""
        self._throttle.charge(self._flow, self._pair, nbytes - self._held)
        self._held = 0

    def leave(self) -> None:
        """Nothing more will go; gives an unused turn back."""
        self.use(0)
        self._throttle.forget(self._flow)


UNLIMITED = Throttle(0.0, 0.0, timeout_s=1.0)
"""No caps."""
