"""What a cluster holds when nothing runs, before and after."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from bench.chaos.cast import Cast, shared_by
from bench.chaos.place import Place
from kvmig_tools.served import Served

START_TIMEOUT_S = 90.0
"""An instance that had no memory while it started may wait for ever, inside torch."""
PATIENCE_S = 120.0 + START_TIMEOUT_S
MEMORY_MIB = 64.0
"""Growth of one process that is not taken for a leak: allocators keep what they had."""
DESCRIPTORS = 8
"""The same of file descriptors: how many connections there are depends on who has moved what."""
HELD = ("blocks_used", "running", "waiting", "migrations_in", "migrations_out", "staging_used")


@dataclass(frozen=True)
class Process:
    """part: what it is. fds, threads: how many; mib: resident memory."""

    pid: int
    part: str
    fds: int
    threads: int
    mib: float


@dataclass
class Holdings:
    """Of an idle cluster. rows: instances that hold something; orphans: files in /dev/shm
    that none of its processes has mapped."""

    processes: list[Process] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    requests: int = 0
    orphans: list[str] = field(default_factory=list)
    strangers: list[int] = field(default_factory=list)
    """Processes that the cluster has started, and that belong to none of its parts."""


def processes(place: Place) -> list[Process]:
    """All, now."""
    found = []
    for part, pids in Cast.of(place).parts.items():
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                one = psutil.Process(pid)
                found.append(
                    Process(pid, part, one.num_fds(), one.num_threads(), resident_mib(one))
                )
    return found


def resident_mib(process: psutil.Process) -> float:
    """What the process has in memory, MiB; shared memory counts with each."""
    return round(process.memory_info().rss / (1 << 20), 2)


def when_idle(served: Served, place: Place, instances: int) -> Holdings:
    """Wait until all serve and hold nothing; after PATIENCE_S, what is held still."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = _holdings(served, place)
        cast = Cast.of(place)
        there = len(cast.parts.get("instance", ())) >= instances
        if there and not found.rows and not found.requests and not found.orphans:
            return found
        if time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def _holdings(served: Served, place: Place) -> Holdings:
    found = Holdings(processes=processes(place))
    try:
        for row in served.get("instances"):
            if row["state"] != "serving" or any(row[field] for field in HELD):
                found.rows.append(row)
        found.requests = len(served.get("requests"))
    except httpx.HTTPError as error:
        found.rows.append({"id": "?", "state": repr(error)})
    mine = set(place.processes())
    mapped = {name for pid in mine for name in shared_by(pid)}
    if place.private:
        found.orphans = sorted(set(place.left_in_shm()) - mapped)
    known = {one.pid for one in found.processes}
    for pid in list(known):
        with contextlib.suppress(psutil.NoSuchProcess):
            known |= {one.pid for one in psutil.Process(pid).children(recursive=True)}
    found.strangers = sorted(mine - known)
    return found


def compare(before: Holdings, after: Holdings) -> dict[str, float]:
    """What is left over: 0 each, if nothing is.

    Open files of a process are compared with the most that one of its part had before; memory with
    its own, if it lived through it all: what another one has depends on how it was started.
    """
    summary = {
        "leaked_blocks": sum(row.get("blocks_used", 0) for row in after.rows),
        "leaked_requests": after.requests + sum(row.get("running", 0) for row in after.rows),
        "instances_not_well": sum(row["state"] != "serving" for row in after.rows),
        "leaked_staging_buffers": sum(row.get("staging_used", 0) for row in after.rows),
        "leaked_shared_memory": len(after.orphans),
        "stray_processes": len(after.strangers),
    }
    fds = mib = 0.0
    for one in after.processes:
        same = [other for other in before.processes if other.part == one.part]
        fds = max(fds, one.fds - max((other.fds for other in same), default=one.fds) - DESCRIPTORS)
        own = [other.mib for other in same if other.pid == one.pid]
        mib = max(mib, one.mib - max(own, default=one.mib) - MEMORY_MIB)
    return {**summary, "leaked_fds": max(0.0, fds), "leaked_memory_mib": max(0.0, mib)}
