"""Engines that compute nothing: a token for every stream at a set pace, and a log of when."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

TOKEN = 126
"""The one that is put out: `~` in the bundled tokenizer, which is nowhere else in an answer."""


class Given(NamedTuple):
    """A token for one request."""

    request_id: str
    last: bool


class Group:
    """Streams that get a token each at the same moment, as those of one engine's batch do.

    The first token comes at once, the others with the ticks. ticks: when each was, in
    time.monotonic(). began: ticks before each request's second token, kept after its end.
    """

    def __init__(self) -> None:
        self.ticks: list[float] = []
        self.began: dict[str, int] = {}
        self._left: dict[str, int] = {}
        self._clients: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._left)

    def begin(self, request_id: str, client: int, tokens: int) -> Given:
        """A new stream of so many tokens; its first."""
        self.began[request_id] = len(self.ticks)
        if tokens > 1:
            self._left[request_id], self._clients[request_id] = tokens - 1, client
        return Given(request_id, tokens == 1)

    def end(self, request_id: str) -> None:
        """Its client has left. Unknown ids are ignored."""
        self._left.pop(request_id, None)
        self._clients.pop(request_id, None)

    def tick(self) -> dict[int, list[Given]]:
        """A token for each, by client."""
        if not self._left:
            return {}
        self.ticks.append(time.monotonic())
        given: defaultdict[int, list[Given]] = defaultdict(list)
        for request_id, left in self._left.items():
            given[self._clients[request_id]].append(Given(request_id, left == 1))
        self._left = {one: left - 1 for one, left in self._left.items() if left > 1}
        return given


class Metronome:
    """Beats for all groups, at different moments. Stands still until `set`."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._changed = asyncio.Event()

    def set(self, rate: float) -> None:
        """Beats a second for each group; 0: stand still."""
        self._rate = rate
        self._changed.set()
        self._changed = asyncio.Event()

    async def run(self, phase: float, beat: Callable[[], object]) -> None:
        """phase: 0 to 1, of the time between two beats. What can't be kept up with is left out."""
        while True:
            rate, changed = self._rate, self._changed
            if not rate:
                await changed.wait()
                continue
            due = time.monotonic() + phase / rate
            while not changed.is_set():
                late_s = time.monotonic() - due
                if late_s < 0:
                    try:
                        async with asyncio.timeout(-late_s):
                            await changed.wait()
                    except TimeoutError:
                        continue
                    break
                beat()
                due += 1 / rate if late_s < 1 / rate else late_s
                await asyncio.sleep(0)
