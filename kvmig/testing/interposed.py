"""An engine whose calls a test can delay or fail, one way or the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from kvmig.engines.checked import CheckedServingEngine
from kvmig.testing.subject import EngineUnderTest

SOURCE = ("export", "stage", "gather", "suspend")
DESTINATION = ("reserve", "grow", "scatter", "commit")
_METHODS = (*SOURCE, *DESTINATION, "resume", "release", "cancel")


async def nothing(method: str) -> None:
    """`before` of an undisturbed engine."""


class InterposedEngine(CheckedServingEngine):
    """`before` runs at the start of each call of a migration, with the method's name."""

    before: Callable[[str], Awaitable[None]]

    def __init__(self, engine: EngineUnderTest) -> None:
        super().__init__(engine, content=True)
        self.before = nothing
        for name in _METHODS:
            setattr(self, name, self._interposed(name, getattr(self, name)))

    def _interposed(self, name: str, method: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        @wraps(method)
        async def call(*args: Any, **options: Any) -> Any:
            await self.before(name)
            return await method(*args, **options)

        return call


def failing(method: str, error: Exception, after: int = 0) -> Callable[[str], Awaitable[None]]:
    """Raises at a method's call, once `after` earlier ones went well."""
    left = [after]

    async def before(called: str) -> None:
        if called == method:
            left[0] -= 1
            if left[0] == -1:
                raise error

    return before


def once(method: str, action: Callable[[], object]) -> Callable[[str], Awaitable[None]]:
    """Does something at a method's first call, and gives its consequences time to happen."""
    done: list[bool] = []

    async def before(called: str) -> None:
        if called == method and not done:
            done.append(True)
            action()
            await asyncio.sleep(0.02)

    return before
