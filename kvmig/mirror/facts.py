"""What the mirror knows of files and lists, and for whom it still holds. Pure.

A commit's files never change. What a branch stands for is asked again after a minute, and what was
known before is used while the hub is gone. A caller with a token gets only what the hub has
given for this token.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Literal

import msgspec

FRESH_S = 60.0
"""Time for which the hub's word on a branch, or on a caller, is taken."""
STALE_S = 3600.0
"""Time for which its word on a caller is taken while the hub is gone."""
MOST_ENTRIES = 200_000

Use = Literal["use", "ask"]


class FileFacts(msgspec.Struct, frozen=True):
    """A file of a revision."""

    commit: str
    etag: str
    """SHA-256, or Git's SHA-1 of a blob, in hex digits without quotes."""
    size: int
    at: float
    """Time of the hub's answer, in Unix time."""
    public: bool
    """Whether the hub gave it to a caller without a token."""

    @property
    def digest(self) -> str:
        """The digest as `RemoteFile.digest` has it."""
        return f"sha256:{self.etag}" if len(self.etag) == 64 else f"git:{self.etag}"


class ListFacts(msgspec.Struct, frozen=True):
    """The hub's answer with a list."""

    body: bytes
    link: str
    """The header that names the next page; empty: there is none."""
    commit: str
    at: float
    public: bool


Facts = FileFacts | ListFacts


class AccessBook:
    """When the hub last let which caller have which file or list: of one repository it may give
    some to everyone. Tokens are kept as keyed digests, in memory alone."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._known: OrderedDict[bytes, float] = OrderedDict()

    def caller(self, authorization: str) -> str:
        """A name for who calls with this header; empty: without a token."""
        if not authorization:
            return ""
        return blake2b(authorization.encode(), key=self._key, digest_size=16).hexdigest()

    def let_in(self, caller: str, path: str, now: float) -> None:
        """The hub has answered this caller."""
        key = self._entry(caller, path)
        self._known[key] = now
        self._known.move_to_end(key)
        while len(self._known) > MOST_ENTRIES:
            self._known.popitem(last=False)

    def shut_out(self, caller: str, path: str) -> None:
        """The hub has refused this caller."""
        self._known.pop(self._entry(caller, path), None)

    def age(self, caller: str, path: str, now: float) -> float | None:
        """Seconds since this caller was let in; None: never."""
        at = self._known.get(self._entry(caller, path))
        return None if at is None else now - at

    def _entry(self, caller: str, path: str) -> bytes:
        return blake2b(f"{caller}\0{path}".encode(), key=self._key, digest_size=16).digest()


def use_of(known: Facts | None, fixed: bool, age: float | None, now: float) -> Use:
    """Whether what is known is used, or the hub is asked. fixed: it is of a commit. age: see
    `AccessBook.age`."""
    if known is None or not (fixed or 0 <= now - known.at < FRESH_S):
        return "ask"
    return "use" if known.public or (age is not None and age < FRESH_S) else "ask"


def may_use_stale(known: Facts, age: float | None) -> bool:
    """Whether what is known is used while the hub is gone."""
    return known.public or (age is not None and age < STALE_S)
