"""The folders that models start from, as workers are to have them: what the server's disk has."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvmig.core.storage_reads import StorageReads
from kvmig.fleet.model_files import ModelFiles
from kvmig.fleet.spec import PATH, ModelSpec
from kvmig.fleet.worker_files import PrefetchedFolder
from kvmig.fleet.worker_pool import WorkerPool
from kvmig.launcher.node_files import OWNER

log = logging.getLogger(__name__)

Found = TypeVar("Found")


class WorkerFolders:
    """`start` it, then `take_models` whenever they or their files have changed. Without workers it
    does nothing."""

    def __init__(
        self,
        pool: WorkerPool,
        files: ModelFiles,
        used: Callable[[], Collection[str]],
        most_bytes: int,
        reads: StorageReads | None = None,
    ) -> None:
        """used: folders that deployments were started from. most_bytes: of a node's files. reads:
        threads that look at folders."""
        self._pool = pool
        self._files = files
        self._used = used
        self._most_bytes = most_bytes
        self._reads = reads or StorageReads()

    async def start(self, fleet: str, term: int) -> None:
        """Mark the server's folder, so that nodes which see it know it. fleet, term: see
        `WorkerPool.take_lead`. Raises OSError."""
        if self._pool.there:
            self._pool.take_lead(fleet, term)
            root = self._files.folder.root
            read = partial(owner_word, root)
            word = await self._reads.read("the files of models", str(root), read)
            self._pool.files.take_place(str(root), word, self._most_bytes)

    async def take_models(self, specs: Collection[ModelSpec]) -> None:
        """Let workers have the folders and the fork servers of these models. specs: with folders
        as their sources, where they are whole."""
        if not self._pool.there:
            return
        self._pool.take_engines({one.library for one in specs} - {""})
        folder, whole = self._files.folder, self._files.whole()
        own = {one.folder for one in specs if one.source.startswith(PATH)} - whole.keys()
        older = {one for one in self._used() if one not in whole and folder.owns(one)}

        manifests = await self._look_at(older, lambda one: folder.manifest(Path(one).name))
        digests = {one: it.digest for one, it in manifests.items() if it is not None}
        there = await self._look_at(own, lambda one: Path(one).is_dir())
        paths = [one for one, is_there in there.items() if is_there]
        prefetched = [
            PrefetchedFolder(one.folder, one.worker_selector)
            for one in specs
            if one.prefetch and (one.folder in whole or one.folder in paths)
        ]
        self._pool.files.take_folders({**whole, **digests}, paths, prefetched)

    async def _look_at(
        self, folders: Collection[str], look: Callable[[str], Found]
    ) -> dict[str, Found]:
        """What is found in these folders; one that can't be looked at keeps no other one back."""

        async def look_alone(folder: str) -> None:
            try:
                found[folder] = await self._reads.read(
                    "the workers' files", folder, partial(look, folder)
                )
            except (OSError, ValueError) as error:
                log.warning("%s can't be looked at: %s", folder, error)

        found: dict[str, Found] = {}
        await asyncio.gather(*map(look_alone, folders))
        return found


def owner_word(root: Path) -> str:
    """The word in the fleet's folder of files. Raises OSError."""
    path = root / OWNER
    if path.exists():
        return path.read_text()
    word, written = secrets.token_hex(16), path.with_suffix(".new")
    written.write_text(word)
    written.rename(path)
    return word
