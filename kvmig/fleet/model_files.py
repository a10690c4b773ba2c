"""The files of models that come from elsewhere: fetched once, however many ask, kept while used.

Each source has a row in the database, and at most one fetcher. A source is wanted as long as a
model of the catalogue has it, or an order has pulled it. Its model starts from the whole folder
only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec

from kvmig.core.background import cancel_tasks
from kvmig.core.clock import TimeSource
from kvmig.core.errors import ConfigError
from kvmig.core.storage_reads import StorageReads
from kvmig.fleet.fetcher_child import FetcherChild
from kvmig.fleet.files_table import (
    FilesRow,
    forget_files,
    order_files,
    read_files,
    write_files,
)
from kvmig.fleet.managed_model import MissingFiles
from kvmig.fleet.settings import FleetSettings
from kvmig.fleet.spec import PATH, ModelSpec
from kvmig.fleet.store import NameTaken, NotThere, OrderActor
from kvmig.fleet.tables import FleetDatabase, StoreError
from kvmig.launcher.node_files import FolderReport
from kvmig.process.folder_lock import FolderLock
from kvmig.sources import download_state
from kvmig.sources.disk_room import HeldFiles, find_room
from kvmig.sources.download_state import (
    DownloadStatus,
    State,
    sentence_for_callers,
    sentence_of,
)
from kvmig.sources.fetch import free_bytes
from kvmig.sources.file_list import SourceFailure
from kvmig.sources.files_folder import SERVER_LOCK, BegunFolder, FilesFolder
from kvmig.sources.messages import (
    FetchFailed,
    FetchHeads,
    FetchLaunch,
    FetchListed,
    FetchProgress,
    FetchWhole,
)
from kvmig.sources.origins import check_installed
from kvmig.sources.source import ModelSource, parse_source

AT_ONCE = 2
"""Fetchers at once."""
LOOK_S = 1.0
HEADS_S = 120.0
"""Timeout of looking at a model's headers, with the wait for others that are looked at."""
HEADS_AT_ONCE = 2
HOLD_S = 10.0
"""Wait for a server that ends to leave the folder."""
HOLD_LOOK_S = 0.05
TIDY_S = 60.0
SILENT = MissingFiles("the storage of its files does not answer", failed=False)

log = logging.getLogger(__name__)

Value = TypeVar("Value")


