"""Paths of the hub's protocol: which calls ask for a file or a list of files. Pure."""

from __future__ import annotations

import re
from urllib.parse import unquote

import msgspec

OTHER_KINDS = "datasets|spaces|kernels"
FILE = re.compile(
    rf"/(?P<repository>(?:(?:{OTHER_KINDS})/)?[^/]+(?:/[^/]+)?)/resolve/(?P<revision>[^/]+)/(?P<name>.+)"
)
LIST = re.compile(
    rf"/api/(?P<kind>models|{OTHER_KINDS})/(?P<place>[^/]+(?:/[^/]+)?)"
    r"/(?:revision|tree)/(?P<revision>[^/]+)(?P<below>/.+)?"
)
COMMIT = re.compile(r"[0-9a-f]{40}")
MOST_CHARACTERS = 4096


class FileAddress(msgspec.Struct, frozen=True):
    """A file of a repository. All parts are quoted, as in a URL."""

    repository: str
    """`ORG/NAME` of a model; others begin with their kind, such as `datasets/`."""
    revision: str
    name: str

    @property
    def path(self) -> str:
        """The path at any hub."""
        return f"/{self.repository}/resolve/{self.revision}/{self.name}"

    @property
    def is_fixed(self) -> bool:
        """Whether its revision is a commit: what it stands for never changes."""
        return COMMIT.fullmatch(self.revision) is not None


class ListAddress(msgspec.Struct, frozen=True):
    """A list of files of a repository, or what the hub says of one of its revisions."""

    repository: str
    revision: str
    path: str
    """The path at any hub, with the query."""

    @property
    def is_fixed(self) -> bool:
        """Whether its revision is a commit."""
        return COMMIT.fullmatch(self.revision) is not None


def is_plain(path: str) -> bool:
    """Whether each part of a path is a name: the hub would take others for another path, which
    other callers may read."""
    if not path.startswith("/") or not path.isascii() or len(path) > MOST_CHARACTERS:
        return False
    known = unquote(path)
    names = known[1:].removesuffix("/").split("/") if known != "/" else []
    return known.isprintable() and not any(
        one in ("", ".", "..") or any(sign in one for sign in "\\?#") for one in names
    )


def address_of(path: str, query: str) -> FileAddress | ListAddress | None:
    """What a call asks for; None: neither a file nor a list. path: quoted, see `is_plain`."""
    if (found := FILE.fullmatch(path)) is not None:
        return FileAddress(found["repository"], found["revision"], found["name"])
    if (found := LIST.fullmatch(path)) is not None:
        kind = "" if found["kind"] == "models" else f"{found['kind']}/"
        asked = f"{path}?{query}" if query else path
        return ListAddress(f"{kind}{found['place']}", found["revision"], asked)
    return None
