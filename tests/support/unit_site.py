"""An agent of a unit on a socket of a test's own, and members that join it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

from kvmig.core.background import cancel_tasks
from kvmig.process.sockets import take_path
from kvmig.sharing.agent import UnitAgent
from kvmig.sharing.lease_ledger import MIB, LeaseLedger
from kvmig.sharing.member import UnitMember
from kvmig.sharing.step_scheduler import StepScheduler


@contextlib.asynccontextmanager
async def agent(
    path: Path, *, settle_s: float = 0.0, turns: StepScheduler | None = None, arena: int = 64
) -> AsyncIterator[LeaseLedger]:
    """It dies at the end of the block. arena: in MiB."""
    ledger = LeaseLedger(arena * MIB)
    with take_path(str(path), socket.SOCK_SEQPACKET) as sock:
        running = asyncio.create_task(UnitAgent(sock, ledger, settle_s, turns).run())
        try:
            yield ledger
        finally:
            await cancel_tasks(running)
            path.unlink()  # noqa: ASYNC240


@contextlib.asynccontextmanager
async def joined(member: UnitMember) -> AsyncIterator[UnitMember]:
    """It stays until the end of the block."""
    await member.join()
    running = asyncio.create_task(member.run())
    try:
        yield member
    finally:
        await cancel_tasks(running)
        member.close()
