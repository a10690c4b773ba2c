"""Fetches all files of one source into its folder, and goes on with what is there of them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Literal

from kvmig.sources.digested_file import DigestedFile, open_digested
from kvmig.sources.file_list import FileList, RemoteFile, SourceFailure, checked_list
from kvmig.sources.files_folder import FilesFolder, FilesManifest, WholeFile, folder_name
from kvmig.sources.messages import FetchListed, FetchWhole
from kvmig.sources.origins import FilesOrigin
from kvmig.sources.source import ModelSource

Stage = Literal["listing", "waiting", "downloading"]

AT_ONCE = 4
"""Files that are downloaded at once."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ByteCount:
    """Bytes that are on the disk, counted by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.done = 0
        self.moved = 0
        """Bytes that came, or were there and are hashed; never fewer."""

    def add(self, count: int) -> None:
        """Count more bytes, or fewer."""
        with self._lock:
            self.done += count
            self.moved += max(0, count)

    def hashed(self, count: int) -> None:
        """Count bytes of an earlier fetcher that are right so far."""
        with self._lock:
            self.moved += count


class SourceFetch:
    """One download."""

    def __init__(self, source: ModelSource, origin: FilesOrigin, folder: FilesFolder) -> None:
        self.source = source
        self._origin = origin
        self._folder = folder
        self.count = ByteCount()
        self.stage: Stage = "listing"
        self._ends = threading.Event()

    def run(self, wait_for_room: Callable[[FetchListed], None]) -> FetchWhole:
        """wait_for_room: called once the files are known; returns when there is room for them.

        Raises SourceFailure, and what the origin's library raises.
        """
        found = self._origin.list_files()
        listed = checked_list(str(self.source), found, is_copy=not self.source.is_remote)
        name = folder_name(self.source, listed.revision)
        self._folder.make()
        with self._only_one(name):
            if (whole := self._folder.manifest(name)) is None:
                self._begin(name, listed)
                done = sum(self._folder.present(name, one) for one in listed.files)
                self.count.done = done
                self.stage = "waiting"
                wait_for_room(FetchListed(name, listed.revision, listed.size, done))
                self.stage = "downloading"
                whole = self._fetch_all(name, listed)
        return FetchWhole(name, listed.revision, whole.size, whole.digest)

    @contextlib.contextmanager
    def _only_one(self, name: str) -> Iterator[None]:
        """Another fetcher, whose server has died, may not have ended yet."""
        path = self._folder.root / "locks" / name
        with path.open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise SourceFailure(f"{self.source} is fetched by another process") from error
            yield
            path.unlink(missing_ok=True)

    def _begin(self, name: str, listed: FileList) -> None:
        self._folder.begin(name, str(self.source))
        self._folder.drop_others(name, listed.files)

    def _fetch_all(self, name: str, listed: FileList) -> FilesManifest:
        with ThreadPoolExecutor(AT_ONCE, "files") as threads:
            # The largest ones first: the last one to end is then a small one.
            ordered = sorted(listed.files, key=lambda one: -one.size)
            jobs = [threads.submit(self._fetch_one, name, one, listed) for one in ordered]
            try:
                ended, _ = wait(jobs, return_when=FIRST_EXCEPTION)
                for job in ended:
                    job.result()
            except BaseException:
                self._ends.set()
                threads.shutdown(cancel_futures=True)
                raise
        files = [job.result() for job in jobs]
        manifest = FilesManifest(str(self.source), listed.revision, tuple(files))
        self._folder.publish(name, manifest)
        return manifest

    def _fetch_one(self, name: str, file: RemoteFile, listed: FileList) -> WholeFile:
        there = self._folder.part(name) / file.name
        if there.exists():  # of a fetcher before this one
            with open_digested(there, file, self._add, self.count.hashed) as found:
                if found.is_right:
                    return WholeFile(file.name, file.size, found.sha256)
                found.truncate()
            there.unlink()
        coming = self._folder.coming(name, file)
        with open_digested(coming, file, self._add, self.count.hashed) as found:
            try:
                self._origin.fetch(file, found, listed)
            except OSError as error:
                if error.errno in FULL:
                    raise self._full(file, found, error) from error
                raise
            if not found.is_right:
                size = found.size
                found.truncate()
                raise SourceFailure(
                    f"{self.source}: {file.name} is not what its source lists ({size} of"
                    f" {file.size} bytes came, SHA-256 or size differs); it was dropped",
                    lasting=True,
                )
            found.sync()
            digest = found.sha256
        self._folder.place(name, file)
        return WholeFile(file.name, file.size, digest)

    def _full(self, file: RemoteFile, found: DigestedFile, error: OSError) -> SourceFailure:
        return SourceFailure(
            f"the disk of {self._folder.root} is full ({os.strerror(error.errno or 0)}):"
            f" {file.size - found.size} bytes more are needed for {file.name} alone; what came is"
            " kept"
        )

    def _add(self, count: int) -> None:
        """Count bytes. Raises SourceFailure where another file has failed: this one ends, too."""
        self.count.add(count)
        if self._ends.is_set() and count > 0:
            raise SourceFailure(f"{self.source}: another file has failed")


def free_bytes(root: Path) -> int:
    """Free bytes of the disk. Raises OSError."""
    found = os.statvfs(root)
    return found.f_bavail * found.f_frsize
