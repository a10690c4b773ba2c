"""How often tests had to begin again because their call was over before they could move it.

A machine that is busy does that now and then. If it comes more often than once in 50, a test's
streams are too short for what it does with them, or something is slower than it was.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

TRIES = 5
PER_RETRY = 50


class EndedEarly(AssertionError):
    """The call was over before the test could move it (the client gets less of a busy machine
    than the server)."""


@dataclass
class Count:
    """Of one session."""

    begun: int = 0
    over: int = 0
    tests: list[str] = field(default_factory=list)
    """Those that had to begin again."""

    @property
    def too_many(self) -> bool:
        """Whether more than one in 50 was over early; a first one never is too many."""
        return self.over > max(1, self.begun // PER_RETRY)

    def __str__(self) -> str:
        of = f" ({', '.join(self.tests)})" if self.tests else ""
        return f"{self.over} of {self.begun} calls were over before they could be moved{of}"


@contextlib.asynccontextmanager
async def may_end_early(count: Count) -> AsyncIterator[None]:
    """One call that a test moves: inside the block it may be over early, which is counted."""
    count.begun += 1
    try:
        yield
    except EndedEarly:
        count.over += 1
        count.tests.append(os.environ.get("PYTEST_CURRENT_TEST", "").rpartition("/")[2])


async def until_moved(attempt: Callable[[], Awaitable[T]], count: Count) -> T:
    """What an attempt gives that wasn't over early; each is counted."""
    for _ in range(TRIES):
        async with may_end_early(count):
            return await attempt()
    raise EndedEarly(f"{TRIES} times")


SESSION = Count()
"""Of this one; `conftest` lets it fail at its end if that were too many."""
