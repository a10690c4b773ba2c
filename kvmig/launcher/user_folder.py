"""A folder of the user's with a model, as it is on this disk: it may change at any time."""

from __future__ import annotations

from hashlib import file_digest
from pathlib import Path

from kvmig.sources.file_list import MOST_FILES, RemoteFile, chosen, state_of
from kvmig.sources.files_folder import FilesManifest, WholeFile
from kvmig.sources.source import ModelSource


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
