"""The folder of models' files on one node: it is filled from other nodes, and read by them.

A node that sees the disk of the fleet's server fetches nothing. Each other one fetches a folder
from a node that has it whole, file by file, and compares every file with its SHA-256 before the
folder gets its name; one that breaks off goes on at the byte.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from kvmig.core.clock import TimeSource, monotonic
from kvmig.core.errors import ConfigError
from kvmig.launcher.agent_origin import AgentOrigin, FolderHolder
from kvmig.launcher.node_files import (
    FILES_VARIABLE,
    OWNER,
    WHOLE,
    FilesWish,
    FolderReport,
    NodeFilesReport,
    WantedFolder,
    copy_link,
)
from kvmig.launcher.user_folder import FolderLists, digest_of, list_folder
from kvmig.process.folder_lock import FolderLock, holder_of
from kvmig.sources import download_state
from kvmig.sources.disk_room import HeldFiles, find_room
from kvmig.sources.download_state import LAST_RETRY_S, DownloadStatus, sentence_of
from kvmig.sources.fetch import SourceFetch, free_bytes
from kvmig.sources.file_list import SourceFailure, check_name
from kvmig.sources.files_folder import MANIFEST, SERVER_LOCK, FilesFolder, FilesManifest
from kvmig.sources.messages import FetchListed
from kvmig.sources.source import parse_source

PATH = "path:"
LOOK_S = 30.0
"""Pause between two looks at all of the disk."""
LIST_S = 0.5
"""Longest wait for the lists of folders of the user's; a later look takes the others."""
END_S = 5.0
USED_S = 60.0
"""What is wanted counts as used again after this time."""

log = logging.getLogger(__name__)


class WantedNoMore(SourceFailure):
    """A folder is wanted no more on this node."""


