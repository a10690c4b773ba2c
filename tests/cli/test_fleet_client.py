"""The command's client of a fleet."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest

from kvmig.cli.client import FleetClient


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each time that certificates are loaded, which takes tens of milliseconds."""
    found: list[str] = []
    load = ssl.SSLContext.load_verify_locations

    def noted(context: ssl.SSLContext, *args: Any, **more: Any) -> None:
        found.append("loaded")
        load(context, *args, **more)

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", noted)
    return found


async def test_a_client_of_a_socket_loads_no_certificates_and_one_of_a_url_does(
    loaded: list[str], tmp_path: Path
) -> None:
    client = FleetClient(str(tmp_path / "api.sock"))
    async with client.asynchronous(1.0):
        client.close()
    assert not loaded
    await asyncio.to_thread(FleetClient("", "https://127.0.0.1:1", "key").close)
    assert loaded
