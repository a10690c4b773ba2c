"""A whole model's files as another node has them: an origin for `kvmig.sources.fetch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvmig.sources.digested_file import DigestedFile
from kvmig.sources.file_list import FileList, RemoteFile, SourceFailure
from kvmig.sources.files_folder import FilesManifest

PIECE_BYTES = 4 << 20


class FolderHolder(Protocol):
    """A node that has whole folders."""

    def list_files(self, folder: str) -> FilesManifest:
        """List what is in a folder. Raises SourceFailure."""
        ...

    def digest_file(self, folder: str, name: str) -> str:
        """Return the SHA-256 of a file. Raises SourceFailure."""
        ...

    def read_file(self, folder: str, name: str, begin: int, count: int) -> bytes:
        """Read some bytes of a file. Raises SourceFailure."""
        ...


class AgentOrigin:
    """Implements `FilesOrigin`, for one download."""

    secret = ""

    def __init__(
        self, holder: FolderHolder, folder: str, manifest: FilesManifest, go_on: Callable[[], None]
    ) -> None:
        """manifest: what the holder lists. go_on: raises SourceFailure once the folder is wanted no
        more."""
        self._holder = holder
        self._folder = folder
        self._manifest = manifest
        self._go_on = go_on

    def list_files(self) -> FileList:
        """See `FilesOrigin`."""
        revision = self._manifest.revision
        files = [
            RemoteFile(one.name, one.size, f"sha256:{one.sha256}")
            if one.sha256
            else RemoteFile(one.name, one.size, tag=revision)
            for one in self._manifest.files
        ]
        return FileList(revision, tuple(files))

    def fetch(self, file: RemoteFile, into: DigestedFile, listed: FileList) -> None:
        """See `FilesOrigin`."""
        del listed
        while into.size < file.size:
            self._go_on()
            count = min(PIECE_BYTES, file.size - into.size)
            piece = self._holder.read_file(self._folder, file.name, into.size, count)
            if not piece:
                raise SourceFailure(f"{file.name} ends after {into.size} of {file.size} bytes")
            into.write(piece)
        if not file.digest and into.sha256 != self._holder.digest_file(self._folder, file.name):
            into.truncate()
            raise SourceFailure(f"{file.name} has changed while it was fetched; it was dropped")

    def read(self, file: RemoteFile, begin: int, count: int, listed: FileList) -> bytes:
        """See `FilesOrigin`."""
        del listed
        return self._holder.read_file(self._folder, file.name, begin, count)