class NodeFolders:
    """Several threads may call its methods."""

    def __init__(
        self, environment: Mapping[str, str] = os.environ, clock: TimeSource = monotonic
    ) -> None:
        """environment: the node's."""
        self._own = environment.get(FILES_VARIABLE, "")
        self._clock = clock
        self._lock = threading.RLock()
        self._wish = FilesWish()
        self._folder: FilesFolder | None = None
        """The node's own; None: it can't be used."""
        self._origin: FilesFolder | None = None
        """The server's; None: it is not seen here."""
        self._held: FolderLock | None = None
        self._why = ""
        self._whole: dict[str, FilesManifest] = {}
        """What is in the node's own folder, by the folders' names."""
        self._looked_at = -LOOK_S
        self._paths_of: tuple[str, ...] = ()
        self._lists = FolderLists()
        self._paths: dict[str, FilesManifest] = {}
        """The folders of the user's that are here themselves."""
        self._looked: set[str] = set()
        """Folders of the user's that were looked for."""
        self._used: dict[str, float] = {}
        """When folders were last marked as used."""
        self._statuses: dict[str, DownloadStatus] = {}
        """The downloads that were begun, by folder."""
        self._took: dict[str, float] = {}
        """Seconds that downloads took, by the folders' names."""
        self._sources: dict[str, str] = {}
        """Sources of what is fetched, by folder."""
        self._holders: Mapping[str, Sequence[FolderHolder]] = {}
        self._first = os.getpid()
        """Which of several holders is asked first."""
        self._busy = ""
        """The name of the folder that is fetched."""
        self._fetching: tuple[str, SourceFetch] | None = None
        self._thread: threading.Thread | None = None

    # -- for the server

    def take_wish(
        self, wish: FilesWish, holders: Mapping[str, Sequence[FolderHolder]]
    ) -> NodeFilesReport:
        """Fetch what is wanted and not there. holders: nodes that have it, by folder."""
        with self._lock:
            self._open(wish)
            self._wish, self._holders = wish, holders
            if self._folder is not None:
                self._look()
                self._forget()
                if not self._shared and self._thread is None and self._next() is not None:
                    self._thread = threading.Thread(target=self._run, daemon=True, name="files")
                    self._thread.start()
            return self._report()

    def close(self) -> None:
        """Fetch nothing any more, and leave the folder to others."""
        with self._lock:
            self._wish, thread = FilesWish(), self._thread
        if thread is not None:
            thread.join(END_S)
        with self._lock:
            self._let_go()

    def _let_go(self) -> None:
        """Leave the folder to others. What is being fetched breaks off."""
        if self._held is not None:
            self._held.release()
        self._folder, self._held, self._origin, self._whole = None, None, None, {}

    @property
    def _shared(self) -> bool:
        """Whether the node's folder is the server's own."""
        return (
            self._origin is not None
            and self._folder is not None
            and self._folder.root == self._origin.root
        )

    def _open(self, wish: FilesWish) -> None:
        """Take the node's folder, and see whether the server's is here. One into which another
        fleet's server downloads is that server's alone."""
        root = Path(self._own or wish.root)
        has_it = self._folder is not None and self._folder.root == root
        if not wish.root or (has_it and (self._shared or not self._is_taken(root))):
            return
        self._let_go()
        self._looked_at = -LOOK_S
        for path in (Path(wish.root), root):  # the server's may be at another path here
            with contextlib.suppress(OSError, UnicodeDecodeError):
                if (path / OWNER).read_text() == wish.word:
                    self._origin = FilesFolder(path)
        folder = FilesFolder(root)
        try:
            if self._origin is None or self._origin.root != root:
                folder.make()
                if server := holder_of(root / SERVER_LOCK):
                    raise ConfigError(f"the server of another fleet (process {server}) has it")
                held = FolderLock(root / "node.lock", f"the folder {root}")
                held.acquire()
                self._held = held
                folder.sweep()
        except (OSError, ConfigError) as error:
            self._why = (
                f"{root} can't be used for models' files: {error}; it can be one fleet's only"
            )
            self._let_go()
            return
        self._folder, self._why = folder, ""

    def _is_taken(self, root: Path) -> bool:
        """Whether another fleet's server has begun to download into the node's folder."""
        try:
            return bool(holder_of(root / SERVER_LOCK))
        except OSError as error:  # a later look may show it
            log.warning("%s can't be looked at: %s", root / SERVER_LOCK, error)
            return False

    def _look(self) -> None:
        """Know what is whole, and from time to time whether it still is."""
        assert self._folder is not None
        now, folder = self._clock(), self._folder
        every = now - self._looked_at >= LOOK_S
        try:
            if every or self._paths_of != self._wish.paths:
                self._paths_of = self._wish.paths
                self._lists.begin_lists(self._paths_of)
                self._take_lists(LIST_S)
            else:
                self._take_lists(0.0)
            whole = {} if every else dict(self._whole)
            names = {path.name for path in (folder.root / WHOLE).iterdir()} - whole.keys()
            for name in names - {self._busy}:  # which is whole once its download has ended
                if (found := folder.manifest(name)) is not None:
                    whole[name] = found
            self._whole, self._looked_at = whole, now if every else self._looked_at
        except OSError as error:
            log.warning("%s can't be looked at: %s", folder.root, error)
        if self._shared:
            return
        for one in self._wish.folders:
            name = one.name
            if name in self._whole and one.revision:
                self._link(folder, one)
            if name in self._whole and now - self._used.get(name, -USED_S) >= USED_S:
                self._used[name] = now
                with contextlib.suppress(OSError):  # then it goes earlier
                    os.utime(folder.whole(name) / MANIFEST)

    def _take_lists(self, timeout_s: float) -> None:
        """Know which folders of the user's are here, as far as they are listed by then."""
        for one, found in self._lists.take_lists(timeout_s).items():
            self._paths.pop(one, None)
            self._looked.add(one)
            if found is not None:
                self._paths[one] = found
        self._paths = {one: it for one, it in self._paths.items() if one in self._paths_of}
        self._looked.intersection_update(self._paths_of)

    def _link(self, folder: FilesFolder, one: WantedFolder) -> None:
        """Let instances find the copy of a folder of the user's."""
        link, whole = copy_link(str(folder.root), one.folder), folder.whole(one.name)
        with contextlib.suppress(OSError):
            if link.readlink() == whole:
                return
        try:
            link.parent.mkdir(mode=0o700, exist_ok=True)
            fresh = link.with_suffix(".new")
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(whole)
            fresh.replace(link)
        except OSError as error:  # its instances say that the folder is not there
            log.warning("%s can't be linked: %s", whole, error)

    def _forget(self) -> None:
        """Forget downloads that are wanted no more; a failure is kept until its pause is over, or a
        folder that is wanted again at once would be tried at once."""
        now, wanted = self._clock(), {one.folder for one in self._wish.folders}
        for folder, status in list(self._statuses.items()):
            waits = status.state == "failed" and now < status.retry_at + LAST_RETRY_S
            if folder not in wanted and not waits and not status.runs:
                del self._statuses[folder]
                self._sources.pop(folder, None)

    def _lacks(self, one: WantedFolder) -> bool:
        if one.revision and (one.folder in self._paths or self._lists.is_listing(one.folder)):
            return False
        return bool(one.digest or one.revision) and one.name not in self._whole

    def _next(self) -> WantedFolder | None:
        """The folder that is fetched next; None: none can be now."""
        if self._folder is None:
            return None
        for one in self._wish.folders:
            status = self._statuses.get(one.folder, DownloadStatus())
            due = download_state.is_due(status, self._clock())
            if self._lacks(one) and due and self._holders.get(one.folder):
                return one
        return None

    def _report(self) -> NodeFilesReport:
        wish, now, found = self._wish, self._clock(), dict[str, FolderReport]()
        if self._fetching is not None:
            folder, fetch = self._fetching
            status = self._statuses[folder]
            self._statuses[folder] = download_state.take_progress(status, fetch.count.done, now)
        copies = []
        for name, manifest in self._whole.items():
            path, size = str(Path(wish.root) / WHOLE / name), manifest.size
            copied = manifest.source.removeprefix(PATH)
            own = copied != manifest.source
            report = FolderReport(
                folder=copied if own else path,
                revision=manifest.revision if own else "",
                source=manifest.source,
                state="whole",
                size=size,
                done=size,
                took_s=self._took.get(name),
            )
            if own:
                copies.append(report)
            else:
                found[path] = report
        revisions = {one.folder: one.revision for one in wish.folders}
        wanted = {one.folder: DownloadStatus() for one in wish.folders if self._lacks(one)}
        if self._shared:  # a server's folder is filled by the server alone
            for one in wish.folders:
                if one.revision and self._lacks(one):
                    why = f"{one.folder} is not there, and the fleet's folder takes no copy of it"
                    wanted[one.folder] = DownloadStatus(state="failed", why=why, retry_at=now)
        for folder, status in {**wanted, **self._statuses}.items():
            # One that would be tried now, were it wanted, keeps nobody from wanting it.
            over = folder not in wanted and download_state.is_due(status, now)
            if folder not in found and not over:
                found[folder] = FolderReport(
                    folder=folder,
                    revision=revisions.get(folder, ""),
                    source=self._sources.get(folder, ""),
                    state=status.state,
                    size=status.size,
                    done=status.done,
                    why=sentence_of(status, now),
                )
        free = 0
        if self._folder is not None:
            with contextlib.suppress(OSError):
                free = free_bytes(self._folder.root)
        return NodeFilesReport(
            root="" if self._folder is None else str(self._folder.root),
            shared=self._shared,
            origin=self._origin is not None,
            free_bytes=free,
            why=self._why,
            paths={one: it.revision for one, it in self._paths.items()},
            looked=tuple(sorted(self._looked)),
            folders=(*(found[one] for one in sorted(found)), *copies),
        )

    # -- for other nodes

    def list_files(self, folder: str) -> FilesManifest:
        """See `FolderHolder`."""
        name = Path(folder).name
        if self._is_users(folder):
            try:
                if (found := list_folder(Path(folder))) is not None:
                    return found
            except OSError as error:
                raise SourceFailure(f"{folder} can't be read: {error}") from error
            name = self._copy_of(folder)
        for place in self._places() if name else ():
            try:
                found = place.manifest(name)
            except OSError as error:
                raise SourceFailure(f"{folder} can't be read: {error}") from error
            if found is not None:
                return found
        raise SourceFailure(f"{folder} is not whole on this node")

    def digest_file(self, folder: str, name: str) -> str:
        """See `FolderHolder`."""
        path = self._file(folder, name)
        try:
            return digest_of(path)
        except OSError as error:
            raise SourceFailure(f"{path} can't be read: {error}") from error

    def read_file(self, folder: str, name: str, begin: int, count: int) -> bytes:
        """See `FolderHolder`."""
        path = self._file(folder, name)
        try:
            with path.open("rb") as file:
                file.seek(begin)
                return file.read(count)
        except OSError as error:
            raise SourceFailure(f"{path} can't be read: {error}") from error

    def _file(self, folder: str, name: str) -> Path:
        """A file of a model's folder, and of nothing else. Raises SourceFailure."""
        check_name(folder, name)
        inside, own = Path(folder).name, list[Path]()
        if self._is_users(folder):
            inside, own = self._copy_of(folder), [Path(folder)]
        places = [one.whole(inside) for one in self._places()] if inside not in ("", "..") else []
        for one in own if own and own[0].is_dir() else places:
            if (one / name).is_file():
                return one / name
        raise SourceFailure(f"{folder} has no file {name!r:.150}")

    def _is_users(self, folder: str) -> bool:
        with self._lock:
            return folder in self._wish.paths

    def _copy_of(self, folder: str) -> str:
        """The name of the newest copy here of a folder of the user's; empty: there is none."""
        with self._lock:
            root = None if self._folder is None else self._folder.root
        if root is None:
            return ""
        try:
            return copy_link(str(root), folder).readlink().name
        except OSError:
            return ""

    def _places(self) -> list[FilesFolder]:
        with self._lock:
            return [one for one in (self._folder, self._origin) if one is not None]

    # -- downloads

    def _run(self) -> None:
        """Fetch one folder after the other, until nothing can be fetched."""
        while True:
            with self._lock:
                if (one := self._next()) is None:
                    self._thread = None
                    return
                status = self._statuses.get(one.folder, DownloadStatus())
                self._statuses[one.folder] = download_state.begin(status, self._clock())
                holders, self._busy = self._holders[one.folder], one.name
                holder = holders[(self._first + status.failures) % len(holders)]
            why, lasting, began = "", False, self._clock()
            try:
                self._fetch(one, holder)
            except WantedNoMore:
                log.info("%s is wanted no more", one.folder)
            except SourceFailure as error:
                why, lasting = str(error), error.lasting
            except OSError as error:
                why = str(error)
            except Exception as error:  # or nothing would be fetched any more
                log.exception("the download of %s", one.folder)
                why = repr(error)
            with self._lock:
                self._fetching, self._busy = None, ""
                status = self._statuses[one.folder]
                if why:
                    status = download_state.fail(status, why, self._clock(), lasting=lasting)
                    self._statuses[one.folder] = status
                else:
                    del self._statuses[one.folder]
                    self._took[one.name] = self._clock() - began
                    self._look()
            if why:
                log.warning("%s: %s", one.folder, why)

    def _fetch(self, wanted: WantedFolder, holder: FolderHolder) -> None:
        """Raises SourceFailure, OSError."""
        manifest = holder.list_files(wanted.folder)
        same = (
            manifest.revision == wanted.revision
            if wanted.revision
            else (manifest.digest == wanted.digest)
        )
        if not same:
            raise SourceFailure(f"{wanted.folder} has other files than the fleet's server has")
        with self._lock:
            assert self._folder is not None
            folder, self._sources[wanted.folder] = self._folder, manifest.source
        origin = AgentOrigin(holder, wanted.folder, manifest, partial(self._go_on, wanted))
        try:
            source = parse_source(manifest.source)
        except ConfigError as error:
            raise SourceFailure(str(error), lasting=True) from error
        fetch = SourceFetch(source, origin, folder)

        def allow(listed: FetchListed) -> None:
            self._make_room(wanted, listed, folder)
            with self._lock:
                status = self._statuses[wanted.folder]
                self._statuses[wanted.folder] = download_state.take_list(
                    status, listed.revision, listed.size, listed.done, self._clock()
                )
                self._fetching = (wanted.folder, fetch)

        fetch.run(allow)

    def _go_on(self, wanted: WantedFolder) -> None:
        """Raises WantedNoMore."""
        gone = self._folder is None  # another fleet's server has it now
        if gone or all(one.folder != wanted.folder for one in self._wish.folders):
            raise WantedNoMore(wanted.folder)

    def _make_room(self, wanted: WantedFolder, listed: FetchListed, folder: FilesFolder) -> None:
        """Remove what is not wanted, where that is allowed and makes room. Raises SourceFailure,
        OSError."""
        with self._lock:
            names = {one.name for one in self._wish.folders}
            whole = dict(self._whole)
        for name in folder.begun():  # what came of others that are wanted no more
            if name not in names and name != listed.folder:
                folder.remove(name)
        begun = sum(one.size for name, one in folder.begun().items() if name != listed.folder)
        held = []
        for name, manifest in whole.items():
            with contextlib.suppress(FileNotFoundError):  # somebody has removed it
                used = (folder.whole(name) / MANIFEST).stat().st_mtime
                held.append(HeldFiles(name, manifest.size, used, name in names))
        found = find_room(
            listed.size - listed.done, listed.size, free_bytes(folder.root), 0, held,
            self._wish.most_bytes, begun=begun,
        )  # fmt: skip
        if found.refused:
            raise SourceFailure(found.refused, lasting=True)
        for name in found.evicted:
            log.warning("%s goes to make room for %s", name, wanted.folder)
            folder.remove(name)
            with self._lock:
                self._whole.pop(name, None)
