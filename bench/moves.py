"""A move of a stream, with the longest gaps of its client around it and right after it."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from bench.arrivals import longest_before, longest_ms, tokens_from, wait_for_ms
from bench.client import Stream
from bench.site import SETTLE, Site


class Window(NamedTuple):
    """What the client of a stream that moves saw. Milliseconds."""

    switch_ms: float
    """How long it had waited when the destination's first token came."""
    longest_ms: float
    """The longest gap from the order to move until some tokens after the switch."""
    quiet_ms: float
    """The longest in an equally long window right after that."""
    late: int = 0
    """The longest gap ended with this token, counted from the destination's first one."""


async def watched_move(site: Site, stream: Stream, after: int) -> tuple[Window, dict[str, Any]]:
    """Move the stream to the other instance; with the server's report.

    after: tokens behind the switch that belong to it. Raises StreamFailed if the stream stays.
    """
    destination = await site.other_than(stream)
    begin = time.monotonic()
    migration = await site.migrate(stream, destination)
    switch = int(migration["output_tokens"])
    await stream.reach(max(switch, len(stream.tokens)) + after)
    end = time.monotonic()
    await stream.reach(len(stream.tokens) + SETTLE)
    later = time.monotonic()
    while time.monotonic() < later + end - begin:
        await stream.reach(len(stream.tokens) + 1)
    longest = longest_before(stream.arrivals, begin, end)
    window = Window(
        wait_for_ms(stream.arrivals, switch),
        longest_ms(stream.arrivals, begin, end),
        longest_ms(stream.arrivals, later, later + end - begin),
        tokens_from(longest, switch) if longest is not None else 0,
    )
    return window, migration
