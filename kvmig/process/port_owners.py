"""The users whose processes listen on a TCP port of this host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from kvmig.process.descendants import PROC, descendants, parents

LISTENS = "0A"
ROOT = 0


def strangers_at(port: int, pid: int, own: int, proc: Path = PROC) -> set[int]:
    """Ids of the users who listen on the port and are neither root, nor `own`, nor run a process
    below `pid`. A listener that can't be seen, as behind a container's firewall rule, is none."""
    found = listeners(port, _lines(proc)) - {ROOT, own}
    return found - _users_below(pid, proc) if found else found


def listeners(port: int, lines: Iterable[str]) -> set[int]:
    """The users who listen on a port. lines: of /proc/net/tcp and /proc/net/tcp6."""
    found = set()
    for line in lines:
        fields = line.split()
        if len(fields) < 8 or fields[3] != LISTENS:
            continue  # the heading, or a connection
        if int(fields[1].rpartition(":")[2], 16) == port:
            found.add(int(fields[7]))
    return found


def _lines(proc: Path) -> Iterator[str]:
    for name in ("tcp", "tcp6"):
        try:
            yield from (proc / "self" / "net" / name).read_text().splitlines()
        except FileNotFoundError:
            continue  # a kernel without IPv6


def _users_below(pid: int, proc: Path) -> set[int]:
    found = set()
    for one in descendants([pid], parents(proc)):
        try:
            found.add((proc / str(one)).stat().st_uid)
        except FileNotFoundError:
            continue  # it has just ended
    return found
