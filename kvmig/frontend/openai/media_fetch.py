"""Fetches what a client's URL names, by `MediaRules`, within a time and a size."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from http import HTTPStatus

import aiohttp
from yarl import URL

from kvmig.frontend.media_rules import MediaRefused, MediaRules

logger = logging.getLogger(__name__)

MOST_REDIRECTS = 3
CHUNK = 1 << 16
MOST_BYTES = 64 << 20
USUAL_S = 30.0
NOT_FETCHED = (
    "the media URL could not be fetched: it must answer 200, from a public address, in time and"
    " with no more bytes than are allowed"
)
"""One error message for all: a client learns nothing of hosts and ports."""
_REDIRECTS = {
    HTTPStatus.MOVED_PERMANENTLY, HTTPStatus.FOUND, HTTPStatus.SEE_OTHER,
    HTTPStatus.TEMPORARY_REDIRECT, HTTPStatus.PERMANENT_REDIRECT,
}  # fmt: skip


async def fetch_media(
    rules: MediaRules,
    url: str,
    *,
    timeout_s: float | None = None,
    redirects: int = MOST_REDIRECTS,
    most_bytes: int | None = None,
    count: Callable[[int], None] = lambda size: None,
) -> bytes:
    """The bytes behind `url`. Raises MediaRefused, and what `count` raises.

    timeout_s: for all of it; most_bytes: None: what is usual. count: gets each part's size
    before it is kept.
    """
    try:
        async with asyncio.timeout(timeout_s or USUAL_S):
            return await _follow(rules, URL(url), redirects, most_bytes or MOST_BYTES, count)
    except MediaRefused:
        raise
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, UnicodeError) as error:
        logger.info("a media URL was not fetched: %r", error)
        raise MediaRefused(NOT_FETCHED) from None


async def _follow(
    rules: MediaRules, url: URL, redirects: int, most_bytes: int, count: Callable[[int], None]
) -> bytes:
    for _ in range(redirects + 1):
        rules.check_url(url.scheme, url.host)
        found = await _get(rules, url, most_bytes, count)
        if isinstance(found, bytes):
            return found
        url = url.join(found)
    raise MediaRefused(NOT_FETCHED)


async def _get(
    rules: MediaRules, url: URL, most_bytes: int, count: Callable[[int], None]
) -> bytes | URL:
    """The body, or where it is said to be."""
    host = url.host or ""

    def connect(info: aiohttp.AddrInfoType) -> socket.socket:
        """Make a socket for a checked address: a name can't change its meaning by then."""
        family, kind, protocol, _, address = info
        if not rules.allows_address(host, str(address[0])):
            raise OSError(f"{host} has the address {address[0]}, which is not for clients")
        return socket.socket(family, kind, protocol)

    connector = aiohttp.TCPConnector(
        socket_factory=connect, use_dns_cache=False, force_close=True, limit=1
    )
    # No proxy of the environment: whoever is connected to is who is judged.
    async with (
        aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"accept-encoding": "identity", "user-agent": "kvmig"},
            trust_env=False,
        ) as session,
        session.get(url, allow_redirects=False) as answer,
    ):
        if answer.status in _REDIRECTS and "location" in answer.headers:
            return URL(answer.headers["location"])
        if answer.status != HTTPStatus.OK or (answer.content_length or 0) > most_bytes:
            raise MediaRefused(NOT_FETCHED)
        body = bytearray()
        async for part in answer.content.iter_chunked(CHUNK):
            count(len(part))
            body += part
            if len(body) > most_bytes:
                raise MediaRefused(NOT_FETCHED)
        return bytes(body)
