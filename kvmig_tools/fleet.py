"""`kvmig up`, with clients of its door and its API, for benchmarks and tests."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil

from kvmig.core.errors import StartupError
from kvmig.process.sockets import free_port
from kvmig_tools.patience import SERVER_PATIENCE_S


class FleetUp:
    """`kvmig up` with its files in `folder`, until the end of the block."""

    def __init__(
        self, folder: Path, *flags: str, host: str = "127.0.0.1", enter: Sequence[str] = ()
    ) -> None:
        """host: its address. enter: put before the command, runs it on another host of
        `tests.support.network`."""
        self.folder = folder / "data"
        self.port = free_port()
        scheme = "https" if any(one.startswith("--tls-cert") for one in flags) else "http"
        self.url = f"{scheme}://{host}:{self.port}"
        self.log = folder / "log"
        self._command = [
            *enter, sys.executable, "-m", "kvmig", f"--data={self.folder}", "up",
            f"--host={host}", f"--port={self.port}", "--shutdown-timeout=5", *flags,
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None
        self._said = 0
        """Bytes of the log from earlier starts."""
        # No connection is kept: the server may close an idle one just as the next call goes out.
        transport = httpx.HTTPTransport(
            uds=str(self.folder / "run" / "api.sock"),
            verify=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self._api = httpx.Client(
            transport=transport, base_url="http://x", timeout=SERVER_PATIENCE_S
        )

    def start(self) -> None:
        """Return once it serves; where it doesn't, nothing of it is left. Raises StartupError."""
        self.begin()
        try:
            self.says(f"serving on {self.url}")
        except BaseException:
            self.end()
            raise

    def begin(self) -> None:
        """Return once its process is there."""
        with self.log.open("ab") as log:
            self._said = log.tell()
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def says(self, sentence: str) -> None:
        """Return once the output of this start has it."""
        assert self.process is not None
        deadline = time.monotonic() + SERVER_PATIENCE_S
        while sentence.encode() not in self.log.read_bytes()[self._said :]:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise StartupError(self.log.read_text()[-3000:])
            time.sleep(0.02)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired after killing it."""
        assert self.process is not None
        self.process.send_signal(how)
        try:
            return self.process.wait(SERVER_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()  # what it has started ends with it
            self.process.wait()
            raise

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            print(self.log.read_text()[-4000:], file=sys.stderr)
        self.end()

    def end(self) -> None:
        """Be gone, with all that was started."""
        self._api.close()
        if self.process is not None and self.process.poll() is None:
            self.stop()

    @property
    def key(self) -> str:
        """The first admin's."""
        return (self.folder / "admin-key").read_text().strip()

    def client(self, key: str | None = None) -> httpx.AsyncClient:
        """Of the door."""
        headers = {"authorization": f"Bearer {self.key if key is None else key}"}
        return httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=SERVER_PATIENCE_S,
            verify=False,  # noqa: S501 - without certificates, which take 19 ms to load: our own
        )

    def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """Of the server's API."""
        return self._api.request(method, f"/kvmig/v2/{path}", json=body)

    def get(self, path: str) -> Any:
        """The same, JSON of an answer that is right."""
        answer = self.ask("GET", path)
        answer.raise_for_status()
        return answer.json()

    def add(self, spec: Mapping[str, Any]) -> None:
        """Put a model into the catalogue."""
        answer = self._api.post("/kvmig/v2/models", json=dict(spec), timeout=SERVER_PATIENCE_S)
        if answer.status_code != 201:
            raise StartupError(answer.text)

    def listens(self) -> bool:
        """Whether the server takes calls."""
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.folder / "run" / "api.sock")) == 0

    def sockets(self) -> list[Path]:
        """Of its deployments; some may have ended."""
        return list((self.folder / "run").glob("d-*.sock"))

    def instances(self, model: str) -> list[dict[str, Any]]:
        """Rows of a model's instances, as its deployment has them; empty: it has none now."""
        for path in map(str, self.sockets()):
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(path):
                    continue  # of a deployment that ends; httpx leaves a refused socket open
            transport = httpx.HTTPTransport(uds=path, verify=False)
            with httpx.Client(transport=transport, base_url="http://x") as deployment:
                rows: list[dict[str, Any]] = deployment.get("/kvmig/v1/instances").json()["data"]
            if rows and rows[0]["model"] == model:
                return rows
        return []

    def until(self, path: str, **wanted: Any) -> Any:
        """What the API says there once it has these values."""
        deadline = time.monotonic() + SERVER_PATIENCE_S
        while True:
            found = self.get(path)
            if all(found.get(field) == value for field, value in wanted.items()):
                return found
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} is {found}, not {wanted}")
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
