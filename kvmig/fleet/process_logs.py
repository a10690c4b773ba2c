"""The logs of a fleet's processes: the last message of each, and the bound of their length."""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from kvmig.core.shown_secrets import shown_text

LOG_BYTES = 10_000_000
"""A log that is longer is kept as NAME.log.1, and an empty one begins."""
LAST_BYTES = 4096


def size_of(path: Path) -> int:
    """Size in bytes; 0 if there is no such file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def last_sentence(path: Path, begin: int) -> str:
    """What a process said last of its own: its last line that begins with "kvmig: ".

    begin: where its lines begin, unless another log was begun meanwhile.
    """
    try:
        with path.open("rb") as file:
            size = size_of(path)
            file.seek(max(begin if begin <= size else 0, size - LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return last_of(lines)


def last_of(lines: Sequence[str]) -> str:
    """The last message of kvmig's own."""
    said = [line.removeprefix("kvmig: ") for line in lines if line.startswith("kvmig: ")]
    return said[-1] if said else ""


def turn_log(path: Path) -> None:
    """Begin another one if it is too long. Writers append, so they go on at its new end.

    Raises OSError.
    """
    if path.stat().st_size > LOG_BYTES:
        shutil.copyfile(path, path.with_suffix(".log.1"))
        os.truncate(path, 0)


def last_lines(path: Path, lines: int) -> list[str]:
    """The last lines of a log, without secrets of URLs and flags; none if there is no such file."""
    try:
        with path.open(errors="replace") as file:
            return [shown_text(line.rstrip("\n")) for line in deque(file, lines)]
    except FileNotFoundError:
        return []
