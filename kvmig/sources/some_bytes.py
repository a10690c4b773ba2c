"""A few bytes of a large file, by the hub's own client."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any

from huggingface_hub.file_download import http_get

from kvmig.sources.file_list import SourceFailure
from kvmig.sources.hops import begun_at


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
