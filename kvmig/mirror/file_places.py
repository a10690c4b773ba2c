"""The places of a file's content: another mirror that has it, or the hub."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvmig.mirror.addresses import FileAddress
from kvmig.mirror.blob_download import OpenedContent
from kvmig.mirror.hub_client import HubClient
from kvmig.mirror.metrics import MirrorMetrics
from kvmig.mirror.peer_client import PeerClient


class FilePlaces:
    """The places of one caller's file. Its token goes to the hub only. See `ContentPlaces`."""

    def __init__(
        self,
        address: FileAddress,
        authorization: str,
        etag: str,
        hub: HubClient,
        peers: PeerClient | None,
        metrics: MirrorMetrics,
    ) -> None:
        self._address = address
        self._authorization = authorization
        self._etag = etag
        self._hub = hub
        self._peers = peers
        self._metrics = metrics
        self._failed: list[str] = []
        self._tag = ""

    @asynccontextmanager
    async def open(self, begin: int, *, hub_only: bool) -> AsyncIterator[OpenedContent]:
        """See `ContentPlaces`."""
        holder = ""
        if self._peers is not None and not hub_only:
            holder = await self._peers.find_holder(self._etag, self._failed)
        if holder and self._peers is not None:
            self._failed.append(holder)  # it is asked once: what comes a second time is the rest
            self._metrics.downloads.labels("peer").inc()
            async with self._peers.open(holder, self._etag, begin) as content:
                yield OpenedContent(content.begin, self._counted("peer", content.pieces))
            return
        self._metrics.downloads.labels("hub").inc()
        async with self._hub.open(
            self._address, self._authorization, begin, tag=self._tag
        ) as content:
            self._tag = content.tag
            yield OpenedContent(content.begin, self._counted("hub", content.pieces))

    async def _counted(self, place: str, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        count = self._metrics.downloaded_bytes.labels(place)
        async for piece in pieces:
            count.inc(len(piece))
            yield piece
