"""What a mirror does for a call: asks the hub where it must, and has each file downloaded once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Literal, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from kvmig.core.background import BackgroundTasks, cancel_tasks
from kvmig.core.clock import TimeSource
from kvmig.mirror.addresses import FileAddress, ListAddress
from kvmig.mirror.blob_download import BUSY, PIECE_BYTES, BlobDownload
from kvmig.mirror.blob_folder import BlobFolder
from kvmig.mirror.errors import ContentRejected, DiskRefusal, HubRefusal, PlaceGone
from kvmig.mirror.fact_folder import FactFolder
from kvmig.mirror.facts import (
    AccessBook,
    Facts,
    FileFacts,
    ListFacts,
    may_use_stale,
    use_of,
)
from kvmig.mirror.file_places import FilePlaces
from kvmig.mirror.hub_client import HubClient
from kvmig.mirror.marked_files import MarkedFiles
from kvmig.mirror.metrics import MirrorMetrics
from kvmig.mirror.peer_client import PeerClient
from kvmig.mirror.ranges import ByteRange, asked_range, way_of
from kvmig.sources.content_digest import ContentDigest
from kvmig.sources.file_list import RemoteFile

IDLE_S = 15.0
"""Time for which a download goes on without a reader: a client whose connection broke comes
back."""
LOOK_S = 1.0
SUSPECT_S = 3600.0
"""Time for which a file of which wrong content has come is sent only as a whole: a client may go on
with what it got of it."""
WRONG_S = 60.0
"""Time for which a file of which wrong content came twice is not tried again."""
SMALL_BYTES = 4 << 20
"""A file of at most this is answered once it is whole, and an error is then a status."""
DOWNLOADS = 32
"""Downloads at once."""

Kept = TypeVar("Kept", FileFacts, ListFacts)
Way = Literal["here", "coming", "passed"]

log = logging.getLogger(__name__)


class FileContent(NamedTuple):
    """A file for a call."""

    way: Way
    """The way on which it came."""
    part: ByteRange | None
    """The bytes of it that were asked for; None: all."""
    pieces: AsyncGenerator[bytes]


class HubMirror:
    """`open` it, `close` it."""

    def __init__(
        self,
        hub: HubClient,
        folder: BlobFolder,
        peers: PeerClient | None,
        metrics: MirrorMetrics,
        clock: TimeSource,
        wall: TimeSource,
    ) -> None:
        """wall: Unix time."""
        self.hub = hub
        self.folder = folder
        self.metrics = metrics
        self._peers = peers
        self._clock = clock
        self._wall = wall
        self._facts = FactFolder(folder.root / "facts")
        self._access = AccessBook(secrets.token_bytes(32))
        self._downloads: dict[str, BlobDownload] = {}
        self._tasks = BackgroundTasks("downloads of the mirror")
        self._slots = asyncio.Semaphore(DOWNLOADS)
        self._suspects = MarkedFiles(SUSPECT_S)
        self._wrong = MarkedFiles(WRONG_S)
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    def open(self) -> None:
        """Take what is on the disk. Raises ConfigError, OSError."""
        self.folder.open()
        self._facts.open()
        if self.folder.pins:
            for repository, facts in self._facts.files():
                self.folder.pin(facts.etag, repository)

    async def close(self) -> None:
        """End the downloads; what came stays."""
        await self._tasks.close()
        await self.hub.close()
        if self._peers is not None:
            await self._peers.close()
        self.folder.close()

    # -- what is known

    async def find_file(
        self, address: FileAddress, authorization: str
    ) -> tuple[FileFacts | None, bool]:
        """What a file is, for this caller, and whether the hub is gone and it is of before. None:
        the hub says too little to keep it. Raises HubRefusal, PlaceGone."""
        facts, stale = await self._find(
            FileFacts, address, authorization, lambda: self.hub.look_up(address, authorization)
        )
        if facts is not None:
            self.folder.pin(facts.etag, address.repository)
        return facts, stale

    async def find_list(
        self, address: ListAddress, authorization: str
    ) -> tuple[ListFacts | None, bool]:
        """A list, as `find_file`."""
        return await self._find(
            ListFacts, address, authorization, lambda: self.hub.read_list(address, authorization)
        )

    async def _find(
        self,
        kind: type[Kept],
        address: FileAddress | ListAddress,
        authorization: str,
        ask: Callable[[], Awaitable[Kept | None]],
    ) -> tuple[Kept | None, bool]:
        caller = self._access.caller(authorization)
        turn = self._turns.setdefault((address.path, caller), asyncio.Lock())
        async with turn:  # of many who ask at once one asks the hub
            known = await asyncio.to_thread(self._facts.find, address.path)
            now = self._wall()
            age = self._access.age(caller, address.path, now)
            if isinstance(known, kind) and use_of(known, address.is_fixed, age, now) == "use":
                return known, False
            try:
                found = await ask()
            except (HubRefusal, PlaceGone) as error:
                if shuts_out(error):
                    self._access.shut_out(caller, address.path)
                elif is_gone(error) and isinstance(known, kind) and may_use_stale(known, age):
                    self.metrics.stale.inc()
                    return known, True
                raise
            self._access.let_in(caller, address.path, now)
            if found is not None:
                await self._keep(address, found)
            return found, False

    async def _keep(self, address: FileAddress | ListAddress, facts: Facts) -> None:
        try:
            await asyncio.to_thread(self._facts.keep, address.path, address.repository, facts)
        except OSError as error:
            log.warning("what the hub says of %s is not kept: %s", address.repository, error)

    # -- files

    async def read_file(
        self, address: FileAddress, authorization: str, facts: FileFacts, part: ByteRange | None
    ) -> FileContent:
        """A file, or a part of it, once its first bytes can come. Raises HubRefusal, PlaceGone,
        ContentRejected."""
        etag, size, now = facts.etag, facts.size, self._clock()
        if facts.public:  # a token that the hub doesn't know would end the download for all
            authorization = ""
        if self._wrong.has(etag, now):
            raise ContentRejected("what the hub sends of this file is not what it lists")
        whole = self._has_whole(etag)
        download = self._downloads.get(etag)
        wrong_before = download is not None and download.rejected > 0
        if wrong_before or self._suspects.has(etag, now):
            part = None
        come = size if whole else (None if download is None else download.done)
        span = part or ByteRange(0, size)
        if way_of(part, size, come) == "pass":
            pieces = self._pass(address, authorization, facts, span, None)
            return FileContent("passed", part, pieces)
        if whole:
            return FileContent("here", part, self._read_whole(etag, span))
        if download is None:
            places = FilePlaces(address, authorization, etag, self.hub, self._peers, self.metrics)
            download = self._begin(facts, places)
        pieces = self._follow(download, address, authorization, facts, span)
        if size <= SMALL_BYTES:
            with contextlib.suppress(DiskRefusal):  # it is passed on
                await download.wait_whole()
        return FileContent("coming", part, pieces)

    def read_blob(self, etag: str, asked: str) -> tuple[int, FileContent] | None:
        """A file for another mirror, with its size; None: it is neither here nor on its way.
        asked: the Range header."""
        download = self._downloads.get(etag)
        if self._has_whole(etag):
            size = self.folder.size_of(etag)
            part = asked_range(asked, size)
            return size, FileContent(
                "here", part, self._read_whole(etag, part or ByteRange(0, size))
            )
        if download is None:
            return None
        size = download.wanted.size
        part = asked_range(asked, size)
        return size, FileContent("coming", part, _read(download, part or ByteRange(0, size)))

    def _has_whole(self, etag: str) -> bool:
        if self.folder.has(etag) and not self.folder.whole(etag).exists():
            self.folder.remove(etag)  # another program has removed it
        return self.folder.has(etag)

    async def _read_whole(self, etag: str, span: ByteRange) -> AsyncGenerator[bytes]:
        at = span.begin
        file = os.open(self.folder.whole(etag), os.O_RDONLY | os.O_CLOEXEC)
        self.folder.use(etag, self._wall())
        try:
            while at < span.end:
                count = min(PIECE_BYTES, span.end - at)
                piece = await asyncio.to_thread(os.pread, file, count, at)
                if not piece:
                    raise PlaceGone("its file was cut")
                at += len(piece)
                yield piece
        finally:
            os.close(file)
            self.folder.leave(etag)

    async def _follow(
        self,
        download: BlobDownload,
        address: FileAddress,
        authorization: str,
        facts: FileFacts,
        span: ByteRange,
    ) -> AsyncGenerator[bytes]:
        """Read behind a download, and past its end where the disk has no room for it."""
        at = span.begin
        try:
            async with contextlib.aclosing(_read(download, span)) as pieces:
                async for piece in pieces:
                    at += len(piece)
                    yield piece
        except DiskRefusal as error:
            log.warning("a file is passed on, and not kept: %s", error)
            digest = error.digest
            if at == 0:
                digest = ContentDigest(download.wanted)
            elif digest is not None and digest.size != at:
                digest = None
            passed = self._pass(address, authorization, facts, ByteRange(at, span.end), digest)
            async with contextlib.aclosing(passed) as pieces:
                async for piece in pieces:
                    yield piece

    async def _pass(
        self,
        address: FileAddress,
        authorization: str,
        facts: FileFacts,
        span: ByteRange,
        digest: ContentDigest | None,
    ) -> AsyncGenerator[bytes]:
        """A part from the hub, which is not kept. digest: of what is before it; None: that is not
        known, and nothing is verified."""
        self.metrics.passed.inc()
        digest = None if digest is None or span.end < facts.size else digest.copy()
        at = span.begin
        end = span.end if span.end < facts.size else None
        async with self.hub.open(address, authorization, at, end) as content:
            if content.begin > at:
                raise PlaceGone("the hub sends another part")
            skipped, last = at - content.begin, b""
            async for piece in content.pieces:
                skip = min(skipped, len(piece))
                skipped -= skip
                more = piece[skip : skip + span.end - at]
                at += len(more)
                if digest is not None:
                    digest.update(more)
                if last:
                    yield last
                last = more  # kept back until all is known to be right
                if at == span.end:
                    break
        if at < span.end:
            raise PlaceGone("the hub has broken off")
        if digest is not None and not digest.is_right:
            self._suspect(facts.etag, 1)
            raise ContentRejected("what the hub sends is not what it lists")
        yield last

    # -- downloads

    def _begin(self, facts: FileFacts, places: FilePlaces) -> BlobDownload:
        wanted = RemoteFile(facts.etag, facts.size, facts.digest)
        download = BlobDownload(wanted, self.folder, places, self._clock, self._wall)
        self._downloads[facts.etag] = download
        self._tasks.start(self._run(download), f"download of {facts.etag[:12]}")
        return download

    async def _run(self, download: BlobDownload) -> None:
        """Run a download as long as a client reads."""
        etag, work = download.wanted.name, None
        try:
            async with self._slots:
                work = asyncio.create_task(download.run())
                while not work.done() and not self._is_idle(download):
                    await asyncio.wait({work}, timeout=LOOK_S)
        finally:
            await cancel_tasks(work)
            del self._downloads[etag]
            if download.rejected:
                self._suspect(etag, download.rejected)
            if not download.whole and self._peers is not None:
                self._peers.drop(etag)
        if isinstance(download.failed, ContentRejected):
            self._wrong.mark(etag, self._clock())

    def _is_idle(self, download: BlobDownload) -> bool:
        return download.idle_since is not None and self._clock() - download.idle_since > IDLE_S

    def _suspect(self, etag: str, times: int) -> None:
        log.warning("wrong content came for %s: it was dropped", etag)
        self.metrics.rejected.inc(times)
        self._suspects.mark(etag, self._clock())


async def _read(download: BlobDownload, span: ByteRange) -> AsyncGenerator[bytes]:
    """Read of a download, which goes on meanwhile."""
    download.join()
    try:
        async with contextlib.aclosing(download.read(span.begin, span.end)) as pieces:
            async for piece in pieces:
                yield piece
    finally:
        download.leave()


def shuts_out(error: HubRefusal | PlaceGone) -> bool:
    """Whether the hub does not let this caller in; a file that isn't there is no such refusal."""
    if not isinstance(error, HubRefusal):
        return False
    missing = error.status == 404 and error.headers.get("x-error-code") == "EntryNotFound"
    return error.status in (401, 403, 404) and not missing


def is_gone(error: HubRefusal | PlaceGone) -> bool:
    """Whether the hub can't answer now."""
    return isinstance(error, PlaceGone) or error.status in BUSY
