"""The digest of a file's content, as far as it has come."""

from __future__ import annotations

import hashlib
from typing import Self

from kvmig.sources.file_list import RemoteFile


class ContentDigest:
    """The digest of one file: SHA-256 in any case, and what its place lists."""

    def __init__(self, wanted: RemoteFile) -> None:
        self._wanted = wanted
        self.size = 0
        self._sha256 = hashlib.sha256()
        self._git = hashlib.sha1(b"blob %d\0" % wanted.size, usedforsecurity=False)

    def update(self, data: bytes | memoryview) -> None:
        """Take the next bytes."""
        self._sha256.update(data)
        if self._wanted.digest.startswith("git:"):
            self._git.update(data)
        self.size += len(data)

    def copy(self) -> Self:
        """Another one, which goes on by itself."""
        other = type(self)(self._wanted)
        other.size, other._sha256, other._git = self.size, self._sha256.copy(), self._git.copy()
        return other

    @property
    def sha256(self) -> str:
        """Hex digits."""
        return self._sha256.hexdigest()

    @property
    def is_right(self) -> bool:
        """Whether it is what its place has listed, as far as the place gives a digest."""
        if self.size != self._wanted.size:
            return False
        kind, _, digest = self._wanted.digest.partition(":")
        found = {"sha256": self.sha256, "git": self._git.hexdigest(), "": ""}
        return found[kind] == digest
