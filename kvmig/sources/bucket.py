"""Files of an S3 bucket, by `s3fs`, which takes keys and the endpoint as AWS's tools do: from the
environment, or from files in the home folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec

from kvmig.sources.digested_file import DigestedFile
from kvmig.sources.file_list import (
    MOST_FILES,
    FileList,
    RemoteFile,
    SourceFailure,
    check_listed,
    state_of,
)
from kvmig.sources.source import ModelSource

PIECE_BYTES = 8 << 20


class BucketOrigin:
    """A folder of a bucket."""

    def __init__(self, source: ModelSource, files: Any = None) -> None:
        """files: a file system of fsspec's; None: S3."""
        self._source = source
        self._root = source.place
        self._errors: tuple[type[Exception], ...] = ()
        if files is None:
            from botocore.exceptions import BotoCoreError

            self._errors = (BotoCoreError,)
        self._files = fsspec.filesystem("s3") if files is None else files

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Turn errors of the AWS library, such as missing keys, into reasons."""
        try:
            yield
        except self._errors as error:
            raise SourceFailure(f"{self._source}: {error}", lasting=True) from error

    secret = ""

    def list_files(self) -> FileList:
        """See `FilesOrigin`."""
        with self._reported():
            # One more than may be: a bucket may have millions, and s3fs ends its list there.
            found = self._files.find(self._root, detail=True, max_items=MOST_FILES + 1)
        check_listed(str(self._source), len(found), MOST_FILES + 1)
        if not found:
            raise SourceFailure(f"{self._source} has no files", lasting=True)
        files = tuple(self._listed(path, one) for path, one in sorted(found.items()))
        return FileList(state_of(files), files)

    def _listed(self, path: str, found: Any) -> RemoteFile:
        tag = str(found.get("ETag") or found.get("LastModified") or "")
        return RemoteFile(path.lstrip("/").removeprefix(self._root), int(found["size"]), tag=tag)

    def fetch(self, file: RemoteFile, into: DigestedFile, listed: FileList) -> None:
        """See `FilesOrigin`."""
        path = self._root + file.name
        with self._reported(), self._files.open(path, "rb", block_size=PIECE_BYTES) as remote:
            remote.seek(into.size)
            while piece := remote.read(PIECE_BYTES):
                into.write(piece)
        if self._listed(path, self._files.info(path)) != file:
            into.truncate()
            raise SourceFailure(f"{self._source}: {file.name} has changed while it was downloaded")

    def read(self, file: RemoteFile, begin: int, count: int, listed: FileList) -> bytes:
        """See `FilesOrigin`."""
        path = self._root + file.name
        with self._reported():
            return bytes(self._files.cat_file(path, start=begin, end=begin + count))
