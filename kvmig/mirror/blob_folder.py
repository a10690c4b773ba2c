"""The mirror's folder: files by their digests, whole ones and those that come."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvmig.process.folder_lock import FolderLock
from kvmig.sources.disk_room import HeldFiles, RoomFound, find_room
from kvmig.sources.fetch import free_bytes
from kvmig.sources.files_folder import sync_folder

ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""Tags that are digests of the content: only such files are kept."""


class HeldBlob(msgspec.Struct):
    """A whole file."""

    size: int
    last_used: float


class BlobFolder:
    """`open` it, then `close` it. Its methods may look at the disk."""

    def __init__(
        self, root: Path, most_bytes: int, pins: frozenset[str], evicted: Callable[[], None]
    ) -> None:
        """most_bytes: of all files together; 0: no limit but the disk's. pins: repositories whose
        files stay. evicted: called for each file that goes to make room."""
        self.root = root
        self._most = most_bytes
        self.pins = pins
        self._index = threading.RLock()
        """Held by the thread that uses what follows."""
        self._held: dict[str, HeldBlob] = {}
        self._uses: Counter[str] = Counter()
        self._pinned: set[str] = set()
        self._coming: dict[str, int] = {}
        """Sizes of the files that come."""
        self._lock = FolderLock(root / "mirror.lock", f"the folder {root}")
        self._evicted = evicted

    def open(self) -> None:
        """Take what is there. Raises ConfigError where another mirror uses it, OSError."""
        for kind in ("", "whole", "coming", "facts"):
            (self.root / kind).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock.acquire()
        for path in (self.root / "whole").iterdir():
            found = path.stat()
            self._held[path.name] = HeldBlob(found.st_size, found.st_mtime)

    def close(self) -> None:
        """Let another mirror use it."""
        self._lock.release()

    @property
    def size(self) -> int:
        """Bytes of whole files."""
        with self._index:
            return sum(one.size for one in self._held.values())

    def has(self, etag: str) -> bool:
        """Whether a file is here, whole."""
        return etag in self._held

    def size_of(self, etag: str) -> int:
        """Bytes of a whole file."""
        return self._held[etag].size

    def whole(self, etag: str) -> Path:
        """The path of a whole file."""
        return self.root / "whole" / etag

    def coming(self, etag: str) -> Path:
        """The path of a file while it comes."""
        return self.root / "coming" / etag

    def pin(self, etag: str, repository: str) -> None:
        """A file is of this repository: it stays if that is pinned."""
        if repository in self.pins:
            with self._index:
                self._pinned.add(etag)

    def use(self, etag: str, now: float) -> None:
        """A file is read or written, and does not go before `leave`. now: Unix time."""
        with self._index:
            self._uses[etag] += 1
            if (held := self._held.get(etag)) is not None:
                held.last_used = now
        with contextlib.suppress(FileNotFoundError):  # it is looked for before it is read
            os.utime(self.whole(etag), (now, now))  # its place in the order after a restart

    def leave(self, etag: str) -> None:
        """The end of one `use`."""
        with self._index:
            self._uses[etag] -= 1
            if self._uses[etag] <= 0:
                del self._uses[etag]

    def make_room(self, etag: str, size: int) -> str:
        """Have room for a file that comes; why there is none, or empty. Raises OSError.

        What came of files whose download has ended goes first.
        """
        with self._index:
            found = self._find_room(etag, size)
            if (found.refused or found.evicted) and self._drop_parts(etag):
                found = self._find_room(etag, size)
            if found.refused:
                return found.refused
            for name in found.evicted:
                self.remove(name)
                self._evicted()
            self._coming[etag] = size
            return ""

    def _find_room(self, etag: str, size: int) -> RoomFound:
        parts = dict[str, int]()
        for one in (self.root / "coming").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it is whole now, or was dropped
                parts[one.name] = one.stat().st_size
        there = parts.pop(etag, 0)
        others = {name: whole for name, whole in self._coming.items() if name != etag}
        held = [
            HeldFiles(name, one.size, one.last_used, name in self._uses or name in self._pinned)
            for name, one in self._held.items()
        ]
        return find_room(
            max(0, size - there),
            size,
            free_bytes(self.root),
            sum(max(0, whole - parts.get(name, 0)) for name, whole in others.items()),
            held,
            self._most,
            begun=sum(parts.values()),
        )

    def _drop_parts(self, etag: str) -> bool:
        """Remove parts of files whose download has ended, except this one; whether there were any.
        Raises OSError."""
        kept = {etag, *self._coming}
        unused = [one for one in (self.root / "coming").iterdir() if one.name not in kept]
        for path in unused:
            path.unlink()
        return bool(unused)

    def place(self, etag: str, size: int, now: float) -> None:
        """A file is whole and right. Raises OSError."""
        self.coming(etag).replace(self.whole(etag))
        sync_folder(self.root / "whole")
        with self._index:
            self._held[etag] = HeldBlob(size, now)
            self._coming.pop(etag, None)

    def end(self, etag: str, *, drop: bool) -> None:
        """A file comes no more. drop: what came of it is of no use. Raises OSError."""
        with self._index:
            self._coming.pop(etag, None)
        if drop:
            self.coming(etag).unlink(missing_ok=True)

    def remove(self, etag: str) -> None:
        """Raises OSError."""
        with self._index:
            self.whole(etag).unlink(missing_ok=True)
            self._held.pop(etag, None)


def is_digest(etag: Any) -> bool:
    """Whether a tag is the digest of the content, so that this can be verified."""
    return isinstance(etag, str) and ETAG.fullmatch(etag) is not None
