"""What must not be left: in a running server after a test, on the machine after a server."""

from __future__ import annotations

import contextlib
import fcntl
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from kvmig_tools.nursery import forked_for
from kvmig_tools.served import Served

S = TypeVar("S", bound=Served)
PATIENCE_S = 10.0
"""Freed blocks show up with the next load report, aborts a moment after the client left."""
SHM = Path("/dev/shm")
_INSTANCE = re.compile(r"/kvmig-.*-(i\d+)-")
REAPED_S = 5.0
"""In which an ended process whose parent is gone must be reaped."""


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


@contextlib.contextmanager
def leaving_nothing(served: S, *, no_traceback: bool = False) -> Iterator[S]:
    """A server inside the block, of which nothing is left after it.

    no_traceback: it may not have printed one either.
    """
    with served:
        yield served
        footprint = Footprint.of(served)
    footprint.assert_gone()
    assert not (no_traceback and "Traceback" in served.output())


@dataclass(frozen=True)
class Footprint:
    """What a running server has on the machine."""

    processes: list[psutil.Process]
    shared_memory: set[Path]
    port: int

    @classmethod
    def of(cls, served: Served) -> Footprint:
        """Now."""
        assert served.process is not None
        server = psutil.Process(served.process.pid)
        processes = [server, *server.children(recursive=True)]
        for pid in set(forked_for(server.pid)) - {one.pid for one in processes}:
            with contextlib.suppress(psutil.NoSuchProcess):
                processes.append(psutil.Process(pid))
        mapped = set()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                mapped |= {Path(one.path) for one in process.memory_maps()}
        files = {path for path in mapped if path.parent == SHM and path.name.startswith("kvmig-")}
        return cls(processes, files, served.port)

    def named(self, module: str) -> list[psutil.Process]:
        """Those that run `python -m module`."""
        found = []
        for one in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie
                if one.is_running() and module in " ".join(one.cmdline()):
                    found.append(one)
        return found

    def llumlets(self) -> dict[str, psutil.Process]:
        """By instance: those that may write the instance's shared memory."""
        found = {}
        for one in self.named("kvmig.launcher.llumlet_main"):
            with contextlib.suppress(psutil.NoSuchProcess):
                for file in one.open_files():
                    if "+" in file.mode and (name := _INSTANCE.search(file.path)):
                        found[name[1]] = one
        return found

    def assert_gone(self, within_s: float = 0.0) -> None:
        """Nothing of it is there any more."""
        _, alive = psutil.wait_procs(self.processes, timeout=within_s)
        if all(_is_zombie(one) for one in alive):  # they have ended; init takes them when it likes
            _, alive = psutil.wait_procs(alive, timeout=REAPED_S)
        assert not alive, f"still running: {alive}"
        left = {path for path in self.shared_memory if path.exists()}
        assert not left, f"shared memory left: {left}"
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", self.port))


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def orphans() -> set[str]:
    """Files of kvmig in shared memory that no process holds."""
    found = set()
    for path in SHM.glob("kvmig-*"):
        with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            found.add(path.name)
    return found
