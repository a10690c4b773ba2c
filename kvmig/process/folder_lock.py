"""A lock that keeps a folder for one process at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TextIO

from kvmig.core.errors import ConfigError


def holder_of(path: Path) -> str:
    """The process id of the process that has acquired the lock at a path; empty: none has. Raises
    OSError."""
    try:
        file = path.open()
    except FileNotFoundError:
        return ""
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip() or "unknown"
    return ""


class FolderLock:
    """`acquire` it, then `release` it; the end of the process releases it, too."""

    def __init__(self, path: Path, setting: str) -> None:
        """path: of the lock's file, which stays. setting: where the user gave the folder, for the
        error, such as "--data FOLDER"."""
        self._path = path
        self._setting = setting
        self._held: TextIO | None = None

    def acquire(self) -> None:
        """Raises ConfigError where another process has it, with its process id; OSError."""
        held = self._path.open("a+")
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            held.seek(0)
            holder = held.read().strip() or "another one"
            held.close()
            raise ConfigError(f"{self._setting} is in use by process {holder}") from error
        except OSError:
            held.close()
            raise
        held.truncate(0)
        held.write(f"{os.getpid()}\n")
        held.flush()
        self._held = held

    def release(self) -> None:
        """Let others take it; without effect where it isn't held."""
        if self._held is not None:
            self._held.close()
            self._held = None
