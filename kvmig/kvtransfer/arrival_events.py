"""What reaches a destination session, beside its source's messages."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvmig.kvtransfer.messages import Message


@dataclass(frozen=True, slots=True)
class Cancel:
    """Give up, if it isn't too late."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fence:
    """Answer whether it is committed, and from then on it stays so."""

    answer: asyncio.Future[bool]


Event = Message | Cancel | Fence
