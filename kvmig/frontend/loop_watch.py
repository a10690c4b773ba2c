"""When the event loop of a front end stands still: for how long, and whose calls were in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import prometheus_client
from prometheus_client import CollectorRegistry

from kvmig.core.clock import TimeSource, monotonic

logger = logging.getLogger(__name__)

PERIOD_S = 0.05
STALL_S = 0.1
"""A loop that is later than this stood still."""
MOST_NAMES = 8


class LoopWatch:
    """Looks twenty times a second whether the loop still turns: `run` it."""

    def __init__(
        self,
        registry: CollectorRegistry,
        suspects: Callable[[], set[str]],
        clock: TimeSource = monotonic,
    ) -> None:
        """suspects: accounts whose calls' bodies were in since the last call."""
        self._suspects = suspects
        self._clock = clock
        self._stalls = prometheus_client.Histogram(
            "kvmig_http_loop_stall_seconds",
            "For how long the event loop stood still, all streams with it; from 0.1 s on.",
            registry=registry,
            buckets=(0.2, 0.5, 1, 2, 5, 10, 20),
        )

    async def run(self) -> None:
        """Watch the loop without end."""
        while True:
            self._suspects()
            began = self._clock()
            await asyncio.sleep(PERIOD_S)
            self.record_lateness(self._clock() - began - PERIOD_S)

    def record_lateness(self, late_s: float) -> None:
        """Record how late the loop was."""
        if late_s < STALL_S:
            return
        self._stalls.observe(late_s)
        names = sorted(self._suspects())
        of = f"; bodies were in of {', '.join(names[:MOST_NAMES])}" if names else ""
        logger.warning("the event loop stood still for %.1f s%s", late_s, of)
