"""Messages between a fetcher and its server: JSON, a line each."""

from __future__ import annotations

import msgspec

from kvmig.core.secret import SecretStruct


class FetchLaunch(SecretStruct, frozen=True, kw_only=True):
    """The first line to a fetcher: what to fetch, and where to. A second line, empty, allows it to
    download; the end of its stdin ends it."""

    source: str
    root: str
    """The folder of all models' files."""
    endpoint: str = ""
    """The hub's address; empty: as the environment has it (HF_ENDPOINT)."""
    heads: bool = False
    """Whether to fetch no weights, but their headers (see `kvmig.sources.heads`)."""


class FetchListed(msgspec.Struct, frozen=True, tag="Listed"):
    """The files are known. The fetcher waits until there is room."""

    folder: str
    revision: str
    size: int
    done: int
    """Bytes that are on the disk already."""


class FetchProgress(msgspec.Struct, frozen=True, tag="Progress"):
    """The bytes that are on the disk; once a second at least."""

    done: int


class FetchWhole(msgspec.Struct, frozen=True, tag="Whole"):
    """The last report: all files are there, and right."""

    folder: str
    revision: str
    size: int
    digest: str


class FetchHeads(msgspec.Struct, frozen=True, tag="Heads"):
    """The last report where only heads were wanted: they are in this folder."""

    folder: str
    revision: str


class FetchFailed(msgspec.Struct, frozen=True, tag="Failed"):
    """The last report: it doesn't work; what came stays on the disk."""

    why: str
    lasting: bool = False
    """Whether a try in a few seconds would end alike."""


FetchReport = FetchListed | FetchProgress | FetchWhole | FetchHeads | FetchFailed


def report_of(line: bytes) -> FetchReport:
    """Raises msgspec.DecodeError."""
    report: FetchReport = msgspec.json.decode(line, type=FetchReport)
    return report
