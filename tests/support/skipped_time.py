"""Time that passes when a test says so: what waits for a time-out needn't be waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

Skip = Callable[[float], None]
"""So many seconds have passed on the running event loop: what is due by now runs."""


@contextmanager
def skipped_time() -> Iterator[Skip]:
    """On the running event loop; real time passes, too.

    A time-out that must fire can so be as patient as one that must not, and costs nothing.
    Whatever waits must end within the block: afterwards the time that was skipped comes again.
    """
    loop = asyncio.get_running_loop()
    real, skipped = loop.time, 0.0

    def skip(seconds: float) -> None:
        nonlocal skipped
        skipped += seconds

    def time() -> float:
        return real() + skipped

    with mock.patch.object(loop, "time", time):
        yield skip
