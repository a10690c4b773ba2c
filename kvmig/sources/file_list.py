"""The files of a model as their place lists them, and which of them are fetched. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from hashlib import blake2b
from pathlib import PurePosixPath

import msgspec

from kvmig.core.errors import KvmigError

MOST_FILES = 10_000
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
OTHER_FOLDERS = ("onnx", "openvino", "coreml", "original", "metal", "tensorrt", ".git", ".cache")
"""Folders with the same weights for other programs."""
OTHER_KINDS = (
    "*.h5", "*.msgpack", "*.ot", "*.onnx", "*.onnx_data", "*.tflite", "*.mlmodel", "*.ckpt.index",
    "tf_model*", "flax_model*", "rust_model*", ".gitattributes", ".gitignore",
)  # fmt: skip
"""Files that no engine of kvmig reads."""
BESIDE_SAFETENSORS = ("pytorch_model*", "consolidated*.pth", "*.gguf")
"""The same weights once more, where there are safetensors."""


class SourceFailure(KvmigError):
    """A model's files can't be had now; the message is for people.

    lasting: a try in a few seconds would end alike.
    """

    def __init__(self, sentence: str, *, lasting: bool = False) -> None:
        super().__init__(sentence)
        self.lasting = lasting


class RemoteFile(msgspec.Struct, frozen=True):
    """A file at its place."""

    name: str
    """The path within the model's folder."""
    size: int
    digest: str = ""
    """`sha256:` or `git:` (a blob's SHA-1) and hex digits; empty: the place has none."""
    tag: str = ""
    """What changes with its content where there is no digest, such as an ETag."""

    @property
    def key(self) -> str:
        """A short name for this content of this file."""
        whole = "\0".join((self.name, str(self.size), self.digest, self.tag))
        return blake2b(whole.encode(), digest_size=16).hexdigest()


class FileList(msgspec.Struct, frozen=True):
    """What a place has of a model."""

    revision: str
    """The commit; where a place has none, a name for this state of all files."""
    files: tuple[RemoteFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(one.size for one in self.files)


def state_of(files: Iterable[RemoteFile]) -> str:
    """A name for the state of files at a place without commits."""
    keys = sorted(one.key for one in files)
    return blake2b("".join(keys).encode(), digest_size=20).hexdigest()


def checked_list(source: str, found: FileList, *, is_copy: bool = False) -> FileList:
    """The files that are fetched. is_copy: of a folder of the user's, in which there may be what
    the engine chooses from, or no weights. Raises SourceFailure."""
    check_count(source, len(found.files))
    for one in found.files:
        check_name(source, one.name)
        if one.size < 0:
            raise SourceFailure(f"{source} lists {one.name} with {one.size} bytes", lasting=True)
    files = chosen(found.files)
    _check_apart(source, [one.name for one in files])
    if is_copy:
        return msgspec.structs.replace(found, files=files)
    weights = [one for one in files if _matches(one.name, WEIGHTS)]
    if not weights:
        raise SourceFailure(
            f"{source} has no file with weights ({', '.join(WEIGHTS)})", lasting=True
        )
    ggufs = [one.name for one in files if one.name.endswith(".gguf")]
    if len(ggufs) > 1 and len(ggufs) == len(weights):
        raise SourceFailure(
            f"{source} has {len(ggufs)} GGUF files, one of which must be chosen: fetch it with `hf"
            " download` and use path:FOLDER",
            lasting=True,
        )
    return msgspec.structs.replace(found, files=files)


def check_count(source: str, count: int) -> None:
    """Raises SourceFailure for more files than a model has."""
    if count > MOST_FILES:
        raise SourceFailure(
            f"{source} has {count} files, at most {MOST_FILES} are fetched", lasting=True
        )


def check_listed(source: str, count: int, most: int) -> None:
    """Raises SourceFailure for a list that its place ends at this many files: there may be more."""
    if count >= most:
        raise SourceFailure(
            f"{source} has {most} files or more, fewer are fetched: name a folder with one model",
            lasting=True,
        )


def _check_apart(source: str, names: Sequence[str]) -> None:
    """Raises SourceFailure where two files would have one place on the disk."""
    folders = {str(above) for one in names for above in PurePosixPath(one).parents}
    known: set[str] = set()
    for one in names:
        if one in known or one in folders:
            what = "twice" if one in known else "as a file and as a folder"
            raise SourceFailure(f"{source} lists {one!r:.150} {what}", lasting=True)
        known.add(one)


def check_name(source: str, name: str) -> None:
    """Raises SourceFailure for a name that would leave the model's folder, or hide in it."""
    path = PurePosixPath(name)
    plain = name.isprintable() and "\\" not in name and str(path) == name and len(name) < 1024
    sound = plain and path.parts and all(len(one.encode()) < 256 for one in path.parts)
    if not sound or path.is_absolute() or ".." in path.parts or path.parts[0] == ".kvmig":
        raise SourceFailure(f"{source} lists a file {name!r:.150}, which is refused", lasting=True)


def chosen(files: Sequence[RemoteFile]) -> tuple[RemoteFile, ...]:
    """Leave out what is there for other programs, or twice."""
    kept = [one for one in files if not _for_others(one.name)]
    if any(one.name.endswith(".safetensors") for one in kept):
        kept = [one for one in kept if not _matches(one.name, BESIDE_SAFETENSORS)]
    if any(fnmatch(one.name, "model*.safetensors") for one in kept):
        kept = [one for one in kept if not fnmatch(one.name, "consolidated*")]
    return tuple(kept)


def _for_others(name: str) -> bool:
    folder, slash, _ = name.partition("/")
    return (bool(slash) and folder in OTHER_FOLDERS) or _matches(
        name.rpartition("/")[2], OTHER_KINDS
    )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, one) for one in patterns)
