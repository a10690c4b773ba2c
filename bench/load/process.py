"""What processes take of the machine, from /proc; and how they are started and ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
END_S = 30.0


def cpu_s(pids: Sequence[int]) -> float:
    """Processor time that they have taken so far, in all their threads."""
    return sum(user + kernel for user, kernel in map(_times_s, pids))


def kernel_s(pids: Sequence[int]) -> float:
    """The part of it that was the kernel's, for their system calls."""
    return sum(kernel for _, kernel in map(_times_s, pids))


def _times_s(pid: int) -> tuple[float, float]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) * _TICK_S, int(fields[12]) * _TICK_S


def pss_bytes(pids: Sequence[int]) -> int:
    """Memory, each page that n processes share counted as an nth of one."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) << 10
    return total


def descendants(pid: int) -> dict[int, str]:
    """Command line by process id, of all that it started and they started."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue  # it has ended
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found: dict[int, str] = {}
    wanted = {pid}
    while wanted:
        wanted = {child for child, parent in parents.items() if parent in wanted}
        for child in wanted:
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            found[child] = b" ".join(words).decode(errors="replace")
    return found


def start(
    module: str,
    *words: object,
    log: IO[bytes] | None = None,
    environment: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
    talks: bool = False,
) -> subprocess.Popen[bytes]:
    """`python -m module words`. It has a stdin to hold on to; `talks`: and a stdout to read."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if talks else log,
        stderr=log,
        env={**os.environ, **(environment or {})},
        pass_fds=descriptors,
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, and wait; then end it."""
    process.terminate()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
