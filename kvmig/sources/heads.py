"""A model's folder without its weights: what an engine reads to compute the model's size.

Small files are whole. Of a safetensors or GGUF file there is its header, which lists the tensors,
and a hole as long as the rest, which takes no room on the disk.
"""

from __future__ import annotations

import secrets
import shutil
from fnmatch import fnmatch

from kvmig.sources.digested_file import open_digested
from kvmig.sources.file_list import (
    WEIGHTS,
    FileList,
    RemoteFile,
    SourceFailure,
    checked_list,
)
from kvmig.sources.files_folder import FilesFolder, folder_name
from kvmig.sources.gguf_header import NoHeader, read_header
from kvmig.sources.messages import FetchHeads
from kvmig.sources.origins import FilesOrigin
from kvmig.sources.source import ModelSource

LENGTH_BYTES = 8
"""Size of the number before a safetensors file's header: the header's bytes, little-endian."""
MOST_HEADER_BYTES = 100_000_000
"""The limit of safetensors itself."""
MOST_SMALL_BYTES = 1 << 30
"""Most bytes of the files that are no weights."""


class HeadsFetch:
    """Fetches the heads of one source's files."""

    def __init__(self, source: ModelSource, origin: FilesOrigin, folder: FilesFolder) -> None:
        self.source = source
        self._origin = origin
        self._folder = folder

    def run(self) -> FetchHeads:
        """Raises as `SourceFetch.run`."""
        listed = checked_list(str(self.source), self._origin.list_files())
        self._folder.make()
        ready = self._folder.heads(folder_name(self.source, listed.revision))
        if ready.is_dir():
            return FetchHeads(str(ready), listed.revision)
        small = sum(one.size for one in listed.files if not is_weights(one))
        if small > MOST_SMALL_BYTES:
            raise SourceFailure(
                f"{self.source}: {small} bytes are no weights, at most {MOST_SMALL_BYTES} are"
                " fetched to evaluate it",
                lasting=True,
            )
        making = self._folder.root / "gone" / f"heads-{secrets.token_hex(4)}"
        making.mkdir(mode=0o700)
        try:
            for one in listed.files:
                path = making / one.name
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                if is_weights(one):
                    with path.open("wb") as file:
                        file.write(self._header(one, listed))
                        file.truncate(one.size)
                else:
                    with open_digested(path, one, lambda _: None) as whole:
                        self._origin.fetch(one, whole, listed)
                        if not whole.is_right:
                            raise SourceFailure(
                                f"{self.source}: {one.name} is not what its source lists",
                                lasting=True,
                            )
            try:
                making.rename(ready)
            except OSError:
                if not ready.is_dir():
                    raise
                shutil.rmtree(making)  # another one has made the same meanwhile
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise
        return FetchHeads(str(ready), listed.revision)

    def _header(self, file: RemoteFile, listed: FileList) -> bytes:
        """The beginning of a file with weights; empty for kinds without a header."""
        if file.name.endswith(".gguf"):
            return self._gguf_header(file, listed)
        if not file.name.endswith(".safetensors"):
            return b""
        if file.size < LENGTH_BYTES:
            raise SourceFailure(f"{self.source}: {file.name} is no safetensors file", lasting=True)
        length = self._origin.read(file, 0, LENGTH_BYTES, listed)
        count = int.from_bytes(length, "little")
        if not 0 < count <= min(MOST_HEADER_BYTES, file.size - LENGTH_BYTES):
            raise SourceFailure(
                f"{self.source}: {file.name} is no safetensors file: its header is {count} bytes",
                lasting=True,
            )
        return length + self._origin.read(file, LENGTH_BYTES, count, listed)

    def _gguf_header(self, file: RemoteFile, listed: FileList) -> bytes:
        try:
            _, data = read_header(
                lambda begin, count: self._origin.read(file, begin, count, listed), file.size
            )
        except NoHeader as error:
            raise SourceFailure(
                f"{self.source}: {file.name} can't be read: {error}", lasting=True
            ) from error
        return data


def is_weights(file: RemoteFile) -> bool:
    """Whether a file has weights."""
    return any(fnmatch(file.name, one) for one in WEIGHTS)
