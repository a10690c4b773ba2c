"""The folder of models' files: `part/` while they are fetched, `whole/` once they are right.

A folder gets into `whole/` by one rename, after all of its files were compared with their digests,
and out of it by one as well; nothing in it ever changes.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from hashlib import blake2b, sha256
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvmig.core.open_files import lacks_descriptor
from kvmig.core.read_progress import note_path
from kvmig.sources.file_list import RemoteFile
from kvmig.sources.source import ModelSource

MANIFEST = ".kvmig/manifest.json"
COMING = ".kvmig/coming"
SOURCE = ".kvmig/source"
SERVER_LOCK = "fleet.lock"
"""The lock of the fleet's server that downloads into the folder."""


class WholeFile(msgspec.Struct, frozen=True):
    """A file of a whole model."""

    name: str
    size: int
    sha256: str


class FilesManifest(msgspec.Struct, frozen=True):
    """What is in a whole folder."""

    source: str
    revision: str
    files: tuple[WholeFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(one.size for one in self.files)

    @property
    def digest(self) -> str:
        """SHA-256 of names and digests of all files."""
        lines = sorted(f"{one.sha256}  {one.name}\n" for one in self.files)
        return sha256("".join(lines).encode()).hexdigest()


class BegunFolder(NamedTuple):
    """What came of a download before."""

    source: str
    size: int


def folder_name(source: ModelSource, revision: str) -> str:
    """The name of the folder for one revision of a source."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", source.place).strip("-.")[-80:]
    own = msgspec.structs.replace(source, revision="")
    digest = blake2b(f"{own}\0{revision}".encode(), digest_size=6).hexdigest()
    return f"{plain}-{digest}"


class FilesFolder:
    """The folder of all models' files."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def make(self) -> None:
        """Raises OSError."""
        for kind in ("", "part", "whole", "gone", "locks", "heads"):
            (self.root / kind).mkdir(mode=0o700, parents=True, exist_ok=True)

    def whole(self, name: str) -> Path:
        """The folder that a model starts from."""
        return self.root / "whole" / name

    def owns(self, folder: str) -> bool:
        """Whether a model's folder is one of these."""
        return Path(folder).parent == self.root / "whole"

    def part(self, name: str) -> Path:
        """The folder while its files come."""
        return self.root / "part" / name

    def heads(self, name: str) -> Path:
        """A folder with the heads of files, from which no model starts."""
        return self.root / "heads" / name

    def coming(self, name: str, file: RemoteFile) -> Path:
        """A file that is not right yet, by its content: another one's bytes are not used."""
        return self.part(name) / COMING / file.key

    def begin(self, name: str, source: str) -> None:
        """Make the folder in which files of a source come. Raises OSError."""
        (self.part(name) / COMING).mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.part(name) / SOURCE).write_text(source)

    def begun(self) -> dict[str, BegunFolder]:
        """The folders of downloads that have not ended well, by name. Raises OSError."""
        found = {}
        for part in (self.root / "part").iterdir():
            note_path(part)
            with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
                source = (part / SOURCE).read_text()
                sizes = [one.stat().st_size for one in part.rglob("*") if one.is_file()]
                found[part.name] = BegunFolder(source, sum(sizes) - len(source.encode()))
        return found

    def drop_others(self, name: str, files: tuple[RemoteFile, ...]) -> None:
        """Remove what was begun of files that are no more listed. Raises OSError."""
        keys = {one.key for one in files}
        for path in (self.part(name) / COMING).iterdir():
            if path.name not in keys:
                path.unlink()

    def present(self, name: str, file: RemoteFile) -> int:
        """Bytes of a file that are on the disk."""
        for path in (self.part(name) / file.name, self.coming(name, file)):
            with contextlib.suppress(FileNotFoundError):
                return min(path.stat().st_size, file.size)
        return 0

    def place(self, name: str, file: RemoteFile) -> None:
        """A file is right: give it its name. Raises OSError."""
        into = self.part(name) / file.name
        into.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.coming(name, file).replace(into)

    def publish(self, name: str, manifest: FilesManifest) -> None:
        """Make the folder whole, once its files are right. Raises OSError."""
        part = self.part(name)
        wanted = {one.name for one in manifest.files}
        for path in sorted(part.rglob("*"), reverse=True):  # files before their folders
            inside = str(path.relative_to(part))
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    path.rmdir()
            elif inside not in wanted:
                path.unlink()
        written = part / MANIFEST
        written.parent.mkdir(mode=0o700, exist_ok=True)
        with written.open("wb") as file:
            file.write(msgspec.json.encode(manifest))
            file.flush()
            os.fsync(file.fileno())
        sync_folder(part)
        self._clear(self.whole(name))  # it may be there with files that are gone or cut
        part.rename(self.whole(name))
        sync_folder(self.root / "whole")

    def manifest(self, name: str) -> FilesManifest | None:
        """The manifest of a whole folder whose files are all there; None: it isn't whole. Raises
        OSError where this process has no file descriptor free to look."""
        folder = self.whole(name)
        note_path(folder)
        try:
            found = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=FilesManifest)
            sizes = all((folder / one.name).stat().st_size == one.size for one in found.files)
        except (OSError, msgspec.DecodeError) as error:
            if lacks_descriptor(error):
                raise
            return None
        return found if sizes else None

    def remove(self, name: str) -> None:
        """Remove what is there of it, whole or in part. Raises OSError."""
        for path in (self.whole(name), self.part(name)):
            self._clear(path)

    def _clear(self, path: Path) -> None:
        away = self.root / "gone" / f"{path.name}-{secrets.token_hex(4)}"
        try:
            path.rename(away)
        except FileNotFoundError:
            return
        remove_tree(away)

    def names(self) -> Iterator[str]:
        """The names of all folders, whole or in part."""
        found = {path.name for kind in ("part", "whole") for path in (self.root / kind).iterdir()}
        yield from sorted(found)

    def sweep(self) -> None:
        """Remove what an interrupted removal has left, and heads. Raises OSError."""
        note_path(self.root)
        for kind in ("gone", "heads"):
            for path in (self.root / kind).iterdir():
                remove_tree(path)


def remove_tree(folder: Path) -> None:
    """Remove a folder with all that is in it, file by file. Raises OSError."""
    for path in list(folder.rglob("*")):
        note_path(path)
        if path.is_symlink() or not path.is_dir():
            path.unlink()
    shutil.rmtree(folder)


def sync_folder(path: Path) -> None:
    """Have the names in it on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
