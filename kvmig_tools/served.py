"""A server in a process of its own, for benchmarks, tests and the demo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import httpx

from kvmig.core.errors import StartupError
from kvmig.core.secret import ADMIN_KEY
from kvmig.models import BUNDLED
from kvmig.process.fork_server import HANDED
from kvmig.process.sockets import free_port
from kvmig.process.supervisor import how_it_ended
from kvmig_tools.nursery import ForkedServer, Nursery
from kvmig_tools.patience import SERVER_PATIENCE_S

KEEP_S = 1.0
"""Idle connections are used again for so long: plain vLLM closes them after 5 s."""

SMALL: tuple[str, ...] = (
    "--enforce-eager",
    "--block-size=32",
    "--max-num-seqs=16",
    "--num-gpu-blocks-override=600",
    "--dtype=float32",
)
"""vLLM flags that start quickly on a CPU, and step quickly on one without bfloat16."""


class Served:
    """`python -m MODULE MODEL flags` until it answers /health; ended at the end of the block.

    MODULE is kvmig.serve, or plain vLLM for comparison. nursery: it is forked there, in an
    environment like the nursery's. log: where its output goes.
    host: address that it listens on. enter: a command that runs it elsewhere, such as nsenter.
    admin_key: of the admin API, which needs one where host isn't this machine only.
    """

    def __init__(
        self,
        flags: Sequence[str] = SMALL,
        *,
        model: str | Path = BUNDLED,
        command: Sequence[str] = ("-m", "kvmig.serve"),
        environment: Mapping[str, str] | None = None,
        nursery: Nursery | None = None,
        log: Path | None = None,
        host: str = "127.0.0.1",
        enter: Sequence[str] = (),
        admin_key: str = "",
    ) -> None:
        self.model = str(model)
        self.port = free_port()
        self.url = f"http://{host}:{self.port}"
        self._flags = [
            self.model, "--port", str(self.port), "--host", host, "--disable-uvicorn-access-log",
            *flags,
        ]  # fmt: skip
        self._command = [*enter, sys.executable, *command, *self._flags]
        own = {ADMIN_KEY: admin_key} if admin_key else {}
        base = os.environ if nursery is None else nursery.environment
        self._environment = {**base, **(environment or {}), **own}
        self._log_path = log
        # Without certificates, which take 30 ms to load: it is plain HTTP.
        headers = {"authorization": f"Bearer {admin_key}"} if admin_key else {}
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            verify=False,  # noqa: S501
            limits=httpx.Limits(keepalive_expiry=KEEP_S),
        )
        self.process: subprocess.Popen[bytes] | ForkedServer | None = None

    def start(self) -> None:
        """Raises StartupError with the end of its output if it does not come up."""
        if self._log_path:
            self._log_path.write_bytes(b"")
        log = self._log_path.open("ab") if self._log_path else None
        try:
            self.process = self._begin(log)
        finally:
            if log is not None:
                log.close()
        try:
            self._wait(self.process)
        except BaseException:
            if self.process.poll() is None:
                self.stop()
            raise

    def _begin(self, log: IO[bytes] | None) -> subprocess.Popen[bytes] | ForkedServer:
        if HANDED in self._environment:
            output = None if log is None else log.fileno()
            try:
                return ForkedServer(self._flags, self._environment, output)
            except StartupError as error:
                print(f"{error}; this server starts by itself", file=sys.stderr)
        return subprocess.Popen(self._command, env=self._environment, stdout=log, stderr=log)

    def _wait(self, process: subprocess.Popen[bytes] | ForkedServer) -> None:
        deadline = time.monotonic() + SERVER_PATIENCE_S
        while True:
            if (code := process.poll()) is not None:
                raise StartupError(f"the server ended ({how_it_ended(code)})\n{self._last_words()}")
            if time.monotonic() > deadline:
                raise StartupError(f"not up in {SERVER_PATIENCE_S:g} s\n{self._last_words()}")
            try:
                if self._http.get("/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass  # not yet
            time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End it; its exit code. Raises subprocess.TimeoutExpired after killing it."""
        assert self.process is not None
        self.process.send_signal(how)
        try:
            return self.process.wait(SERVER_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def output(self) -> str:
        """What it has printed, if it was logged."""
        return self._log_path.read_text(errors="replace") if self._log_path else ""

    def _last_words(self) -> str:
        return self.output()[-3000:]

    def get(self, path: str) -> Any:
        """JSON of an admin route, such as `instances`."""
        answer = self._http.get(f"/kvmig/v1/{path}", timeout=30)
        answer.raise_for_status()
        return answer.json()["data"]

    def migrate(self, request_id: str, destination: str) -> httpx.Response:
        """Ask for one migration and wait for its end."""
        body = {"request_id": request_id, "destination": destination}
        return self._http.post("/kvmig/v1/migrations", json=body, timeout=120)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()
        if error is not None and self.output():
            print(f"--- the end of what the server said\n{self.output()[-3000:]}", file=sys.stderr)
        if self.process is not None and self.process.poll() is None:
            self.stop()
