"""What the mirror knows of files and lists, on the disk: a restart forgets nothing."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec

from kvmig.mirror.facts import Facts, FileFacts, ListFacts

PART = "part"
"""The file that is written."""
MOST_BYTES = 512 << 20
"""Most bytes of all facts on the disk; the ones that were not used for the longest time go."""


class KnownFile(msgspec.Struct, frozen=True, tag="file"):
    """A file of the folder."""

    key: str
    repository: str
    facts: FileFacts


class KnownList(msgspec.Struct, frozen=True, tag="list"):
    """A file of the folder."""

    key: str
    repository: str
    facts: ListFacts


Known = KnownFile | KnownList


class FactFolder:
    """`open` it first. Its methods read and write small files."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._using = threading.Lock()
        """Held by the thread that uses what follows."""
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._total = 0

    def open(self) -> None:
        """Raises OSError."""
        (self._root / PART).unlink(missing_ok=True)
        found = [(one, one.stat()) for one in self._root.iterdir()]
        for path, stat in sorted(found, key=lambda pair: pair[1].st_mtime):
            self._sizes[path.name] = stat.st_size
            self._total += stat.st_size

    def files(self) -> Iterator[tuple[str, FileFacts]]:
        """List all files that are known, with their repositories. Raises OSError."""
        for name in list(self._sizes):
            known = self._read(name)
            if isinstance(known, KnownFile):
                yield known.repository, known.facts

    def find(self, key: str) -> Facts | None:
        """What is known by this key; damaged files are none. Raises OSError."""
        name = name_of(key)
        with self._using:
            if name not in self._sizes:
                return None
            known = self._read(name)
            if known is None or known.key != key:
                return None
            self._sizes.move_to_end(name)
            return known.facts

    def _read(self, name: str) -> Known | None:
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            known: Known = msgspec.msgpack.decode((self._root / name).read_bytes(), type=Known)
            return known
        return None

    def keep(self, key: str, repository: str, facts: Facts) -> None:
        """Raises OSError."""
        kind = KnownFile if isinstance(facts, FileFacts) else KnownList
        data = msgspec.msgpack.encode(kind(key, repository, facts))  # type: ignore[arg-type]
        name = name_of(key)
        with self._using:
            part = self._root / PART
            part.write_bytes(data)
            part.replace(self._root / name)
            self._total += len(data) - self._sizes.pop(name, 0)
            self._sizes[name] = len(data)
            while self._total > MOST_BYTES and len(self._sizes) > 1:
                oldest, size = self._sizes.popitem(last=False)
                self._total -= size
                (self._root / oldest).unlink(missing_ok=True)


def name_of(key: str) -> str:
    """The name of a key's file."""
    return blake2b(key.encode(), digest_size=16).hexdigest()
