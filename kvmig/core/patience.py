"""Waits for an answer, in time during which the answer could have been read.

An answer to a question comes over the event loop on which the one who asks waits. While other work
holds the loop, the time runs and the answer lies unread: who counts that time takes a healthy peer
for a dead one.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

PARTS = 8
"""Parts of a wait, each of which begins with a look at what has come."""
MOST = 64
"""Parts of a wait at most, with those in which the loop stood still."""
LATE_S = 0.05
"""A part that ends this much later than it should is one in which the loop stood still."""

T = TypeVar("T")


async def wait_for_answer(answer: asyncio.Future[T], timeout_s: float) -> T:
    """Wait for an answer for `timeout_s` of time in which this loop turns. Raises TimeoutError."""
    loop, part_s, left = asyncio.get_running_loop(), timeout_s / PARTS, PARTS
    for _ in range(MOST):
        if answer.done() or not left:
            break
        began = loop.time()
        await asyncio.wait((answer,), timeout=part_s)
        if loop.time() - began < part_s + LATE_S:
            left -= 1
    if not answer.done():
        raise TimeoutError
    return answer.result()
