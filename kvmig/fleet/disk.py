"""How much room is left on the disks of a fleet's files; said once before one is full."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

LOW_BYTES = 1_000_000_000
LOW_PART = 0.05
"""Part of a disk. One with less than this, or than LOW_BYTES, is nearly full."""
ENOUGH = 1.2
"""Times as much must be free before the next warning."""

log = logging.getLogger(__name__)


def low_below(total: int) -> int:
    """Free bytes below which a disk is nearly full."""
    return max(LOW_BYTES, int(total * LOW_PART))


class DiskWatch:
    """The disks of one server."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        """folders: by what is in them."""
        self._folders = folders
        self._said: set[str] = set()

    def free(self) -> dict[str, int]:
        """Bytes, by what the disks are for; without those that can't be asked."""
        return {name: free for name, (free, _) in self._asked().items()}

    def warn_full_disks(self) -> None:
        """Log which disks are nearly full, each once until it has room again."""
        for name, (free, total) in self._asked().items():
            low = low_below(total)
            if free < low and name not in self._said:
                self._said.add(name)
                log.warning(
                    "the disk of the fleet's %s (%s) is nearly full: %.2f of %.2f GB are free. On a"
                    " full disk no order is taken, and soon no call: `kvmig usage prune` makes room"
                    " in the database, logs/ may be moved away",
                    name, self._folders[name], free / 1e9, total / 1e9,
                )  # fmt: skip
            elif free >= ENOUGH * low:
                self._said.discard(name)

    def _asked(self) -> dict[str, tuple[int, int]]:
        found = {}
        for name, folder in self._folders.items():
            try:
                disk = shutil.disk_usage(folder)
            except OSError as error:
                log.warning("the disk of %s can't be asked for its room: %s", folder, error)
            else:
                found[name] = disk.free, disk.total
        return found


def disks_of(data: Path, database: Path | None) -> DiskWatch:
    """The disks of a fleet. database: SQLite's file, which may be on a disk of its own."""
    folders = {"data": data}
    if database is not None and database.parent != data:
        folders["database"] = database.parent
    return DiskWatch(folders)
