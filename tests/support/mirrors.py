"""Mirrors of the tests' hub: one in a thread of this process, or one in a process of its own."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import httpx

from kvmig.mirror.process import MirrorServer, endpoint_of
from kvmig.mirror.settings import MirrorSettings, check_settings
from kvmig.process.sockets import take_port
from tests.support.model_hub import ModelHub

SECRET = "the secret of the mirrors of these tests"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class MirrorThread:
    """Serves until the end of the block."""

    def __init__(self, hub: ModelHub | str, folder: Path, **more: Any) -> None:
        """hub: or its URL."""
        url = hub if isinstance(hub, str) else hub.url
        given = {"hub": url, "folder": str(folder), "port": 0, **more}
        self.settings = check_settings(MirrorSettings(**given))
        self._sock = take_port(self.settings.host, self.settings.port)
        self.url = endpoint_of(self.settings, self._sock)
        self.plain_url = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        self._ready = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(20)
        if self._failed is not None:
            self._thread.join(20)
            raise self._failed
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001  the thread that waits raises it
            self._failed = error
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = MirrorServer(self.settings, self._sock)
        try:
            await server.start()
            self._ready.set()
            await self._stop.wait()
        finally:
            await server.stop(1.0)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=headers, timeout=30)

    def head(self, path: str, **headers: str) -> httpx.Response:
        return httpx.head(self.url + path, headers=headers, timeout=30)

    def figure(self, name: str) -> float:
        """One of its metrics; labels as `name{label="value"}`."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    @property
    def blobs(self) -> dict[str, bytes]:
        """Whole files."""
        folder = Path(self.settings.folder, "whole")
        return {one.name: one.read_bytes() for one in folder.iterdir()}


class MirrorProcess:
    """`kvmig mirror`."""

    def __init__(
        self, hub: ModelHub, folder: Path, own: str, peers: list[str], enter: Sequence[str] = ()
    ) -> None:
        """own: its URL. peers: all of them. enter: words that start a command on its host."""
        host, _, port = own.removeprefix("http://").partition(":")
        words = [f"--peer={one}" for one in peers if one != own]
        self._process = subprocess.Popen(
            [
                *enter, sys.executable, "-m", "kvmig", "mirror", f"--hub={hub.url}",
                f"--folder={folder}", f"--host={host}", f"--port={port}", f"--url={own}", *words,
            ],
            stderr=subprocess.PIPE,
            env={**os.environ, "KVMIG_SECRET": SECRET},
            text=True,
        )  # fmt: skip
        self.url = ""

    def wait_ready(self) -> None:
        assert self._process.stderr is not None
        line = self._process.stderr.readline()
        self.url = line.strip().partition("HF_ENDPOINT=")[2]
        assert self.url, line
        self._drain = threading.Thread(target=self._process.stderr.read, daemon=True)
        self._drain.start()

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        if self._process.stderr is not None and self.url:
            self._drain.join(5)
            self._process.stderr.close()
