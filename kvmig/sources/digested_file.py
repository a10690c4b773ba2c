"""A file that is written from the network, and hashed as it is written."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from kvmig.sources.content_digest import ContentDigest
from kvmig.sources.file_list import RemoteFile, SourceFailure

READ_BYTES = 4 << 20


class DigestedFile(io.RawIOBase):
    """Goes on where a file ends, if there is one. What is there is hashed first.

    It has the methods of a binary file that `huggingface_hub`'s download uses.
    """

    def __init__(
        self,
        file: BinaryIO,
        wanted: RemoteFile,
        count: Callable[[int], None],
        hashed: Callable[[int], None] = lambda _: None,
    ) -> None:
        """file: without a buffer, to be read and written; closed with this. count: called with the
        bytes that are added to what was there, or less than 0. hashed: called with those that were
        there. Raises OSError."""
        self._file = file
        super().__init__()
        self._wanted = wanted
        self._count = count
        self._digest = ContentDigest(wanted)
        try:
            while piece := self._file.read(READ_BYTES):
                self._digest.update(piece)
                hashed(len(piece))
            if self.size > wanted.size:
                self.seek(0)
                self.truncate()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()

    @property
    def size(self) -> int:
        """Bytes that are there."""
        return self._digest.size

    @property
    def digest(self) -> ContentDigest:
        """The digest of what is there; not to be changed."""
        return self._digest

    def write(self, data: Any) -> int:
        """Add to its end. Raises OSError, and SourceFailure where more comes than was listed: only
        the listed bytes were given room."""
        if self.size + len(data) > self._wanted.size:
            self.truncate()
            raise SourceFailure(
                f"{self._wanted.name} is not what its source lists: more than"
                f" {self._wanted.size} bytes came; it was dropped",
                lasting=True,
            )
        left = memoryview(data)
        while left:  # a disk that is nearly full takes a part
            written = self._file.write(left)
            self._digest.update(left[:written])
            self._count(written)
            left = left[written:]
        return len(data)

    def seek(self, at: int, whence: int = os.SEEK_SET) -> int:
        """Ask for its size, or go to the beginning, which is followed by `truncate`."""
        if (at, whence) == (0, os.SEEK_CUR):
            return self.size
        if (at, whence) != (0, os.SEEK_SET):
            raise ValueError(f"a file that is hashed can be written from 0 on again, not from {at}")
        return self._file.seek(0)

    def truncate(self, size: int | None = None) -> int:
        """Begin again, with nothing. Raises OSError."""
        self._file.seek(0)
        self._file.truncate()
        self._count(-min(self.size, self._wanted.size))
        self._digest = ContentDigest(self._wanted)
        return 0

    def sync(self) -> None:
        """Wait until the file is on the disk. Raises OSError."""
        os.fsync(self._file.fileno())

    @property
    def sha256(self) -> str:
        """Hex digits of the digest of the whole file."""
        return self._digest.sha256

    @property
    def is_right(self) -> bool:
        """Whether it is what its place has listed, as far as the place gives a digest."""
        return self._digest.is_right


def open_digested(
    path: Path,
    wanted: RemoteFile,
    count: Callable[[int], None],
    hashed: Callable[[int], None] = lambda _: None,
) -> DigestedFile:
    """The file of this path, which is made if it isn't there; see `DigestedFile`. Raises
    OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    return DigestedFile(os.fdopen(descriptor, "r+b", buffering=0), wanted, count, hashed)
