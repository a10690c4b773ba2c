"""A folder of the user's with a model, as it is on this disk: it may change at any time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from hashlib import file_digest
from pathlib import Path
from queue import Empty, SimpleQueue

from kvmig.sources.file_list import MOST_FILES, RemoteFile, chosen, state_of
from kvmig.sources.files_folder import FilesManifest, WholeFile
from kvmig.sources.source import ModelSource

log = logging.getLogger(__name__)


def list_folder(folder: Path) -> FilesManifest | None:
    """The files in it that engines read, with sizes and no digests; None: it is not there. The
    revision is a name for the state that all of them are in. Raises OSError."""
    if not folder.is_dir():
        return None
    files = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found = path.stat()
            name, tag = str(path.relative_to(folder)), str(found.st_mtime_ns)
            files.append(RemoteFile(name, found.st_size, tag=tag))
        if len(files) > MOST_FILES:
            break  # no model has so many, and who fetches them says so
    kept = chosen(files)
    return FilesManifest(
        str(ModelSource("path", str(folder))),
        state_of(kept),
        tuple(WholeFile(one.name, one.size, "") for one in kept),
    )


def digest_of(path: Path) -> str:
    """SHA-256 of a file. Raises OSError."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


class FolderLists:
    """Lists folders of the user's, each in a thread of its own: one on a slow disk, or with very
    many files, delays no other one. One thread calls its methods."""

    def __init__(self) -> None:
        self._running: dict[str, SimpleQueue[FilesManifest | None]] = {}

    def begin_lists(self, folders: Iterable[str]) -> None:
        """List these, but those that are being listed."""
        for one in folders:
            if one not in self._running:
                queue = self._running[one] = SimpleQueue[FilesManifest | None]()
                threading.Thread(
                    target=_list_into, args=(one, queue), name="list", daemon=True
                ).start()

    def is_listing(self, folder: str) -> bool:
        """Whether a folder's list has not been taken yet."""
        return folder in self._running

    def take_lists(self, timeout_s: float) -> dict[str, FilesManifest | None]:
        """The lists that are there within this time; None: that folder is not there, or can't be
        read."""
        found, until = {}, time.monotonic() + timeout_s
        for one, queue in list(self._running.items()):
            try:
                found[one] = queue.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                continue
            del self._running[one]
        return found


def _list_into(folder: str, queue: SimpleQueue[FilesManifest | None]) -> None:
    found = None
    try:
        found = list_folder(Path(folder))
    except OSError as error:
        log.warning("%s can't be read: %s", folder, error)
    finally:
        queue.put(found)
