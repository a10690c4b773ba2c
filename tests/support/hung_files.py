"""Files that answer late, as those of a network's storage whose server is away."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

from kvmig.core.read_progress import note_path
from tests.support.waiting import until


class HungFile:
    """A file whose content comes once `answer` is called: until then a read of it hangs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._answered = False

    def read(self) -> bytes:
        note_path(self.path)
        return self.path.read_bytes()

    def answer(self, content: bytes = b"{}") -> None:
        """Wait for a reader, and let it have that. Those that come later get it as well."""
        self._answered = True
        writer = os.open(self.path, os.O_WRONLY)
        self.path.with_suffix(".whole").write_bytes(content)
        self.path.with_suffix(".whole").rename(self.path)
        os.write(writer, content)
        os.close(writer)

    def release(self) -> None:
        """Let no thread hang any longer."""
        if not self._answered:
            descriptor = os.open(self.path, os.O_RDWR)  # which waits for nobody
            time.sleep(0.05)
            os.close(descriptor)


def readers() -> int:
    """Threads of `StorageReads`."""
    return sum(one.name.startswith("reads ") for one in threading.enumerate())


async def until_readers(count: int) -> None:
    """Wait until there are so many, and the event loop knows of those that have ended."""
    await until(lambda: readers() == count)
    await asyncio.sleep(0.01)
