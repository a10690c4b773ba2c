"""Machine code for GPUs, as it lies in libraries that are built for many of them (fat binaries).

A library holds, for each of its kernels' files, one entry a kind of GPU: machine code (a cubin), or
PTX, which the driver compiles. What a kind of GPU never loads may be overwritten with zeros: the
file keeps its size and addresses, and compresses to a fraction.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"\x50\xed\x55\xba"
HEADER = struct.Struct("<4sHHQ")
"""Magic, version, bytes of this header, bytes of all entries."""
ENTRY = struct.Struct("<HHIQ")
"""Kind, version, bytes of this header, bytes of what follows it; further fields after that."""
ARCHITECTURE_AT = 28
"""Where an entry has its architecture: 90 is of sm_90."""
PTX, CUBIN = 1, 2
KINDS = (1, 2, 4, 8, 16, 32, 64)
LEAST_ENTRY, MOST_ENTRY = 0x20, 0x400
"""Bytes of an entry's header."""


@dataclass(frozen=True)
class CodeEntry:
    """Code for one kind of GPU, at an offset in the file."""

    kind: int
    architecture: int
    begin: int
    nbytes: int


@dataclass(frozen=True)
class PruneSummary:
    """Bytes of code in a file, after `prune_file`."""

    kept: int
    zeroed: int


def entries_of(data: mmap.mmap | bytes, begin: int, end: int) -> list[CodeEntry]:
    """All entries between these offsets; none if it is no fat binary but looks like one."""
    found: list[CodeEntry] = []
    at = begin
    while at < end:
        if at + LEAST_ENTRY > end:
            return []
        kind, _, header, nbytes = ENTRY.unpack_from(data, at)
        if kind not in KINDS or not LEAST_ENTRY <= header <= MOST_ENTRY:
            return []
        (architecture,) = struct.unpack_from("<I", data, at + ARCHITECTURE_AT)
        found.append(CodeEntry(kind, architecture, at + header, nbytes))
        at += header + nbytes
    return found if at == end else []


def fat_binaries(data: mmap.mmap | bytes) -> Iterator[list[CodeEntry]]:
    """The entries of each fat binary in a file."""
    at = data.find(MAGIC)
    while at >= 0:
        found: list[CodeEntry] = []
        if at + HEADER.size <= len(data):
            _, version, header, nbytes = HEADER.unpack_from(data, at)
            begin, end = at + header, at + header + nbytes
            if version == 1 and header == HEADER.size and nbytes and end <= len(data):
                found = entries_of(data, begin, end)
        if found:
            yield found
            at = data.find(MAGIC, end)
        else:
            at = data.find(MAGIC, at + len(MAGIC))


def loaded_by(entries: list[CodeEntry], architecture: int) -> set[CodeEntry]:
    """What a GPU of this architecture loads: its own machine code, or the newest PTX for it."""
    own = {one for one in entries if one.kind == CUBIN and one.architecture == architecture}
    if own:
        return own
    older = [one for one in entries if one.kind == PTX and one.architecture <= architecture]
    newest = max((one.architecture for one in older), default=0)
    return {one for one in older if one.architecture == newest}


def prune_file(path: Path, architecture: int) -> PruneSummary:
    """Overwrite, in place, code that a GPU of this architecture wouldn't load. Raises OSError."""
    kept = zeroed = 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for entries in fat_binaries(data):
            loaded = loaded_by(entries, architecture)
            for one in entries:
                if one in loaded:
                    kept += one.nbytes
                else:
                    zeroed += one.nbytes
                    data[one.begin : one.begin + one.nbytes] = bytes(one.nbytes)
    return PruneSummary(kept, zeroed)
