"""What is wanted of the nodes of a Ray cluster: above all models' files, which a node is to have,
and which it has. Pure.

A folder is named by its path on the machine of the fleet's server. A node has those that were
downloaded at the same path, or in the folder that KVMIG_FILES names on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import msgspec

from kvmig.core.order_fence import NO_TOKEN, OrderToken
from kvmig.sources.download_state import State
from kvmig.sources.files_folder import folder_name
from kvmig.sources.source import ModelSource

FILES_VARIABLE = "KVMIG_FILES"
"""Environment variable of a node: its folder of models' files."""
WHOLE = "whole"
COPIES = "copies"
"""Links to the newest copies of the user's folders."""
OWNER = "fleet.id"
"""A file with the word of the fleet whose server fetches into this folder."""


class WantedFolder(msgspec.Struct, frozen=True, kw_only=True):
    """A folder with a model's files that a node is to have."""

    folder: str
    digest: str = ""
    """SHA-256 of the names and digests of all files of one that was downloaded."""
    revision: str = ""
    """The state at the server of a folder of the user's. Without both it is kept, not fetched."""

    @property
    def name(self) -> str:
        """The name of the folder on a node."""
        if self.revision:
            return folder_name(ModelSource("path", self.folder), self.revision)
        return Path(self.folder).name


class FilesWish(msgspec.Struct, frozen=True, kw_only=True):
    """Which models' files one node is to have."""

    root: str = ""
    """The server's folder of models' files."""
    word: str = ""
    """The word that is in it: a node that sees it has the server's disk."""
    most_bytes: int = 0
    """Bytes of all files together; 0: no limit but the disk's."""
    paths: tuple[str, ...] = ()
    """Folders of the user's; the node reports whether it has them."""
    folders: tuple[WantedFolder, ...] = ()


class WantedUnit(msgspec.Struct, frozen=True, kw_only=True):
    """A unit that a node is to have, see `kvmig.launcher.node_units`."""

    path: str
    """The unit's socket on the server's machine, which names it."""
    memory: int
    """Bytes of KV cache that its agent leases; 0: its instances share none, and it has no agent."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the node's GPUs that the unit may have; none: its instances run on CPUs."""
    count: int = 1
    """How many of these it is to have."""


class NodeWish(msgspec.Struct, frozen=True, kw_only=True):
    """What is wanted of one node."""

    files: FilesWish = FilesWish()
    engines: tuple[str, ...] = ()
    """The engines of which it is to have fork servers."""
    environment: Mapping[str, str] = {}
    """Variables of the user's that instances have on each node."""
    units: tuple[WantedUnit, ...] = ()
    fleet: str = ""
    """The word of the fleet, the same for all of its servers."""
    token: OrderToken = NO_TOKEN
    """The token of the server that wishes this, see `kvmig.core.order_fence`."""


class ClusterWish(msgspec.Struct, frozen=True, kw_only=True):
    """What is wanted of all nodes."""

    common: FilesWish = FilesWish()
    """What is wanted of each, without folders."""
    engines: tuple[str, ...] = ()
    """The engines of which each is to have fork servers."""
    threads: int = 1
    """Threads of each worker of an instance on a CPU."""
    fleet: str = ""
    """The word of the fleet, see `NodeWish`."""
    term: int = 0
    """The term of the server; 0: it does not lead."""
    folders: Mapping[str, tuple[WantedFolder, ...]] = {}
    """Folders by nodes' ids."""
    units: Mapping[str, tuple[WantedUnit, ...]] = {}
    """The same of units."""
    bundles: tuple[Mapping[str, float], ...] | None = None
    """What Ray's autoscaler is asked for, see `kvmig.fleet.node_reserve`; None: nothing."""

    def of_node(self, node: str, environment: Mapping[str, str]) -> NodeWish:
        """What is wanted of one. environment: of the fleet's server."""
        return NodeWish(
            files=msgspec.structs.replace(self.common, folders=self.folders.get(node, ())),
            engines=self.engines,
            environment=environment,
            units=self.units.get(node, ()),
            fleet=self.fleet,
            token=OrderToken(self.term),
        )


class FolderReport(msgspec.Struct, frozen=True, kw_only=True):
    """A folder on a node. Sizes are bytes."""

    folder: str
    source: str = ""
    """The source of its files; empty: not known yet."""
    revision: str = ""
    """The state of a folder of the user's of which this is a copy; empty: it is none."""
    state: State
    size: int = 0
    """Size of the whole; 0: not known yet."""
    done: int = 0
    why: str = ""
    """How far it is, or why it can't be fetched; empty: it is whole."""
    took_s: float | None = None
    """Seconds that its download took; None: it was there before the agent."""


class NodeFilesReport(msgspec.Struct, frozen=True, kw_only=True):
    """Models' files on a node."""

    root: str = ""
    """The node's folder of them."""
    shared: bool = False
    """Whether that is the server's own, so that nothing is fetched."""
    origin: bool = False
    """Whether the node sees the server's folder, so that others can read it there."""
    free_bytes: int = 0
    """Free bytes of the disk."""
    why: str = ""
    """Why the folder can't be used; empty: it can."""
    paths: Mapping[str, str] = {}
    """Folders of the user's that are there themselves, with their states."""
    looked: tuple[str, ...] = ()
    """Folders of the user's that were looked for."""
    folders: tuple[FolderReport, ...] = ()

    def folder(self, name: str, revision: str = "") -> FolderReport | None:
        """What is known of a folder; None: nothing of it is there."""
        found = (one for one in self.folders if (one.folder, one.revision) == (name, revision))
        return next(found, None)


def encode_wish(wish: ClusterWish) -> bytes:
    """The wish as a line."""
    return msgspec.json.encode(wish) + b"\n"


def wish_of(line: bytes) -> ClusterWish:
    """Raises msgspec.DecodeError."""
    return msgspec.json.decode(line, type=ClusterWish)


def folder_on_node(folder: str, root: str, own: str) -> str:
    """The path of a folder on a node. root: the server's folder of files. own: the node's; empty:
    it has the same path."""
    path, whole = Path(folder), Path(root) / WHOLE
    if not own or not root or path.parent != whole:
        return folder
    return str(Path(own) / WHOLE / path.name)


def copy_link(root: str, folder: str) -> Path:
    """The link to a node's copy of a folder of the user's. root: the node's folder of files."""
    return Path(root) / COPIES / blake2b(folder.encode(), digest_size=16).hexdigest()
