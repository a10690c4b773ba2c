"""One instance compiles a model at a time; those that come meanwhile find what it has made.

vLLM keeps what it has compiled in a folder that all instances of a user share, under a name that
follows from the configuration. Two processes that compile the same at once would each take minutes
of the cores, and one might read what the other has half written.

A turn is a lock on a file, which the kernel gives back when its holder ends, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 600.0
"""Time for another instance to compile, before this one does it, too."""
LOOK_S = 0.05
DONE = b"compiled"


class CompileTurn:
    """The right to compile something, or nothing at all where it was compiled before."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor

    def end(self, *, compiled: bool = False) -> None:
        """Let others go on. May be called twice. compiled: they find it in the cache."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            if compiled:
                os.pwrite(descriptor, DONE, 0)
        finally:
            os.close(descriptor)


@contextmanager
def compile_turn(
    folder: Path, key: str, timeout_s: float = COMPILE_TIMEOUT_S
) -> Iterator[CompileTurn]:
    """Wait while another process compiles the same; one that has ended, however, is none.

    A folder that can't be written to, or a wait of more than `timeout_s`, only costs that this
    process compiles for itself.
    """
    turn = CompileTurn()
    try:
        turn = _take(folder, key, timeout_s)
    except OSError as error:
        log.warning("compiled graphs are not shared with other instances: %s", error)
    try:
        yield turn
    finally:
        turn.end()


def _take(folder: Path, key: str, timeout_s: float) -> CompileTurn:
    """Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / f"kvmig-{key}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    turn, deadline = CompileTurn(descriptor), time.monotonic() + timeout_s
    try:
        while os.pread(descriptor, len(DONE), 0) != DONE:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.pread(descriptor, len(DONE), 0) != DONE:
                    return turn
            if time.monotonic() >= deadline:
                log.warning("another instance has compiled for more than %g s", timeout_s)
                break
            time.sleep(LOOK_S)
    except BaseException:
        turn.end()
        raise
    turn.end()
    return CompileTurn()
