"""Servers that join one scheduler, and the scheduler, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from kvmig.process.sockets import free_port
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import Served
from tests.support.toys import Toys
from tests.support.waiting import until_yes, wait_until

SECRET = "a secret of several servers"


class CommonScheduler:
    """`python -m kvmig.scheduler`, which can be ended and started again at the same endpoint."""

    def __init__(self, folder: Path, endpoint: str = "", flags: Sequence[str] = ()) -> None:
        self.endpoint = endpoint or f"tcp://127.0.0.1:{free_port()}"
        self.log = folder / "scheduler.log"
        self._flags = flags
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What a server has that joins it."""
        return {"KVMIG_JOIN": self.endpoint, "KVMIG_SECRET": SECRET}

    def start(self) -> None:
        command = [sys.executable, "-m", "kvmig.scheduler", "--listen", self.endpoint, *self._flags]
        environment = {**os.environ, "KVMIG_SECRET": SECRET}
        said = self.output().count("servers join at")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        wait_until(lambda: self.output().count("servers join at") > said)

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(how)
        return self.process.wait(20)

    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@contextmanager
def common_scheduler(
    folder: Path, endpoint: str = "", flags: Sequence[str] = ()
) -> Iterator[CommonScheduler]:
    """One inside the block."""
    made = CommonScheduler(folder, endpoint, flags)
    try:
        made.start()
        yield made
    finally:
        if made.process is not None and made.process.poll() is None:
            made.end()


@contextmanager
def joined_toys(
    scheduler: CommonScheduler,
    folder: Path,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Toys]:
    """A server of one toy that has joined."""
    folder.mkdir()
    flags = ["--instances=1", "--shutdown-timeout=5", *flags]
    both = {**scheduler.environment, **(environment or {})}
    with Toys(flags, folder, environment=both) as served:
        yield served


def own_instance(served: Served) -> str:
    """The name of the server's only instance."""
    (name,) = (row["id"] for row in served.get("instances") if not row["server"])
    return str(name)


async def until_they_know(*servers: Served) -> None:
    """Wait until each server is connected to the instances of all."""

    def know() -> bool:
        rows = [served.get("instances") for served in servers]
        states = [row["state"] for each in rows for row in each]
        return states == ["serving"] * len(servers) ** 2

    await until_yes(know)


def places(served: Served) -> dict[str, str]:
    """Instance by call, of all live requests."""
    return {row["call_id"]: row["instance"] for row in served.get("requests")}


async def post(
    served: Served, path: str, method: str = "POST", body: Mapping[str, object] | None = None
) -> httpx.Response:
    """An order of the admin API."""
    async with httpx.AsyncClient(verify=False, timeout=SERVER_PATIENCE_S) as http:
        return await http.request(method, f"{served.url}/kvmig/v1/{path}", json=body)
