"""A fleet in processes of its own: `kvmig up`, and a client for its door and its API."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil

from kvmig.engines.toy.script import Script, ScriptFile
from kvmig_tools.served import free_port

START_S = 60.0
STOP_S = 60.0
PATIENCE_S = 60.0


class FleetUp:
    """`kvmig up` with its files in `folder`, until the end of the block."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder / "data"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "log"
        self.script = ScriptFile(str(folder / "script"))
        self._command = [
            sys.executable, "-m", "kvmig", f"--data={self.folder}", "up", f"--port={self.port}",
            "--shutdown-timeout=5", *flags,
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None
        transport = httpx.HTTPTransport(uds=str(self.folder / "run" / "api.sock"))
        self._api = httpx.Client(transport=transport, base_url="http://x", timeout=PATIENCE_S)

    def start(self) -> None:
        """Return once it serves."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while f"serving on {self.url}" not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(how)
        return self.process.wait(STOP_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._api.close()
        if error is not None:
            print(self.log.read_text()[-4000:], file=sys.stderr)
        assert self.process is not None
        if self.process.poll() is None:
            self.stop()

    @property
    def key(self) -> str:
        """The first admin's."""
        return (self.folder / "admin-key").read_text().strip()

    def client(self, key: str | None = None) -> httpx.AsyncClient:
        """Of the door."""
        headers = {"authorization": f"Bearer {self.key if key is None else key}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=PATIENCE_S)

    def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """Of the server's API."""
        return self._api.request(method, f"/kvmig/v2/{path}", json=body)

    def get(self, path: str) -> Any:
        answer = self.ask("GET", path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def add_toy(self, name: str, **more: Any) -> None:
        """A model that counts on, and does what the script says."""
        flags = [
            f"--script={self.folder.parent / 'script'}",
            "--max-num-seqs=64",
            *more.pop("flags", []),
        ]
        spec = {"name": name, "source": "path:/toy", "engine": "toy", "flags": flags, **more}
        answer = self.ask("POST", "models", spec)
        assert answer.status_code == 201, answer.text

    def hold(self, tokens: int | None) -> None:
        """Let no request get more output tokens; None: go on."""
        self.script.write(Script() if tokens is None else Script(hold=tokens))

    def listens(self) -> bool:
        """Whether the server takes calls."""
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.folder / "run" / "api.sock")) == 0

    def until(self, path: str, **wanted: Any) -> Any:
        """What the API says there once it has these values."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = self.get(path)
            if all(found.get(field) == value for field, value in wanted.items()):
                return found
            assert time.monotonic() < deadline, found
            time.sleep(0.02)

    def processes(self, words: str) -> list[int]:
        """Of this fleet, while it runs: those whose command line has the words."""
        assert self.process is not None
        found = []
        for one in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if words in " ".join(one.cmdline()) and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one.pid)
        return found


def ended(pid: int) -> bool:
    """Whether a process is gone, or only its exit code is left."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
