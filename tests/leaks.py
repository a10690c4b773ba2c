"""What must not be left: in a running server after a test, on the machine after a server."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import psutil

from bench.served import Served

PATIENCE_S = 10.0
"""Freed blocks show up with the next load report, aborts a moment after the client left."""


def assert_server_is_empty(served: Served) -> None:
    """No request, used block, migration or staging buffer in use on any instance."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        rows = served.get("instances")
        left = [
            row
            for row in rows
            if row["blocks_used"] or row["running"] or row["waiting"]
            or row["migrations_in"] or row["migrations_out"] or row["staging_used"]
        ]  # fmt: skip
        requests = served.get("requests")
        if not left and not requests:
            return
        assert time.monotonic() < deadline, f"left over: {left} {requests}"
        time.sleep(0.1)


def children(served: Served) -> list[psutil.Process]:
    """All processes that the server has started, now."""
    assert served.process is not None
    return psutil.Process(served.process.pid).children(recursive=True)


def shared_memory() -> set[str]:
    """Names of kvmig's files in /dev/shm."""
    return {path.name for path in Path("/dev/shm").glob("kvmig-*")}


def assert_nothing_left(served: Served) -> None:
    """No process and no port of a server that has ended."""
    mine = f"--port {served.port}"
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or ())
        assert mine not in words, f"still running: {words}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", served.port))
