"""Weights are read into the page cache while the process that will load them starts.

`posix_fadvise` would not do: of a file the kernel reads ahead only some hundred kB at a call.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import msgspec

from kvmig.core.background import BackgroundTasks
from kvmig.core.errors import ConfigError
from kvmig.core.read_progress import note_path
from kvmig.core.storage_reads import StorageReads
from kvmig.fleet.managed_model import DeploymentRecord
from kvmig.fleet.orders import StartDeployment
from kvmig.launcher.environment import available_memory
from kvmig.sources.file_list import WEIGHTS

PIECE_BYTES = 4 << 20
MOST_SHARE = 0.5
"""Most of the available memory that weights are read into: others' files stay in it."""

log = logging.getLogger(__name__)


def weights_folder(start: StartDeployment) -> str:
    """The folder with the weights that a deployment loads on this host; empty: it loads none."""
    if start.program == "unit" or start.engine == "toy":
        return ""
    note = msgspec.json.decode(start.note, type=DeploymentRecord)
    return "" if note.nodes else note.folder


class WeightsReader:
    """Reads one model's weights at a time; `close` it."""

    def __init__(
        self,
        available: Callable[[], int] = available_memory,
        reads: StorageReads | None = None,
    ) -> None:
        """available: bytes of memory that can be taken. reads: threads that read."""
        self._available = available
        self._tasks = BackgroundTasks("weights that are read ahead")
        self._turn = asyncio.Lock()
        self._reads = reads or StorageReads()
        self._ends = threading.Event()

    def begin(self, folder: str) -> asyncio.Task[int]:
        """Read a folder's weights in the background; the task returns the bytes that were read."""
        return self._tasks.start(self._read(folder), f"weights of {folder}")

    async def close(self) -> None:
        """End what is being read."""
        self._ends.set()
        await self._tasks.close()

    async def _read(self, folder: str) -> int:
        async with self._turn:
            try:
                most = int(self._available() * MOST_SHARE)
                read = partial(read_weights, Path(folder), most, self._ends)
                return await self._reads.read("weights that are read ahead", folder, read)
            except (OSError, ConfigError) as error:  # its start says what is wrong with a file
                log.warning("the weights in %s are not read ahead: %s", folder, error)
                return 0


def read_weights(folder: Path, most: int, ends: threading.Event) -> int:
    """Read whole files with weights, as long as they are `most` bytes together, in the order in
    which engines load them. Returns the bytes. folder: it may be one such file. ends: set to end
    it. Raises OSError."""
    buffer, total = bytearray(PIECE_BYTES), 0
    note_path(folder)
    for path in sorted(folder.iterdir()) if folder.is_dir() else [folder]:
        if not any(fnmatch(path.name, one) for one in WEIGHTS):
            continue
        note_path(path)
        if total + path.stat().st_size > most:
            break
        with path.open("rb", buffering=0) as file:
            while not ends.is_set() and (count := file.readinto(buffer)):
                total += count
                note_path(path)
    return total
