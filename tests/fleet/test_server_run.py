"""The server's process: when it says that it serves."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from pathlib import Path

import pytest

from kvmig.core.errors import StartupError
from kvmig.fleet import server
from kvmig.fleet.settings import FleetSettings, ServerLaunch


class DeposedServer:
    """Another host takes over while it starts."""

    deposed = True

    def __init__(self, launch: ServerLaunch, to_init: socket.socket) -> None:
        to_init.close()
        self.retiring = asyncio.Event()
        self.retiring.set()

    async def start(self) -> None:
        """Start at once."""

    async def close(self) -> None:
        """End at once."""


async def test_a_server_that_lost_the_lead_while_it_started_does_not_say_that_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor would let clients in beside the other host, and for good."""
    monkeypatch.setattr(server, "FleetServer", DeposedServer)
    monkeypatch.setattr(server, "until_stopped", asyncio.Event().wait)
    init, other = socket.socketpair()
    hears, announced = os.pipe()
    launch = ServerLaunch(FleetSettings(data=str(tmp_path)), ())
    try:
        with pytest.raises(StartupError, match="another host's server has taken over"):
            async with asyncio.timeout(5):
                await server.run(launch, announced, init.detach(), -1)
    finally:
        gc.unfreeze()
        other.close()
        os.close(announced)
        said = os.read(hears, 1000)
        os.close(hears)
    assert said == b""
