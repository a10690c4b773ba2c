"""What all parts of a source session have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from kvmig.engines.base import Engine
from kvmig.ground.clock import Clock
from kvmig.kvtransfer.copier import Send
from kvmig.kvtransfer.mailbox import Mailbox
from kvmig.kvtransfer.timeline import Move, Timeline

T = TypeVar("T")
Foretell = Callable[[str, float, float], bool]
"""(request_id, pause_ms, stretch_ms): its client waits soon, see `kvmig.kvtransfer.spread`. Says
whether anybody was told."""


@dataclass(frozen=True, slots=True)
class Errand:
    """One migration out of this instance, as far as it doesn't change."""

    move: Move
    engine: Engine
    send: Send
    mailbox: Mailbox
    timeline: Timeline
    clock: Clock
    timeout_s: float
    foretell: Foretell

    async def bounded(self, call: Awaitable[T]) -> T:
        """Raises TimeoutError when it takes longer than an answer may."""
        async with asyncio.timeout(self.timeout_s):
            return await call


def nothing_told(request_id: str, pause_ms: float, stretch_ms: float) -> bool:
    """Where no front end is, no pause is spread."""
    return False
