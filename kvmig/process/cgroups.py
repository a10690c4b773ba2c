"""What the control groups of this process leave it of its machine; a container is such a group.

Linux's /proc and a library's count of cores are the whole machine's: an engine that went by them
in a container would start threads for cores that it doesn't get, and be killed for its memory.
Both versions of the interface: docs.kernel.org, admin-guide/cgroup-v2 and cgroup-v1.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

PROC = Path("/proc/self")


class CgroupFiles(NamedTuple):
    """Files of a group for its memory, by version."""

    limit: str
    used: str
    unused_cache: str
    """A line of memory.stat: pages that the kernel takes back first."""


MEMORY = (
    CgroupFiles("memory.max", "memory.current", "inactive_file"),
    CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def memory_limit(proc: Path = PROC) -> int | None:
    """Bytes, the least of all groups; None: there is no limit."""
    found = (_number(group / one.limit) for group in groups("memory", proc) for one in MEMORY)
    return min((limit for limit in found if limit is not None), default=None)


def memory_left(proc: Path = PROC) -> int | None:
    """Bytes that the fullest group still has, without what it caches of files; None: no limit."""
    left = [
        limit - (used - _stat(group / "memory.stat", one.unused_cache))
        for group in groups("memory", proc)
        for one in MEMORY
        if (limit := _number(group / one.limit)) is not None
        and (used := _number(group / one.used)) is not None
    ]
    return max(0, min(left)) if left else None


def cores(proc: Path = PROC) -> int | None:
    """How many cores' time a process gets, rounded down, at least 1; None: there is no quota."""
    quotas = []
    for group in groups("cpu", proc):
        quota, _, period = _read(group / "cpu.max").partition(" ")
        quota = quota or _read(group / "cpu.cfs_quota_us")
        period = period or _read(group / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():  # else "max", -1, or no such file
            quotas.append(int(quota) // int(period))
    return max(1, min(quotas)) if quotas else None


def groups(controller: str, proc: Path) -> Iterator[Path]:
    """Folders of this process's group, and of those above it as far as they can be seen here."""
    paths = {}
    for line in (proc / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))  # of version 2 it is empty
    for line in (proc / "mountinfo").read_text().splitlines():
        place, _, kind = line.partition(" - ")
        root, mount = place.split()[3:5]
        version, _, options = kind.split()[:3]
        if version == "cgroup2":
            path = paths.get("", "/")
        elif version == "cgroup" and controller in options.split(","):
            path = paths.get(controller, "/")
        else:
            continue
        # A container may see its own group alone, at the mount, and its path from the machine's.
        inside = PurePosixPath(path)
        inside = inside.relative_to(root) if inside.is_relative_to(root) else PurePosixPath()
        for part in (inside, *inside.parents):
            yield Path(mount) / part


def _read(file: Path) -> str:
    """Empty where the group has no such file: a version's root, or one without the controller."""
    try:
        return file.read_text().strip()
    except FileNotFoundError:
        return ""


def _number(file: Path) -> int | None:
    text = _read(file)
    return int(text) if text.isdigit() else None


def _stat(file: Path, name: str) -> int:
    lines = (line.split() for line in _read(file).splitlines())
    return next((int(line[1]) for line in lines if line[0] == name), 0)
