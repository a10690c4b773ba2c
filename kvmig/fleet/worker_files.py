"""Models' files on workers: what an instance lacks where it is to start, and which files each node
is to have. Pure.

A model's folder is known by its path on the machine of the server. A node where an instance is to
start fetches the folder first; it keeps the folders of its instances.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from kvmig.fleet.workers import FleetWorker
from kvmig.launcher.node_files import ClusterWish, FilesWish, WantedFolder
from kvmig.sources.source import ModelSource

SOUGHT = "its files are looked for"
LOCAL = ("whole", "listing", "downloading")
"""States of folders that are on a node's disk, or come there now."""


class PrefetchedFolder(NamedTuple):
    """A folder that workers are to have before an instance is to start there."""

    folder: str
    selector: Mapping[str, str]
    """Labels of these workers; empty: all have it."""

    def is_for(self, worker: FleetWorker) -> bool:
        """Whether a worker is to have it."""
        labels = {**worker.labels, "worker": worker.name}
        return all(labels.get(name) == value for name, value in self.selector.items())


class WorkerFiles:
    """What is wanted of all nodes."""

    def __init__(self) -> None:
        self._common = FilesWish()
        self._digests: Mapping[str, str] = {}
        """Digests of the folders that were downloaded, by path."""
        self._revisions: Mapping[str, str] = {}
        """States of the user's folders, where the server's disk is seen, by path."""
        self._sought: frozenset[str] = frozenset()
        """The user's folders that were not looked for yet where the server's disk is seen."""
        self._prefetched: tuple[PrefetchedFolder, ...] = ()
        self._wanted: set[tuple[str, str]] = set()
        """Nodes' ids with folders: of instances that start there as soon as they can."""
        self._wish = ClusterWish()

    def take_place(self, root: str, word: str, most_bytes: int) -> None:
        """Know the server's own folder, see `FilesWish`."""
        self._common = FilesWish(root=root, word=word, most_bytes=most_bytes)

    def take_folders(
        self,
        digests: Mapping[str, str],
        paths: Iterable[str],
        prefetched: Iterable[PrefetchedFolder] = (),
    ) -> None:
        """Replace the folders that models start from. digests: of those that were downloaded.
        paths: the user's own, where they are there. prefetched: those that workers are to have
        before an instance is to start there."""
        self._digests = digests
        self._prefetched = tuple(prefetched)
        self._common = replace(self._common, paths=tuple(sorted(paths)))

    @property
    def root(self) -> str:
        """The server's folder."""
        return self._common.root

    @property
    def wish(self) -> ClusterWish:
        """What is wanted of all nodes now."""
        return self._wish

    def lack(self, worker: FleetWorker, folder: str) -> str:
        """Why an instance can't start there yet for want of its files, in words for all who call
        the model; empty: they are there. The node is asked for them with the next `decide`."""
        if worker.files.paths.get(folder):
            return ""
        if folder not in self._digests and folder not in self._common.paths:
            return ""  # nor has the server it: the engine says so, or needs none
        found = worker.files.folder(folder, self._revisions.get(folder, ""))
        if found is not None and found.state == "whole":
            return ""
        self._wanted.add((worker.node, folder))
        if found is None:
            return SOUGHT
        return "its files can't be downloaded" if found.state == "failed" else found.why

    def refused(self, worker: FleetWorker) -> dict[str, str]:
        """Why sources can't be had on a worker."""
        files, sought = worker.files, self._unknown(worker)
        found = {
            one: SOUGHT if one in sought else f"{one} is not there" for one in self._absent(worker)
        }
        for folder in files.folders:
            if folder.state == "failed":
                found[folder.folder] = folder.why
        if files.why:  # it has none but the user's own
            copied = {one for one in self._common.paths if one not in files.paths}
            found |= dict.fromkeys(self._digests.keys() | copied, files.why)
        return {_source(folder): why for folder, why in found.items()}

    def sought(self, worker: FleetWorker) -> frozenset[str]:
        """The sources of which it is not known yet whether a worker can have them."""
        return frozenset(map(_source, self._unknown(worker)))

    def _absent(self, worker: FleetWorker) -> list[str]:
        """The user's folders that a worker neither has nor can get."""
        every, there = self._common.paths, worker.files.paths
        return [one for one in every if one not in there and one not in self._revisions]

    def _unknown(self, worker: FleetWorker) -> set[str]:
        """The folders among these that a worker may have all the same: it still looks for them."""
        if worker.files.why:
            return set()
        looked = worker.files.looked
        return {one for one in self._absent(worker) if one not in looked or one in self._sought}

    def decide(self, workers: Iterable[FleetWorker], held: Iterable[tuple[str, str]]) -> None:
        """End a round. held: nodes' ids with the folders of the instances that are there."""
        workers = list(workers)
        origins = [one.files for one in workers if one.files.origin and one.state == "ready"]
        self._revisions = {
            folder: revision for files in origins for folder, revision in files.paths.items()
        }
        self._sought = frozenset(
            folder
            for files in origins
            if not files.why
            for folder in self._common.paths
            if folder not in files.looked
        )
        # What an instance waits for comes first.
        found: dict[str, dict[str, None]] = {}
        for node, folder in (*sorted(self._wanted), *sorted(held)):
            if node and folder:
                found.setdefault(node, {})[folder] = None
        for one in workers if self._prefetched else ():
            for early in self._prefetched if one.node and one.state != "lost" else ():
                if early.is_for(one):
                    found.setdefault(one.node, {})[early.folder] = None
        self._wanted = set()
        self._wish = ClusterWish(
            common=self._common,
            folders={
                node: tuple(map(self._folder, folders)) for node, folders in sorted(found.items())
            },
        )

    def _folder(self, path: str) -> WantedFolder:
        return WantedFolder(
            folder=path,
            digest=self._digests.get(path, ""),
            revision=self._revisions.get(path, ""),
        )


def local_sources(worker: FleetWorker) -> frozenset[str]:
    """The sources whose files are on a worker's disk, or come there now."""
    files = worker.files
    found = {one.folder for one in files.folders if one.state in LOCAL}
    return frozenset(map(_source, found | files.paths.keys()))


def _source(folder: str) -> str:
    return str(ModelSource("path", folder))
