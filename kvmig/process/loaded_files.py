"""What a process has loaded from disk, and whether that is what lies there still.

A fork server notes it; a fork of it compares (`main`), when a rolling restart asks.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

State = tuple[int, int, int]
"""State of a file or folder: inode, bytes, when it was written (ns)."""
GONE: State = (0, 0, 0)
UNKNOWN: State = (-1, -1, -1)
_noted: dict[str, State] = {}


def note(began_ns: int) -> None:
    """Note what this process has loaded, and where packages are installed.

    began_ns: when it began to load. What was written since may have been read before.
    """
    # Not by getattr: modules that load late would do it now.
    files = {getattr(one, "__dict__", {}).get("__file__") for one in list(sys.modules.values())}
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    for path in filter(None, files | folders):
        state = _state(path)
        _noted[path] = state if state[2] < began_ns else UNKNOWN


def main(_: Sequence[str]) -> int:
    """0 if nothing that was noted has changed, else 1: the exit status."""
    return int(any(_state(path) != state for path, state in _noted.items()))


def _state(path: str) -> State:
    try:
        found = Path(path).stat()
    except OSError:
        return GONE
    return found.st_ino, found.st_size, found.st_mtime_ns
