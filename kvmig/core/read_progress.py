"""How far a read of users' files has come: its code notes each file before it looks there."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path


@dataclass(eq=False)
class ReadProgress:
    """How far one read has come."""

    whose: str
    """The owner of what it looks at."""
    path: str
    """The path that it looks at."""
    steps: int = 0


PROGRESS: ContextVar[ReadProgress | None] = ContextVar("read progress", default=None)
"""The progress of the read that a thread makes; None: none of `kvmig.core.storage_reads`."""


def note_path(path: Path | str, whose: str = "") -> None:
    """Name the file that is looked at next, or read on. For a read of `StorageReads` its time
    begins once more; elsewhere nothing happens. whose: begins its error; empty: as before."""
    if (progress := PROGRESS.get()) is not None:
        progress.path = str(path)
        progress.whose = whose or progress.whose
        progress.steps += 1
