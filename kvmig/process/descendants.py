"""The processes that a process has started, and those that these have started."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from kvmig.core.open_files import lacks_descriptor

PROC = Path("/proc")


def parents(proc: Path = PROC) -> dict[int, int]:
    """The parent of every process that is to be seen here, by process id. Raises OSError where this
    process has no file descriptor free to look."""
    found = {}
    for one in proc.iterdir():
        if one.name.isdecimal():
            try:
                fields = (one / "stat").read_text().rpartition(")")[2].split()
            except OSError as error:  # it has just ended
                if lacks_descriptor(error):
                    raise
                continue
            found[int(one.name)] = int(fields[1])
    return found


def descendants(of: Iterable[int], parent_of: Mapping[int, int]) -> set[int]:
    """Find all processes below these, and these themselves."""
    found = set(of)
    more = set(found)
    while more:
        more = {child for child, parent in parent_of.items() if parent in more} - found
        found |= more
    return found
