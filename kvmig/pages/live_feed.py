"""The live picture as server-sent events for all who look at it.

One task makes the pictures, however many pages are open, and none runs while no page is. Each page
gets the whole picture first, then changes; a page whose reader is slow gets the whole one again.
While nothing changes, an event each few seconds shows whether the picture is still that of now.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec

from kvmig.core.background import cancel_tasks, keep_running
from kvmig.core.clock import TimeSource
from kvmig.core.errors import KvmigError
from kvmig.core.live_records import LiveFleet
from kvmig.pages.picture import LivePicture, PictureChange, change_of, picture_of
from kvmig.pages.rendering import render_macro

PICTURE_S = 0.5
"""Pause between two pictures."""
BEAT_S = 5.0
"""Longest time between two events of a page, and between two looks at whether the person may still
see it."""
STALE_S = 3.0
"""Age at which the last picture is no longer that of now."""
MACROS = "live"
"""Template with the macros of regions and parts."""

log = logging.getLogger(__name__)

Look = Callable[[], Awaitable[LiveFleet]]


class LiveFeed:
    """The live picture of all open pages; make it inside a running event loop, `close` it."""

    def __init__(
        self, look: Look, pause_s: float = PICTURE_S, wall: TimeSource = time.time
    ) -> None:
        """look: what runs now. Raises KvmigError. wall: Unix time."""
        self._look = look
        self._pause_s = pause_s
        self._wall = wall
        self._seen_at = 0.0
        """Unix time of the last look that has succeeded, or of the first one."""
        self._viewers = 0
        self._task: asyncio.Task[None] | None = None
        self._picture: LivePicture | None = None
        self._version = 0
        self._change = b""
        """The event that leads from the version before to this one."""
        self._whole = b""
        """The event with the whole picture; empty: not made yet."""
        self._turn = asyncio.Event()
        self._closed = False

    @property
    def viewers(self) -> int:
        """Pages that are open."""
        return self._viewers

    async def close(self) -> None:
        """End all events."""
        self._closed = True
        self._turn.set()
        await cancel_tasks(self._task)

    async def events(self, may_look: Callable[[], bool]) -> AsyncGenerator[bytes]:
        """The events of one page. may_look: whether its person still may."""
        self._viewers += 1
        if self._task is None:
            self._seen_at = self._wall()
            drawing = keep_running(self._draw, "the live picture")
            self._task = asyncio.create_task(drawing, name="live picture")
        seen = -1
        try:
            while not self._closed and may_look():
                turn = self._turn
                if self._picture is not None and seen != self._version:
                    follows = seen == self._version - 1
                    seen = self._version
                    yield self._change if follows else self._whole_event(self._picture)
                    continue
                try:
                    async with asyncio.timeout(BEAT_S):
                        await turn.wait()
                except TimeoutError:
                    yield self._beat()
            yield event("closed", {})
        finally:
            self._viewers -= 1
            if not self._viewers and self._task is not None:
                task, self._task, self._picture = self._task, None, None
                task.cancel()

    async def _draw(self) -> None:
        while True:
            try:
                self._take(picture_of(await self._look()))
                self._seen_at = self._wall()
            except KvmigError as error:
                log.warning("what runs is not shown now: %s", error)
            await asyncio.sleep(self._pause_s)

    def _take(self, picture: LivePicture) -> None:
        before, self._picture = self._picture, picture
        if before is not None:
            change = change_of(before, picture)
            if not change:
                return
            self._change = event("change", changed(picture, change))
        self._version += 1
        self._whole = b""
        self._turn.set()
        self._turn = asyncio.Event()

    def _beat(self) -> bytes:
        """The event of a page whose picture is as before: it is that of now, or since when not."""
        if self._wall() - self._seen_at < STALE_S:
            return event("live", {})
        return event("stale", {"since": self._seen_at})

    def _whole_event(self, picture: LivePicture) -> bytes:
        if not self._whole:
            self._whole = event("picture", whole(picture))
        return self._whole


def whole(picture: LivePicture) -> dict[str, object]:
    """The whole picture, as a page's script takes it."""
    regions = {name: region(picture, name) for name in ("models", "workers", "moves")}
    return {"regions": regions, "parts": {}, "dots": picture.dots, "streams": picture.streams}


def changed(picture: LivePicture, change: PictureChange) -> dict[str, object]:
    """A change of the picture, as a page's script takes it."""
    named = (("model", change.models), ("instance", change.instances), ("device", change.devices))
    return {
        "regions": {name: region(picture, name) for name in change.regions},
        "parts": {
            one.key: render_macro(MACROS, macro, one) for macro, parts in named for one in parts
        },
        "dots": change.dots,
        "streams": picture.streams,
        "said": change.said,
    }


def region(picture: LivePicture, name: str) -> str:
    """The HTML inside a region."""
    return render_macro(MACROS, name, getattr(picture, name))


def event(name: str, data: dict[str, object]) -> bytes:
    """One server-sent event."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"
