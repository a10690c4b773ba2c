"""Shared memory that an engine's workers leave behind when they are killed.

vLLM's queues between an engine and its workers are files in /dev/shm, which only an
orderly end removes. A process that starts others notes what they share while they live,
and removes it when they are dead.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path("/dev/shm")  # noqa: S108
PREFIXES = ("psm_", "vllm_", "sem.mp-")
"""Prefixes of vLLM's and Python's files. Instances share kvmig's own: see `shm.sweep`."""

Files = dict[Path, int]
"""Files by name, with their inodes: a name may be used again."""


def shared_by(processes: Iterable[int], folder: Path = FOLDER) -> Files:
    """What these processes have mapped; those that have ended share nothing."""
    inodes: set[int] = set()
    for process in processes:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for line in Path(f"/proc/{process}/maps").read_text().splitlines():
                _, _, _, _, inode, *name = line.split(maxsplit=5)
                # Not by name: a semaphore gets its own after it was mapped.
                if name and name[0].startswith(f"{folder}/"):
                    inodes.add(int(inode))
    found: Files = {}
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.name.startswith(PREFIXES) and (number := path.stat().st_ino) in inodes:
                found[path] = number
    return found


def of_group(group: int) -> list[int]:
    """The processes of a process group."""
    found: list[int] = []
    for process in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process) == group:
                found.append(process)
    return found


def remove(files: Files) -> None:
    """Remove the files that still exist; all processes that use them have ended."""
    for path, inode in files.items():
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == inode:
                path.unlink()
