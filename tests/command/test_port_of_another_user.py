"""A process of another user that has a server's port gets no call: its instance fails to start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmig.command import server_pool
from kvmig.command.launch import CommandLaunch
from kvmig.command.server_pool import ServerPool
from kvmig.core.errors import StartupError

OTHERS_SERVER = """
import os, socket
os.setuid(65534)
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    client, _ = server.accept()
    client.recv(65536)
    client.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: 0\\r\\nconnection: close\\r\\n\\r\\n")
    client.close()
"""


@pytest.fixture
def others_port() -> Iterator[int]:
    """The port of a server that another user runs."""
    words = [sys.executable, "-c", OTHERS_SERVER]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            yield int(other.stdout.readline())
        finally:
            other.kill()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
async def test_a_server_whose_port_another_user_has_taken_does_not_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others_port: int
) -> None:
    monkeypatch.setattr(server_pool, "free_port", lambda: others_port)
    launch = CommandLaunch(
        model="m", command=("sh", "-c", "sleep 600", "{port}"), source="",
        uds=str(tmp_path / "d.sock"), spool="", quotas="", start_timeout_s=20.0,
    )  # fmt: skip
    pool = ServerPool(launch)
    try:
        pool.start()
        with pytest.raises(StartupError, match=f"port {others_port} belongs to a process of an"):
            await pool.first_ready()
    finally:
        await pool.close()
