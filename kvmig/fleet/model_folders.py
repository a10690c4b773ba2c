"""What the files in models' folders say of the models; read again only when they have changed."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvmig.core.errors import ConfigError
from kvmig.core.read_progress import note_path
from kvmig.core.storage_reads import StorageReads, StorageSilent
from kvmig.fleet.model_shapes import NO_FACTS, FolderFacts
from kvmig.fleet.spec import PATH, ModelSpec
from kvmig.launcher.environment import weights_of

LOOK_S = 5.0
"""Pause between two looks at all models' folders."""
MOST_FOLDERS = 1024
"""Folders that are remembered."""

log = logging.getLogger(__name__)


class _TokenizerModel(msgspec.Struct):
    vocab: dict[str, msgspec.Raw] | list[msgspec.Raw] = []
    merges: list[msgspec.Raw] = []


class _TokenizerFile(msgspec.Struct):
    model: _TokenizerModel


class _KeptFile(NamedTuple):
    """What a file has said; size, at: its bytes and its last change, in nanoseconds."""

    size: int
    at: int
    found: Any


class ModelFolders:
    """Reads folders when it is asked for them: for a program that has nothing else to do.

    Of a file that can't be read, or is half written, nothing is remembered.
    """

    def __init__(self) -> None:
        self.changes = 0
        """How often the folder of a model of the catalogue was found to say something else."""
        self._files: OrderedDict[Path, _KeptFile] = OrderedDict()

    def facts_of(self, spec: ModelSpec) -> FolderFacts:
        """What the model's files say. Raises OSError."""
        folder = folder_of(spec)
        return self.read_folder(folder) if folder else NO_FACTS

    async def learn(self, spec: ModelSpec) -> None:
        """Know what the model's files say now. Raises ConfigError, StorageSilent; both name the
        model and the file."""
        try:
            self.facts_of(spec)
        except OSError as error:
            raise _unread(spec, error) from error

    def read_folder(self, folder: str) -> FolderFacts:
        """What the files there say. Raises OSError."""
        place = Path(folder)
        entries, merges = self._read(place / "tokenizer.json", _tokenizer, (0, 0))
        return FolderFacts(
            config=self._read(place / "config.json", _config, {}),
            entries=entries,
            merges=merges,
            usual_bytes=weights_of(folder),
            wide_bytes=weights_of(folder, "float32"),
        )

    def _read(self, path: Path, parse: Callable[[bytes], Any], empty: Any) -> Any:
        """What the file says; `empty`: there is none that can be read."""
        note_path(path)
        try:
            seen = path.stat()
            kept = self._files.get(path)
            if kept is not None and (kept.size, kept.at) == (seen.st_size, seen.st_mtime_ns):
                return kept.found
            found = parse(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            self._files.pop(path, None)
            return empty
        self._files[path] = _KeptFile(seen.st_size, seen.st_mtime_ns, found)
        while len(self._files) > 2 * MOST_FOLDERS:
            self._files.popitem(last=False)
        return found


class WatchedFolders(ModelFolders):
    """Reads folders on threads, for the server's event loop, which looks only at what is known
    already. `run` it as a task."""

    def __init__(self, reads: StorageReads) -> None:
        super().__init__()
        self._reads = reads
        self._known: OrderedDict[str, FolderFacts] = OrderedDict()
        self._wanted: Mapping[str, ModelSpec] = {}
        """Models of the catalogue, by their folders."""
        self._silent: set[str] = set()
        """Folders whose storage doesn't answer."""

    def facts_of(self, spec: ModelSpec) -> FolderFacts:
        """What is known of the model's files."""
        return self._known.get(folder_of(spec), NO_FACTS)

    async def learn(self, spec: ModelSpec) -> None:
        """See `ModelFolders.learn`."""
        if not (folder := folder_of(spec)):
            return
        read = partial(self.read_folder, folder)
        try:
            found = await self._reads.read(f"model {spec.name}", folder, read)
        except StorageSilent:
            self._silent.add(folder)
            raise
        except OSError as error:
            raise _unread(spec, error) from error
        self._silent.discard(folder)
        before = self._known.pop(folder, None)
        self._known[folder] = found
        while len(self._known) > MOST_FOLDERS:
            self._known.popitem(last=False)
        self.changes += folder in self._wanted and before != found

    async def take_models(self, specs: Iterable[ModelSpec]) -> None:
        """Watch the folders of these models. Those that are new are read, as far as their storage
        answers."""
        self._wanted = {folder: one for one in specs if (folder := folder_of(one))}
        self._silent &= self._wanted.keys()
        known = self._known.keys() | self._silent
        await self._read_all([one for folder, one in self._wanted.items() if folder not in known])

    async def run(self) -> None:
        """Read what has changed, every LOOK_S, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self._read_all(list(self._wanted.values()))

    def is_silent(self, source: str) -> bool:
        """Whether the storage of a source's folder does not answer, as far as is known."""
        return source.removeprefix(PATH) in self._silent

    async def _read_all(self, specs: list[ModelSpec]) -> None:
        await asyncio.gather(*map(self._read_alone, specs))

    async def _read_alone(self, spec: ModelSpec) -> None:
        """Read one folder; one that can't be read keeps no other one from it."""
        try:
            await self.learn(spec)
        except StorageSilent:
            pass  # `StorageReads` has logged it, and the model waits
        except ConfigError as error:  # its start says it again
            log.warning("%s", error)


def folder_of(spec: ModelSpec) -> str:
    """The folder with the model's files; empty: there is none, or not yet."""
    return spec.folder if spec.engine != "toy" and spec.source.startswith(PATH) else ""


def _unread(spec: ModelSpec, error: OSError) -> ConfigError:
    path = error.filename or spec.folder
    return ConfigError(f"model {spec.name}: {path} can't be read: {error.strerror or error}")


def _config(content: bytes) -> dict[str, object]:
    found = json.loads(content)
    return found if isinstance(found, dict) else {}


def _tokenizer(content: bytes) -> tuple[int, int]:
    """Entries and merges."""
    found = msgspec.json.decode(content, type=_TokenizerFile)
    return len(found.model.vocab), len(found.model.merges)
