"""The processes of a running cluster, by what they are."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.chaos.place import Place

MODULES = {
    "kvmig.serve": "launcher",
    "kvmig.process.fork_server": "fork-server",
    "kvmig.launcher.llumlet_main": "instance",
    "kvmig.launcher.scheduler": "scheduler",
    "kvmig.frontend.process_main": "front-end",
    "kvmig.sharing": "unit-agent",
}


@dataclass
class Cast:
    """Who plays: process ids by part; several for `instance` and `front-end`."""

    parts: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, place: Place) -> Cast:
        """Now; also those whose parent has died."""
        cast = cls()
        for pid in place.processes():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                for word in " ".join(psutil.Process(pid).cmdline()).split():
                    if part := MODULES.get(word):
                        cast.parts.setdefault(part, []).append(pid)
        return cast

    @property
    def everybody(self) -> list[int]:
        """All of them."""
        return [pid for pids in self.parts.values() for pid in pids]

    def one(self, part: str, number: int) -> int | None:
        """Of that part, the `number`th, counted round; None if there is none now."""
        pids = sorted(self.parts.get(part, ()))
        return pids[number % len(pids)] if pids else None


def connections(pid: int) -> list[tuple[int, int]]:
    """Its TCP connections: the ports here and there; none of a process that has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [
            (one.laddr.port, one.raddr.port)
            for one in psutil.Process(pid).net_connections("tcp")
            if len(one.raddr)  # else it listens
        ]
    return []


def sever(pid: int, others: Iterable[int]) -> int:
    """Break the process's connections to the others, as a firewall would; how many.

    Raises CalledProcessError where that isn't allowed.
    """
    theirs = {port for other in others if other != pid for port, _ in connections(other)}
    cut = [here for here, there in connections(pid) if there in theirs]
    for port in cut:
        command = ["ss", "-K", "-t", f"sport = :{port}"]
        subprocess.run(command, check=True, capture_output=True, timeout=20)
    return len(cut)


def shared_by(pid: int) -> set[str]:
    """Names of the files in /dev/shm that the process has mapped."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {Path(line.split()[5]).name for line in lines if " /dev/shm/" in line}
    return set()
