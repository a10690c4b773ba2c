"""One download of a file, behind which any number of callers read.

What they read is not verified yet, so the last byte is kept back until all of it is: no client
gets the whole of a file that is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

from kvmig.core.clock import TimeSource
from kvmig.core.errors import KvmigError
from kvmig.mirror.blob_folder import BlobFolder
from kvmig.mirror.errors import ContentRejected, DiskRefusal, HubRefusal, PlaceGone, PlaceTooSlow
from kvmig.sources.digested_file import DigestedFile, open_digested
from kvmig.sources.fetch import FULL
from kvmig.sources.file_list import RemoteFile, SourceFailure
from kvmig.sources.speed_floor import SpeedFloor

PIECE_BYTES = 1 << 20
STALL_S = 60.0
"""Longest wait of a reader for the next byte."""
TRIES = 5
"""Tries in a row without a byte in between, or with too few."""
FIRST_PAUSE_S = 0.2
LAST_PAUSE_S = 5.0
BUSY = (408, 429, 500, 502, 503, 504)
"""Statuses after which the hub is asked again."""

Value = TypeVar("Value")


class OpenedContent(NamedTuple):
    """A file at its place, from `begin` on."""

    begin: int
    pieces: AsyncIterator[bytes]
    tag: str = ""
    """What its place gave as the ETag of these bytes."""


class ContentPlaces(Protocol):
    """Places where the content of a file can be read: other mirrors, and the hub."""

    def open(self, begin: int, *, hub_only: bool) -> AbstractAsyncContextManager[OpenedContent]:
        """The content, from there on or from 0. Raises PlaceGone, HubRefusal."""
        ...


async def finish(call: Callable[..., Value], *args: Any) -> Value:
    """Run `call` in a thread, to its end in any case: what it uses is closed afterwards."""
    running = asyncio.ensure_future(asyncio.to_thread(call, *args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        running.exception()  # nobody waits for it
        raise


class BlobDownload:
    """`run` it as a task. Readers `join` it, `read`, and `leave`."""

    def __init__(
        self,
        wanted: RemoteFile,
        folder: BlobFolder,
        places: ContentPlaces,
        clock: TimeSource,
        wall: TimeSource,
    ) -> None:
        """wanted: its name is its tag. wall: Unix time."""
        self.wanted = wanted
        self.done = 0
        """Bytes that are on the disk."""
        self.whole = False
        self.rejected = 0
        """How often what came was wrong."""
        self.failed: KvmigError | None = None
        self.idle_since: float | None = clock()
        """Time since which there is no reader; None: there is one."""
        self._folder = folder
        self._places = places
        self._clock = clock
        self._wall = wall
        self._readers = 0
        self._changed = asyncio.Event()

    # -- readers

    def join(self) -> None:
        """A reader comes."""
        self._readers += 1
        self.idle_since = None

    def leave(self) -> None:
        """A reader has gone."""
        self._readers -= 1
        if not self._readers:
            self.idle_since = self._clock()

    @property
    def readable(self) -> int:
        """Bytes that readers may get."""
        return self.done if self.whole else min(self.done, self.wanted.size - 1)

    async def wait_whole(self) -> None:
        """Raises what the download fails with."""
        self.join()
        try:
            while not self.whole:
                await self._wait()
        finally:
            self.leave()

    async def read(self, begin: int, end: int) -> AsyncGenerator[bytes]:
        """Read a part as it comes. Raises what the download fails with, once what is there is
        read, and ContentRejected where some of what was read is wrong."""
        at, tries = begin, self.rejected
        file = -1
        try:
            while at < end:
                if self.rejected != tries:
                    if at > begin:
                        raise ContentRejected("what came was wrong; it was not kept")
                    tries = self.rejected
                ready = min(end, self.readable)
                if at >= ready:
                    await self._wait()
                    continue
                if file < 0:
                    file = self._open()
                count = min(PIECE_BYTES, ready - at)
                piece = await asyncio.to_thread(os.pread, file, count, at)
                if self.rejected == tries:
                    if not piece:
                        raise PlaceGone("its file was cut")
                    yield piece
                    at += len(piece)
        finally:
            if file >= 0:
                os.close(file)

    def _open(self) -> int:
        """A descriptor. Raises DiskRefusal."""
        for path in (self._folder.coming(self.wanted.name), self._folder.whole(self.wanted.name)):
            with contextlib.suppress(FileNotFoundError):
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        raise DiskRefusal("what came was dropped")

    async def _wait(self) -> None:
        """Wait for the next change. Raises what the download fails with, and PlaceGone."""
        if self.failed is not None:
            raise self.failed
        try:
            async with asyncio.timeout(STALL_S):
                await self._changed.wait()
        except TimeoutError as error:
            raise PlaceGone(f"nothing came for {STALL_S:g} s") from error

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # -- the writer

    async def run(self) -> None:
        """Download; `whole` or `failed` is set then."""
        try:
            await self._run()
            self.whole = True
        except KvmigError as error:
            self.failed = error
        except OSError as error:
            self.failed = DiskRefusal(str(error))
        except BaseException:
            self.failed = PlaceGone("the download has ended")
            raise
        finally:
            self._tell()

    async def _run(self) -> None:
        name, size = self.wanted.name, self.wanted.size
        if why := await finish(self._folder.make_room, name, size):
            raise DiskRefusal(why)
        drop = False
        try:
            path = self._folder.coming(name)
            file = await asyncio.to_thread(open_digested, path, self.wanted, lambda _: None)
            with file:
                await self._fill(file)
                await finish(file.sync)
            await finish(self._folder.place, name, size, self._wall())
        except DiskRefusal:
            drop = True  # readers have it open, and read what there is
            raise
        finally:
            self._folder.end(name, drop=drop)

    async def _fill(self, file: DigestedFile) -> None:
        """Write a file until it is right. Raises KvmigError, OSError."""
        self._moved(file)
        while True:
            try:
                await self._fetch(file, hub_only=self.rejected > 0)
            except SourceFailure:  # more came than was listed
                right = False
            else:
                right = file.is_right
            if right:
                return
            file.truncate()
            self.done = 0
            self.rejected += 1
            self._tell()
            if self.rejected > 1:
                raise ContentRejected(
                    "what the hub sends is not what it lists: its digest differs; nothing is kept"
                )

    async def _fetch(self, file: DigestedFile, *, hub_only: bool) -> None:
        """Write what a file lacks. Raises PlaceGone, HubRefusal, DiskRefusal, SourceFailure."""
        failures, pause_s = 0, FIRST_PAUSE_S
        while file.size < self.wanted.size:
            before = file.size
            try:
                async with self._places.open(file.size, hub_only=hub_only) as content:
                    await self._take(file, content)
                if file.size == before:
                    raise PlaceGone("its place sends nothing")
            except (PlaceGone, HubRefusal) as error:
                if isinstance(error, HubRefusal) and error.status not in BUSY:
                    raise
                came = file.size > before and not isinstance(error, PlaceTooSlow)
                failures = 1 if came else failures + 1
                if failures >= TRIES:
                    raise
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def _take(self, file: DigestedFile, content: OpenedContent) -> None:
        if content.begin not in (0, file.size):
            raise PlaceGone("its place sends another part")
        # From the beginning again: the digest is that of what readers have got, and the rest.
        skipped = file.size - content.begin
        floor, came = SpeedFloor(), 0
        try:
            async for piece in content.pieces:
                came += len(piece)
                if more := piece[max(0, len(piece) - max(0, came - skipped)) :]:
                    await finish(file.write, more)
                    self._moved(file)
                if slow := floor.check_speed(self._clock(), came):
                    raise PlaceTooSlow(slow)
        except OSError as error:
            self._moved(file)
            if error.errno in FULL:
                raise DiskRefusal(str(error), file.digest.copy()) from error
            raise

    def _moved(self, file: DigestedFile) -> None:
        self.done = file.size
        self._tell()
