"""Repositories whose files a mirror has before the first call, on each host that joins."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Sequence
from urllib.parse import quote

from kvmig.core.errors import KvmigError
from kvmig.mirror.addresses import COMMIT, FileAddress, ListAddress
from kvmig.mirror.errors import PlaceGone
from kvmig.mirror.hub_mirror import HubMirror
from kvmig.sources.file_list import RemoteFile, check_count, check_name, chosen

MAIN = "main"
LOOK_S = 600.0
"""Pause between two looks for a new commit."""
RETRY_S = 30.0
"""Pause after a failure."""

log = logging.getLogger(__name__)


class RepositoryPrefetch:
    """Models of the hub that need no token: the mirror has none."""

    def __init__(self, mirror: HubMirror, repositories: Sequence[str]) -> None:
        self._mirror = mirror
        self._repositories = repositories

    async def run(self) -> None:
        """Have the files here, and those of newer commits, until cancelled."""
        while True:
            pause_s = LOOK_S
            for one in self._repositories:
                try:
                    await self.fetch(one)
                except (KvmigError, OSError) as error:
                    log.warning("the files of %s are not all here yet: %s", one, error)
                    pause_s = RETRY_S
            await asyncio.sleep(pause_s)

    async def fetch(self, repository: str) -> None:
        """Have the newest commit's files here, one after the other. Raises KvmigError, OSError."""
        path = f"/api/models/{repository}/revision/{MAIN}"
        found, _ = await self._mirror.find_list(ListAddress(repository, MAIN, path), "")
        commit, names = listed(repository, b"" if found is None else found.body)
        for name in names:
            address = FileAddress(repository, commit, quote(name))
            facts, _ = await self._mirror.find_file(address, "")
            if facts is None or not facts.size or self._mirror.folder.has(facts.etag):
                continue
            content = await self._mirror.read_file(address, "", facts, None)
            async with contextlib.aclosing(content.pieces) as pieces:
                async for _ in pieces:
                    pass


def listed(repository: str, body: bytes) -> tuple[str, list[str]]:
    """The commit, and the files of it that engines read. Raises PlaceGone, SourceFailure."""
    try:
        found = json.loads(body)
        commit, names = found["sha"], [one["rfilename"] for one in found["siblings"]]
        sound = isinstance(commit, str) and COMMIT.fullmatch(commit)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PlaceGone(f"the hub's list of {repository} can't be read") from error
    if not sound or not all(isinstance(one, str) for one in names):
        raise PlaceGone(f"the hub's list of {repository} can't be read")
    check_count(repository, len(names))
    for one in names:
        check_name(repository, one)
    return commit, [one.name for one in chosen([RemoteFile(name, 0) for name in names])]
