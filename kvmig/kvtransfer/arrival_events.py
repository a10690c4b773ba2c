"""What reaches a destination session, beside its source's messages."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvmig.engines.base import Pace
from kvmig.kvtransfer.messages import Message


@dataclass(frozen=True, slots=True)
class Cancel:
    """Give up, if it isn't too late."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fence:
    """Answer whether it is committed, and from then on it stays so."""

    answer: asyncio.Future[bool]


@dataclass(frozen=True, slots=True)
class Extended:
    """Tokens reached the engine that follows."""

    pace: Pace
    ms: float


@dataclass(frozen=True, slots=True)
class NotExtended:
    """Tokens could not be handed over."""

    error: Exception


Event = Message | Cancel | Fence | Extended | NotExtended
