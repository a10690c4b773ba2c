"""The other mirrors of a cluster, as a mirror calls them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx

from kvmig.core.clock import TimeSource
from kvmig.mirror.blob_download import OpenedContent
from kvmig.mirror.hub_client import first_byte, gone
from kvmig.mirror.peers import HolderBook, PeerBook

PEER = "x-kvmig-peer"
"""Header with what only mirrors of the cluster know."""
HOLDER, BLOB = "/-/holder/", "/-/blob/"
ASK_S = 5.0
"""Timeout of a question to another mirror."""
READ_S = 70.0
"""Timeout of a pause in a file from another mirror, which may wait for the hub itself."""


class PeerClient:
    """`close` it."""

    def __init__(self, book: PeerBook, holders: HolderBook, word: str, clock: TimeSource) -> None:
        """word: what only mirrors of the cluster know."""
        self._book = book
        self._holders = holders
        self._clock = clock
        self._client = httpx.AsyncClient(
            headers={PEER: word},
            timeout=httpx.Timeout(ASK_S, read=READ_S, pool=None),
            trust_env=False,
        )

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def find_holder(self, etag: str, failed: Sequence[str]) -> str:
        """A mirror that has a file; empty: this one is to download it. failed: mirrors from which
        it could not be had."""
        for owner in self._book.owners(etag, self._clock()):
            if owner == self._book.own:
                break
            try:
                answer = await self._client.get(
                    owner + HOLDER + etag,
                    params={"asker": self._book.own, "failed": list(failed)},
                    timeout=ASK_S,
                )
                holder = answer.text.strip() if answer.status_code == 200 else None
            except (httpx.HTTPError, httpx.InvalidURL):
                holder = None
            if holder is None or (holder and holder not in self._book.others):
                self._book.fail(owner, self._clock())
                continue
            self._book.answer(owner)
            return holder
        return self._holders.find(etag, self._book.own, failed, self._clock())

    def drop(self, etag: str) -> None:
        """Forget that this mirror downloads a file."""
        self._holders.drop(etag, self._book.own)

    @asynccontextmanager
    async def open(self, holder: str, etag: str, begin: int) -> AsyncIterator[OpenedContent]:
        """A file of another mirror, from `begin` on. Raises PlaceGone, also while it is read."""
        headers = {"range": f"bytes={begin}-"} if begin else {}
        try:
            async with self._client.stream("GET", holder + BLOB + etag, headers=headers) as answer:
                came_from = first_byte(answer.status_code, answer.headers)
                yield OpenedContent(came_from, _pieces(answer))
        except httpx.ConnectError as error:
            self._book.fail(holder, self._clock())
            raise gone(holder, error) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise gone(holder, error) from error


async def _pieces(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Raises PlaceGone."""
    try:
        async for piece in answer.aiter_raw():
            yield piece
    except httpx.HTTPError as error:
        raise gone(str(answer.url), error) from error
