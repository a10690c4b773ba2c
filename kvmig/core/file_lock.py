"""Waits for a lock on a file that another process may hold."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import IO


def lock_file(path: Path, timeout_s: float, look_s: float) -> IO[str]:
    """The locked file, which closing unlocks; so does the kernel if this process dies. Blocks.

    look_s: pause between two attempts. Raises TimeoutError while another process holds it, OSError.
    """
    deadline = time.monotonic() + timeout_s
    file = path.open("w")
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path} is held for {timeout_s:g} s") from None
                time.sleep(look_s)
    except BaseException:
        file.close()
        raise
