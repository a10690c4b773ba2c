"""Files of a web server: one, or those that a folder's page links to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from html.parser import HTMLParser
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import httpx2
from huggingface_hub.errors import HfHubHTTPError

from kvmig.sources.digested_file import DigestedFile
from kvmig.sources.downloads import LASTING_STATUSES, PLAIN_HEADERS, read_range, read_rest
from kvmig.sources.file_list import (
    MOST_FILES,
    FileList,
    RemoteFile,
    SourceFailure,
    check_name,
    state_of,
)
from kvmig.sources.hops import begun_at
from kvmig.sources.http_client import CheckedTransport
from kvmig.sources.source import ModelSource

TIMEOUT_S = 30.0
PAGE_BYTES = 4 << 20
MOST_FOLDERS = 1000
"""Pages that are read for a source."""
DEEPEST = 3
"""Folders below the first one."""


class FolderPage(HTMLParser):
    """The links of a page, as web servers make one for a folder."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take the target of a link."""
        if tag == "a":
            self.links += [value for name, value in attrs if name == "href" and value]


def links_below(page: str, text: str) -> list[str]:
    """URLs one step below a page, each once."""
    parser = FolderPage()
    parser.feed(text)
    found: list[str] = []
    for link in parser.links:
        with suppress(ValueError):  # it is no URL
            found.append(urldefrag(urljoin(page, link))[0])
    return [
        one
        for one in dict.fromkeys(found)
        if one.startswith(page)
        and one != page
        and not urlsplit(one).query
        and "/" not in one.removeprefix(page).rstrip("/")
    ]


class WebOrigin:
    """A folder, or one file."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        url = source.place
        self._base = url if url.endswith("/") else url.rpartition("/")[0] + "/"
        self._urls: dict[str, str] = {}
        """URLs by the files' names."""
        self._folders = 0

    secret = ""

    def list_files(self) -> FileList:
        """See `FilesOrigin`."""
        with _client(self._source.place) as client:
            url = self._source.place
            self._folders = 0
            urls = self._below(client, url, 0) if url.endswith("/") else [url]
            files = tuple(self._file(client, one) for one in urls)
        return FileList(state_of(files), files)

    def _below(self, client: httpx2.Client, page: str, depth: int) -> list[str]:
        found: list[str] = []
        self._folders += 1
        if self._folders > MOST_FOLDERS:
            raise SourceFailure(
                f"{self._source} has more than {MOST_FOLDERS} folders", lasting=True
            )
        with _answer(client, "GET", page) as answer:
            text = bytearray()
            for piece in answer.iter_bytes():
                text += piece
                if len(text) > PAGE_BYTES:
                    raise SourceFailure(f"{page} is no folder's page: it is too long", lasting=True)
        for link in links_below(page, text.decode(errors="replace")):
            if not link.endswith("/"):
                found.append(link)
            elif depth < DEEPEST:
                found += self._below(client, link, depth + 1)
            if len(found) > MOST_FILES:
                raise SourceFailure(f"{self._source} has too many files", lasting=True)
        return found

    def _file(self, client: httpx2.Client, url: str) -> RemoteFile:
        name = unquote(url.removeprefix(self._base))
        check_name(str(self._source), name)
        with _answer(client, "HEAD", url) as answer:
            size = answer.headers.get("content-length", "")
            tag = answer.headers.get("etag") or answer.headers.get("last-modified") or ""
        if not size.isdecimal():
            raise SourceFailure(f"{url} says no size", lasting=True)
        self._urls[name] = url
        return RemoteFile(name, int(size), tag=tag)

    def fetch(self, file: RemoteFile, into: DigestedFile, listed: FileList) -> None:
        """See `FilesOrigin`."""
        url, headers = self._urls[file.name], dict(PLAIN_HEADERS)
        if not file.tag:
            into.truncate()  # whether the rest is of the same content would not show
        if into.size and file.tag and not file.tag.startswith("W/"):
            headers["if-range"] = file.tag
        try:
            read_rest(url, file, into, headers)
        except HfHubHTTPError as error:
            raise _failure(url, error.response.status_code) from error
        with _client(url) as client:
            if self._file(client, url) != file:
                into.truncate()
                raise SourceFailure(f"{url} has changed while it was downloaded")

    def read(self, file: RemoteFile, begin: int, count: int, listed: FileList) -> bytes:
        """See `FilesOrigin`."""
        url = self._urls[file.name]
        try:
            return read_range(url, begin, count, PLAIN_HEADERS)
        except HfHubHTTPError as error:
            raise _failure(url, error.response.status_code) from error


@contextmanager
def _client(url: str) -> Iterator[httpx2.Client]:
    """A client for calls that begin at this URL's host."""
    with (
        begun_at(url),
        httpx2.Client(
            transport=CheckedTransport(),
            follow_redirects=True,
            timeout=TIMEOUT_S,
            headers=PLAIN_HEADERS,
        ) as client,
    ):
        yield client


@contextmanager
def _answer(client: httpx2.Client, method: str, url: str) -> Iterator[httpx2.Response]:
    """An answer without an error, closed at the end of the block. Raises SourceFailure."""
    with client.stream(method, url) as answer:
        if answer.is_error:
            raise _failure(url, answer.status_code)
        yield answer


def _failure(url: str, status: int) -> SourceFailure:
    return SourceFailure(f"{url} answered {status}", lasting=status in LASTING_STATUSES)