class FilesView(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one source, as the API shows them. Sizes are bytes."""

    source: str
    state: State
    why: str
    """How far they are, or why they can't be fetched; empty: they are whole."""
    revision: str
    size: int
    done: int
    left_s: int | None
    """Seconds until they are whole, at the present rate."""
    retry_s: float | None
    """Seconds until the next try."""
    digest: str
    folder: str
    """The folder that models start from; empty: they are not whole."""
    pinned: bool
    models: Sequence[str]
    """Models of the catalogue that use them."""
    created: float
    last_used: float
    workers: Mapping[str, FolderReport] = {}
    """Workers that have them, or fetch them, by name."""


@dataclass(eq=False)
class SourceFiles:
    """The files of one source, as the server keeps them."""

    row: FilesRow
    status: DownloadStatus
    models: Sequence[str] = ()
    task: asyncio.Task[None] | None = None
    fetched: set[str] = field(default_factory=set)
    """Folders that were fetched into."""
    pid: int = 0
    """Process id of its fetcher."""

    @property
    def wanted(self) -> bool:
        """Whether a model or an order wants them."""
        return self.row.pulled or self.row.pinned or bool(self.models)


class ModelFiles:
    """`start` it, `run` it as a task, then `close` it."""

    def __init__(
        self,
        settings: FleetSettings,
        database: FleetDatabase,
        stored: Callable[..., Awaitable[Any]],
        changed: Callable[[], Awaitable[None]],
        in_use: Callable[[], Collection[str]],
        clock: TimeSource,
        wall: TimeSource,
        on_workers: Callable[[str], Mapping[str, FolderReport]] = lambda folder: {},
        reads: StorageReads | None = None,
        is_silent: Callable[[str], bool] = lambda source: False,
    ) -> None:
        """stored: runs a function on the database's thread. changed: awaited when files have become
        whole. in_use: folders that deployments were started from. wall: Unix time. on_workers: what
        workers have of a folder. reads: threads for what lies on disks. is_silent: whether the
        storage of a source's folder doesn't answer."""
        self.folder = FilesFolder(settings.files)
        self._settings = settings
        self._database = database
        self._stored = stored
        self._changed = changed
        self._in_use = in_use
        self._clock = clock
        self._wall = wall
        self._on_workers = on_workers
        self._reads = reads or StorageReads()
        self._is_silent = is_silent
        self._files: dict[str, SourceFiles] = {}
        self._children: set[FetcherChild] = set()
        """Fetchers that have not ended."""
        self._news = asyncio.Event()
        self._room = asyncio.Lock()
        self._lock = FolderLock(self.folder.root / SERVER_LOCK, f"the folder {self.folder.root}")
        self._looking = asyncio.Semaphore(HEADS_AT_ONCE)
        self._tidied = -TIDY_S

    async def start(self) -> None:
        """Take what is on the disk. Raises StoreError; ConfigError where another fleet uses the
        folder: each would remove the other's files."""
        try:
            await self._take_folder()
            begun = await self._on_disk(self._make_folders)
        except OSError as error:
            raise ConfigError(f"{self.folder.root} can't be used: {error}") from error
        for row in await self._stored(read_files, self._database):
            try:
                found = await self._on_disk(partial(self.folder.manifest, row.folder or "none"))
            except OSError as error:
                raise ConfigError(f"{self.folder.root} can't be used: {error}") from error
            whole = bool(row.folder) and found is not None
            if row.folder and not whole:
                log.warning("the files of %s are not all there: they are fetched again", row.source)
                row = msgspec.structs.replace(row, folder="")  # noqa: PLW2901
            now = self._clock()
            status = DownloadStatus(since=now)
            if whole:
                status = DownloadStatus("whole", now, row.size, row.size, row.revision)
            self._files[row.source] = SourceFiles(row, status)
        for name, part in begun.items():
            await self._take_begun(name, part)

    async def _take_folder(self) -> None:
        """Wait for the end of the server before this one. Raises ConfigError, OSError."""
        await self._on_disk(self.folder.make)
        ends = self._clock() + HOLD_S
        while True:
            try:
                await self._on_disk(self._lock.acquire)
            except ConfigError:
                if self._clock() > ends:
                    raise
                await asyncio.sleep(HOLD_LOOK_S)
            else:
                return

    async def _on_disk(self, call: Callable[[], Value]) -> Value:
        """What a call finds or does in the folder of files. Raises OSError, as StorageSilent is
        one, too."""
        return await self._reads.read("the files of models", str(self.folder.root), call)

    def _make_folders(self) -> dict[str, BegunFolder]:
        self.folder.sweep()
        return self.folder.begun()

    async def _take_begun(self, name: str, part: BegunFolder) -> None:
        """What an earlier server's download has left is gone on with, or removed."""
        files = self._files.get(part.source)
        if files is None:
            await self._remove(name)
            return
        files.fetched.add(name)
        if not files.row.folder:
            files.status = msgspec.structs.replace(files.status, done=files.status.done + part.size)

    async def run(self) -> None:
        """Fetch what is wanted, until cancelled."""
        while True:
            self._begin_due()
            if self._clock() - self._tidied > TIDY_S:
                self._tidied = self._clock()
                await self.tidy()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._news.wait()
            self._news.clear()

    async def close(self) -> None:
        """End the fetchers; the next server's go on."""
        await cancel_tasks(*(one.task for one in self._files.values()))
        for child in list(self._children):  # whose end was broken off
            await self._end(child)
        self._lock.release()

    def fetchers(self) -> dict[str, int]:
        """Process ids of the fetchers, by source."""
        return {source: one.pid for source, one in self._files.items() if one.pid}

    # -- models

    def resolved(self, spec: ModelSpec) -> ModelSpec:
        """The same with the folder as its source, if its files are whole."""
        source = _known_source(spec.source)
        found = self._files.get(str(source)) if source is not None and source.is_remote else None
        if found is None or not found.row.folder:
            return spec
        folder = self.folder.whole(found.row.folder)
        return msgspec.structs.replace(spec, source=f"{PATH}{folder}")

    def whole(self) -> dict[str, str]:
        """The digests of whole folders, by path."""
        rows = (one.row for one in self._files.values())
        return {str(self.folder.whole(one.folder)): one.digest for one in rows if one.folder}

    def missing(self, source: str) -> MissingFiles | None:
        """Why a model with this source can't start, as its callers may know; None: it has its
        folder."""
        if source.startswith(PATH):
            return SILENT if self._is_silent(source) else None
        if (parsed := _known_source(source)) is None:
            return MissingFiles("its source can't be read by this kvmig", failed=True)
        found = self._files.get(str(parsed))
        if found is None:
            return MissingFiles("its files are not looked up yet", failed=False)
        if found.row.folder:
            return None
        why = sentence_for_callers(found.status, self._clock())
        return MissingFiles(why, found.status.state == "failed")

    async def take_models(self, models: Mapping[str, str]) -> None:
        """Know which models use which sources. models: names with sources; one that can't be read
        is left out. What can't be stored is known all the same, and the next server learns of it
        from the models."""
        users: dict[str, list[str]] = {}
        for name, text in sorted(models.items()):
            if (parsed := _known_source(text)) is None:
                log.error("source %.200r of model %s can't be read, and is left out", text, name)
            elif parsed.is_remote:
                users.setdefault(str(parsed), []).append(name)
        now, changed = self._wall(), []
        for source in users.keys() - self._files.keys():
            row = FilesRow(source=source, created=now, last_used=now)
            self._files[source] = SourceFiles(row, DownloadStatus(since=self._clock()))
            changed.append(row)
        for source, files in list(self._files.items()):
            if files.models and source not in users:
                files.row = msgspec.structs.replace(files.row, last_used=now)
                changed.append(files.row)
            files.models = users.get(source, ())
            if not files.wanted and not files.row.folder:
                try:
                    await self._drop(source)
                except StoreError as error:
                    log.warning("the files of %s are not forgotten: %s", source, error)
        kept = [one for one in changed if one.source in self._files]
        try:
            await self._stored(write_files, self._database, kept)
        except StoreError as error:
            log.warning("the use of %d sources is not stored: %s", len(kept), error)
        self._news.set()

    # -- orders

    def view(self, source: str) -> FilesView:
        """Raises NotThere, ConfigError."""
        return self._view(self._found(source))

    def views(self) -> list[FilesView]:
        """List the files of each source."""
        return [self._view(one) for _, one in sorted(self._files.items())]

    def of_model(self, source: str) -> FilesView | None:
        """Files of a model; None: it has a folder of its own."""
        parsed = _known_source(source)
        found = None if parsed is None else self._files.get(str(parsed))
        return None if found is None else self._view(found)

    async def pull(self, text: str, actor: OrderActor) -> FilesView:
        """Fetch a source's files, or compare whole ones with their source. Raises ConfigError,
        StoreError."""
        source = remote_source(text)
        now = self._wall()
        files = self._files.get(str(source))
        row = (
            FilesRow(source=str(source), created=now, last_used=now) if files is None else files.row
        )
        row = msgspec.structs.replace(row, pulled=True)
        await self._order(row, "pull", actor)
        files = self._files.setdefault(
            row.source, SourceFiles(row, DownloadStatus(since=self._clock()))
        )
        files.row = msgspec.structs.replace(files.row, pulled=True)
        files.status = download_state.ask_again(files.status, self._clock())
        self._news.set()
        return self._view(files)

    async def pin(self, text: str, pinned: bool, actor: OrderActor) -> FilesView:
        """Keep files in spite of --model-files, or no more. Raises NotThere, ConfigError,
        StoreError."""
        files = self._found(text)
        row = msgspec.structs.replace(files.row, pinned=pinned)
        await self._order(row, "pin" if pinned else "unpin", actor)
        files.row = msgspec.structs.replace(files.row, pinned=pinned)
        return self._view(files)

    async def remove(self, text: str, actor: OrderActor) -> None:
        """Remove files that no model uses; a download ends. Raises NotThere, NameTaken,
        ConfigError, StoreError."""
        files = self._found(text)
        if files.models:
            raise NameTaken(f"{files.row.source} is used by {', '.join(files.models)}")
        if self._serves(files):
            raise NameTaken(f"{files.row.source} is used by a deployment that has not ended yet")
        source = files.row.source
        del self._files[source]  # a model that comes meanwhile has new ones
        try:
            await cancel_tasks(files.task)
            await self._order(files.row, "remove", actor)
        except BaseException:
            self._files.setdefault(source, files)
            raise
        await self._clear(files)

    async def _order(self, row: FilesRow, action: str, actor: OrderActor) -> None:
        await self._stored(order_files, self._database, row, action, actor, self._wall())

    def _found(self, text: str) -> SourceFiles:
        source = str(remote_source(text))
        if (found := self._files.get(source)) is None:
            raise NotThere(f"there are no files of {source}")
        return found

    def _view(self, files: SourceFiles) -> FilesView:
        row, status, now = files.row, files.status, self._clock()
        failed = status.state == "failed"
        folder = str(self.folder.whole(row.folder)) if row.folder else ""
        return FilesView(
            source=row.source,
            state=status.state,
            why=sentence_of(status, now),
            revision=row.revision or status.revision,
            size=row.size if row.folder and not status.runs else status.size,
            done=row.size if row.folder and not status.runs else status.done,
            left_s=download_state.seconds_left(status, now),
            retry_s=max(0.0, status.retry_at - now) if failed else None,
            digest=row.digest,
            folder=folder,
            pinned=row.pinned,
            models=files.models,
            created=row.created,
            last_used=self._wall() if files.models else row.last_used,
            workers=self._on_workers(folder) if folder else {},
        )

    async def heads(self, text: str) -> str:
        """A folder with all of a source's files but the weights, for an engine that computes sizes.

        Raises ConfigError, StoreError.
        """
        source = str(remote_source(text))
        try:
            async with asyncio.timeout(HEADS_S), self._looking:
                return await self._heads(source)
        except (SourceFailure, OSError, msgspec.DecodeError) as error:  # a TimeoutError too
            raise StoreError(str(error) or f"{source} takes longer than {HEADS_S:g} s") from error

    async def _heads(self, source: str) -> str:
        """Raises SourceFailure, OSError, msgspec.DecodeError."""
        launch = FetchLaunch(source=source, root=str(self.folder.root), heads=True)
        child = await self._begin(launch)
        try:
            async with contextlib.aclosing(child.reports()) as reports:
                async for report in reports:
                    match report:
                        case FetchHeads(folder):
                            return folder
                        case FetchFailed(why):
                            raise SourceFailure(why)
        finally:
            await self._end(child)
        raise SourceFailure(f"{source}: its fetcher said nothing")

    # -- downloads

    async def _begin(self, launch: FetchLaunch) -> FetcherChild:
        """Raises OSError."""
        child = await FetcherChild.begin(launch, self._settings.log("files"))
        self._children.add(child)
        return child

    async def _end(self, child: FetcherChild) -> None:
        await child.end()
        self._children.discard(child)

    def _begin_due(self) -> None:
        running = sum(one.task is not None for one in self._files.values())
        for files in sorted(self._files.values(), key=lambda one: one.status.since):
            due = files.wanted and download_state.is_due(files.status, self._clock())
            if files.task is None and due and running < AT_ONCE:
                running += 1
                files.status = download_state.begin(files.status, self._clock())
                work = self._fetch(files)
                files.task = asyncio.create_task(work, name=f"files of {files.row.source}")
                files.task.add_done_callback(partial(self._ended, files))

    def _ended(self, files: SourceFiles, task: asyncio.Task[None]) -> None:
        files.task, files.pid = None, 0
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the download of %s failed", files.row.source, exc_info=error)
            files.status = download_state.fail(files.status, repr(error), self._clock())
        self._news.set()

    async def _fetch(self, files: SourceFiles) -> None:
        """One fetcher, from its start to its end."""
        source, child = files.row.source, None
        try:
            launch = FetchLaunch(source=source, root=str(self.folder.root))
            child = await self._begin(launch)
            files.pid = child.pid
            async with contextlib.aclosing(child.reports()) as reports:
                async for report in reports:
                    match report:
                        case FetchListed():
                            async with self._room:  # or two would get the same bytes
                                await self._allow(files, child, report)
                        case FetchProgress(done):
                            files.status = download_state.take_progress(
                                files.status, done, self._clock()
                            )
                        case FetchWhole():
                            await self._take_whole(files, report)
                            break
                        case FetchFailed(why, lasting):
                            raise SourceFailure(why, lasting=lasting)
        except (SourceFailure, StoreError, OSError, msgspec.DecodeError) as error:
            lasting = isinstance(error, SourceFailure) and error.lasting
            now = self._clock()
            files.status = download_state.fail(files.status, str(error), now, lasting=lasting)
            log.warning("%s: %s", source, sentence_of(files.status, now))
        finally:
            if child is not None:
                await self._end(child)

    async def _allow(self, files: SourceFiles, child: FetcherChild, listed: FetchListed) -> None:
        """Let a fetcher go on if there is room. Raises SourceFailure, StoreError, OSError."""
        for name in files.fetched - {listed.folder, files.row.folder}:  # of an older revision
            await self._remove(name)
        files.fetched = {listed.folder}
        free = await self._on_disk(partial(free_bytes, self.folder.root))
        others = [one for one in self._files.values() if one is not files]
        coming = [one.status for one in others if one.status.state == "downloading"]
        stopped = [one.status for one in others if one.status not in coming and not one.row.folder]
        found = find_room(
            listed.size - listed.done,
            listed.size,
            free,
            sum(one.size - one.done for one in coming),
            [
                HeldFiles(one.row.source, one.row.size, one.row.last_used, self._stays(one))
                for one in self._files.values()
                if one.row.folder
            ],
            self._settings.files_bytes,
            begun=sum(one.done for one in (*coming, *stopped)),
        )
        if found.refused:
            raise SourceFailure(found.refused, lasting=True)
        for source in found.evicted:
            log.warning("the files of %s go to make room for %s", source, files.row.source)
            await self._drop(source)
        files.status = download_state.take_list(
            files.status, listed.revision, listed.size, listed.done, self._clock()
        )
        child.allow()

    def _stays(self, files: SourceFiles) -> bool:
        return (
            files.row.pinned or bool(files.models) or files.task is not None or self._serves(files)
        )

    def _serves(self, files: SourceFiles) -> bool:
        """Whether a deployment was started from them."""
        folder = files.row.folder
        return bool(folder) and str(self.folder.whole(folder)) in self._in_use()

    async def _take_whole(self, files: SourceFiles, whole: FetchWhole) -> None:
        """Raises StoreError."""
        row = msgspec.structs.replace(
            files.row, folder=whole.folder, revision=whole.revision, size=whole.size,
            digest=whole.digest, last_used=self._wall(),
        )  # fmt: skip
        await self._stored(write_files, self._database, [row])
        files.row = msgspec.structs.replace(row, pulled=files.row.pulled, pinned=files.row.pinned)
        status = msgspec.structs.replace(files.status, size=whole.size, revision=whole.revision)
        files.status = download_state.finish(status, self._clock())
        self._tidied = self._clock() - TIDY_S  # there may be another revision's
        await self._changed()

    async def _drop(self, source: str) -> None:
        """Forget a source, and remove what is on the disk of it."""
        files = self._files.pop(source)
        await cancel_tasks(files.task)
        await self._stored(forget_files, self._database, source)
        await self._clear(files)

    async def _clear(self, files: SourceFiles) -> None:
        for name in {files.row.folder, *files.fetched} - {""}:
            await self._remove(name)

    async def _remove(self, name: str) -> None:
        try:
            await self._on_disk(partial(self.folder.remove, name))
        except OSError as error:
            log.warning("%s is not removed: %s", name, error)

    async def tidy(self) -> None:
        """Remove folders that belong to no row, once nothing is being fetched: until then an
        unknown one may be what the next fetcher goes on with."""
        if any(one.task is not None or not one.row.folder for one in self._files.values()):
            return
        known = {one.row.folder for one in self._files.values()}
        try:
            names = await self._on_disk(lambda: list(self.folder.names()))
        except OSError as error:
            log.warning("%s is not tidied: %s", self.folder.root, error)
            return
        for name in names:
            if name not in known and str(self.folder.whole(name)) not in self._in_use():
                await self._remove(name)


def _known_source(text: str) -> ModelSource | None:
    """The source; None: it can't be read, as one of a newer kvmig."""
    try:
        return parse_source(text)
    except ConfigError:
        return None


def remote_source(text: str) -> ModelSource:
    """A source whose files can be fetched here. Raises ConfigError."""
    source = parse_source(text)
    if not source.is_remote:
        raise ConfigError(f"source is {text!r:.200}, which is on this disk already")
    check_installed(source)
    return source
