"""A fleet's database that its server can't write for a while."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Iterable
from pathlib import Path


@contextlib.asynccontextmanager
async def full(pids: Iterable[int]) -> AsyncIterator[None]:
    """These processes can write no file any more; as on a full disk, but for all others."""
    limits = {}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            limits[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, -1))
    try:
        yield
    finally:
        for pid, (_, hard) in limits.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))


@contextlib.asynccontextmanager
async def read_only(file: Path) -> AsyncIterator[bool]:
    """Nobody can open it for writing, not even root; False: that isn't allowed here."""
    done = not await _chattr("+i", file)
    try:
        yield done
    finally:
        if done:
            await _chattr("-i", file)


async def _chattr(change: str, file: Path) -> int:
    try:
        done = await asyncio.create_subprocess_exec("chattr", change, str(file))
    except FileNotFoundError:
        return 1
    return await done.wait()
