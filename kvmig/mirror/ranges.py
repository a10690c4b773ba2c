"""Parts of files that calls ask for. Pure."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")
SMALL_BYTES = 16 << 20
"""A part of at most this, of a file that isn't here, is passed on: it may be a header, and the
whole file is not wanted for it."""
FAR_BYTES = 64 << 20
"""A part that begins so far behind what has come is passed on: its client would not wait."""

Way = Literal["here", "pass"]


class ByteRange(NamedTuple):
    """The bytes from `begin` up to, without, `end`."""

    begin: int
    end: int


def asked_range(header: str, size: int) -> ByteRange | None:
    """The part that a Range header asks for; None: all, also for what isn't understood. An empty
    one can't be satisfied."""
    found = RANGE.fullmatch(header.strip())
    if found is None or found[0] == "bytes=-":
        return None
    first, last = found.groups()
    if not first:
        return ByteRange(max(0, size - int(last)), size)
    begin = int(first)
    end = min(int(last) + 1, size) if last else size
    if last and int(last) < begin:
        return None
    return ByteRange(begin, max(begin, end)) if begin < size else ByteRange(size, size)


def way_of(part: ByteRange | None, size: int, come: int | None) -> Way:
    """Whether a part is read from the file here, which is downloaded for it, or is passed on.

    come: bytes of it that are here, all of them once it is whole; None: it isn't begun.
    """
    if part is None or come == size:
        return "here"
    if come is None:
        length = part.end - part.begin
        return "pass" if part.end < size and length <= SMALL_BYTES else "here"
    return "pass" if part.begin > come + FAR_BYTES else "here"
