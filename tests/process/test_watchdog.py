"""Signs of life for a service manager."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from kvmig.process.watchdog import PERIOD, SOCKET, notify_manager


async def test_a_manager_hears_that_the_process_is_ready_and_that_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.setblocking(False)
        monkeypatch.setenv(SOCKET, address)
        monkeypatch.setenv(PERIOD, "60000")
        notifying = asyncio.create_task(notify_manager())
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(10):
            heard = [await loop.sock_recv(manager, 100) for _ in range(3)]
        notifying.cancel()
        await asyncio.wait([notifying])
    assert heard == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]


async def test_without_a_manager_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SOCKET, raising=False)
    await notify_manager()
