"""Bytes of files over HTTP, by the hub's own client."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any, BinaryIO, cast

from huggingface_hub import constants, set_client_factory
from huggingface_hub.file_download import http_get

from kvmig.sources.digested_file import DigestedFile
from kvmig.sources.file_list import RemoteFile, SourceFailure
from kvmig.sources.hops import begun_at
from kvmig.sources.http_client import make_client

set_client_factory(make_client)

constants.DOWNLOAD_CHUNK_SIZE = 64 << 10
"""A cut loses what came of a piece, and only whole ones count as progress: the library's own are of
10 MB, which takes minutes where files come slowly."""
constants.MAX_HTTP_DOWNLOAD_SIZE = 1 << 62
"""The library refuses files of more than 50 GB, from other servers than its hub as well."""
PLAIN_HEADERS = {"accept-encoding": "identity"}
"""Bytes as they are: a compressed answer can't be gone on with."""
LASTING_STATUSES = (400, 401, 403, 404, 410, 451)
"""Statuses that stay as they are for a while."""


class BoundedBytes(BytesIO):
    """Takes a limited number of bytes: a server may send the whole file instead."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def write(self, data: Any) -> int:
        """Raises SourceFailure."""
        if self.tell() + len(data) > self._most:
            raise SourceFailure("its server sends no parts of files", lasting=True)
        return super().write(data)


def read_range(url: str, begin: int, count: int, headers: Mapping[str, str]) -> bytes:
    """Raises SourceFailure, and what `http_get` raises."""
    into = BoundedBytes(count)
    ranged = {**headers, "Range": f"bytes={begin}-{begin + count - 1}"}
    with begun_at(url):
        http_get(url, into, headers=ranged, expected_size=count, displayed_filename="header")
    return into.getvalue()


def read_rest(url: str, file: RemoteFile, into: DigestedFile, headers: Mapping[str, str]) -> None:
    """Write what `into` lacks of a file. Raises SourceFailure, and what `http_get` raises."""
    with begun_at(url):
        http_get(
            url, cast("BinaryIO", into), resume_size=into.size, headers=dict(headers),
            expected_size=file.size, displayed_filename=file.name,
        )  # fmt: skip
