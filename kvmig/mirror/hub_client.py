"""The hub, as the mirror calls it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import urljoin, urlsplit

import httpx

from kvmig.core.clock import TimeSource
from kvmig.mirror.addresses import FileAddress, ListAddress
from kvmig.mirror.blob_download import OpenedContent
from kvmig.mirror.blob_folder import is_digest
from kvmig.mirror.errors import HubRefusal, PlaceGone
from kvmig.mirror.facts import FileFacts, ListFacts
from kvmig.mirror.hub_transport import CHAIN, HubTransport
from kvmig.sources.hops import CallChain

TIMEOUT_S = 30.0
"""Timeout of a connection, and of each pause in an answer."""
MOST_HOPS = 5
LIST_BYTES = 64 << 20
REFUSAL_BYTES = 64 << 10
TOLD = ("content-type", "x-error-code", "x-error-message", "retry-after")
"""Headers of refusals that callers get."""
XET = "xetHash"
"""Field of a list; clients would fetch such files elsewhere."""


class HubClient:
    """Calls one hub; `close` it."""

    def __init__(self, endpoint: str, wall: TimeSource) -> None:
        """wall: Unix time."""
        self.endpoint = endpoint.rstrip("/")
        self._wall = wall
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        self._client = httpx.AsyncClient(
            transport=HubTransport(limits),
            timeout=httpx.Timeout(TIMEOUT_S, pool=None),
            follow_redirects=False,
        )

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def look_up(self, address: FileAddress, authorization: str) -> FileFacts | None:
        """What the hub says of a file; None: too little to keep it. Raises HubRefusal,
        PlaceGone."""
        url = self.endpoint + address.path
        async with self._answer("HEAD", url, authorization, {}, abroad=False) as answer:
            headers = answer.headers
            etag = headers.get("x-linked-etag") or headers.get("etag", "")
            etag = etag.removeprefix("W/").strip('"')
            size = headers.get("x-linked-size") or (
                "" if answer.has_redirect_location else headers.get("content-length", "")
            )
            commit = headers.get("x-repo-commit", "")
        if not (is_digest(etag) and size.isdecimal() and commit.isalnum()):
            return None
        return FileFacts(commit, etag, int(size), self._wall(), not authorization)

    async def read_list(self, address: ListAddress, authorization: str) -> ListFacts:
        """A list of files. Raises HubRefusal, PlaceGone."""
        url = self.endpoint + address.path
        async with self._answer("GET", url, authorization, {}, abroad=False) as answer:
            if answer.status_code != 200:
                raise PlaceGone(f"{self.endpoint} has no list at {address.path}")
            body = await _read(answer, LIST_BYTES)
            link, commit = answer.headers.get("link", ""), answer.headers.get("x-repo-commit", "")
        return ListFacts(
            await asyncio.to_thread(without_xet, body),
            link,
            commit,
            self._wall(),
            not authorization,
        )

    @asynccontextmanager
    async def open(
        self,
        address: FileAddress,
        authorization: str,
        begin: int,
        end: int | None = None,
        tag: str = "",
    ) -> AsyncIterator[OpenedContent]:
        """A file from `begin` on, or all of it. tag: of an earlier answer, whose rest is wanted.
        Raises HubRefusal, PlaceGone, also while it is read."""
        headers = {}
        if begin and tag and not tag.startswith("W/"):
            headers["if-range"] = tag
        if begin or end is not None:
            headers["range"] = f"bytes={begin}-{'' if end is None else end - 1}"
        url = self.endpoint + address.path
        async with self._answer("GET", url, authorization, headers) as answer:
            if answer.headers.get("content-encoding", "identity") != "identity":
                raise PlaceGone(f"{self.endpoint} sends a file compressed")
            came_from = first_byte(answer.status_code, answer.headers)
            yield OpenedContent(came_from, _pieces(answer), answer.headers.get("etag", ""))

    @asynccontextmanager
    async def pass_on(
        self,
        method: str,
        target: str,
        headers: list[tuple[bytes, bytes]],
        content: AsyncIterator[bytes] | None,
    ) -> AsyncIterator[httpx.Response]:
        """Pass any other call on, and its answer as it is, redirects and errors too. Raises
        PlaceGone."""
        request = self._client.build_request(
            method, self.endpoint + target, headers=headers, content=content
        )
        try:
            answer = await self._client.send(request, stream=True)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise gone(self.endpoint, error) from error
        try:
            yield answer
        finally:
            await answer.aclose()

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        url: str,
        authorization: str,
        headers: Mapping[str, str],
        *,
        abroad: bool = True,
    ) -> AsyncIterator[httpx.Response]:
        """An answer without an error. abroad: redirects with a host are followed, too; another host
        gets no token. Without, such a redirect is the answer: it describes a large file. Raises
        HubRefusal, PlaceGone."""
        first, chain = url, CallChain(url)
        for _ in range(MOST_HOPS):
            own = {**headers, "accept-encoding": "identity"}
            if authorization and same_origin(first, url):
                own["authorization"] = authorization
            try:
                async with self._client.stream(
                    method, url, headers=own, extensions={CHAIN: chain}
                ) as answer:
                    location = answer.headers.get("location", "")
                    to = urljoin(url, location)
                    leads = answer.has_redirect_location and (
                        abroad or not urlsplit(location).netloc
                    )
                    if not leads:
                        if answer.is_error:
                            raise await _refusal(answer)
                        yield answer
                        return
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise gone(url, error) from error
            if why := chain.refusal_of(to):
                raise PlaceGone(why)
            url = to
        raise PlaceGone(f"{first} leads on and on")


def gone(url: str, error: Exception) -> PlaceGone:
    """A place that doesn't answer. Its URL's query may be a secret."""
    parts = urlsplit(url)
    return PlaceGone(f"{parts.scheme}://{parts.netloc} can't be used ({type(error).__name__})")


def same_origin(first: str, url: str) -> bool:
    """Whether two URLs are of one server, which may get the same token."""
    one, other = httpx.URL(first), httpx.URL(url)
    return (one.scheme, one.host, one.port) == (other.scheme, other.host, other.port)


def first_byte(status: int, headers: Mapping[str, str]) -> int:
    """The position at which an answer with a file begins. Raises PlaceGone."""
    if status == 200:
        return 0
    if status != 206:
        raise PlaceGone(f"an answer with a file has the status {status}")
    found = re.fullmatch(r"bytes (\d{1,19})-.*", headers.get("content-range", ""))
    if found is None:
        raise PlaceGone("an answer with a part doesn't name its bytes")
    return int(found[1])


def without_xet(body: bytes) -> bytes:
    """A list without the hashes by which clients would fetch files elsewhere; anything else as it
    is."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return body
    entries = found.get("siblings") if isinstance(found, dict) else found
    for one in entries if isinstance(entries, list) else ():
        if isinstance(one, dict):
            one.pop(XET, None)
    return json.dumps(found, separators=(",", ":")).encode()


async def _pieces(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Raises PlaceGone."""
    try:
        async for piece in answer.aiter_raw():  # as they come: a slow place is known by them
            yield piece
    except httpx.HTTPError as error:
        raise gone(str(answer.url), error) from error


async def _read(answer: httpx.Response, most: int) -> bytes:
    """A whole body. Raises PlaceGone for a longer one, httpx.HTTPError."""
    body = bytearray()
    async for piece in answer.aiter_bytes():
        body += piece
        if len(body) > most:
            raise PlaceGone(f"{answer.url.host} answers with more than {most} bytes")
    return bytes(body)


async def _refusal(answer: httpx.Response) -> HubRefusal:
    try:
        body = await _read(answer, REFUSAL_BYTES)
    except (PlaceGone, httpx.HTTPError):  # its status is the answer
        body = b""
    headers = {name: answer.headers[name] for name in TOLD if name in answer.headers}
    return HubRefusal(answer.status_code, headers, body)
