"""What models' files say, read while the server's event loop goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvmig.core.errors import ConfigError
from kvmig.core.storage_reads import StorageReads, StorageSilent
from kvmig.fleet.catalogue import CatalogueReader
from kvmig.fleet.managed_model import CatalogEntry
from kvmig.fleet.model_folders import WatchedFolders
from kvmig.fleet.spec import ModelSpec
from kvmig.fleet.tables import StoreError
from tests.support.fleet_api import Api, said
from tests.support.fleet_stores import Place
from tests.support.hung_files import HungFile, until_readers
from tests.support.waiting import until

SILENT_S = 0.4


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[HungFile]:
    """The configuration of a model whose storage doesn't answer."""
    folder = tmp_path / "away"
    folder.mkdir()
    made = HungFile(folder / "config.json")
    yield made
    made.release()


@pytest.fixture
async def api(sqlite_place: Place) -> AsyncIterator[Api]:
    made = Api(sqlite_place, silent_s=SILENT_S)
    await made.backend.stored(made.store.open)
    yield made
    await made.close()


def spec(folder: Path, name: str = "m") -> ModelSpec:
    return ModelSpec(name=name, source=f"path:{folder}")


async def turns_until(done: asyncio.Task[object]) -> int:
    """How often the event loop turned until then."""
    turns = 0
    while not done.done():
        turns += 1
        await asyncio.sleep(0.01)
    return turns


@pytest.mark.parametrize(("path", "right"), [("models", 201), ("evaluate", 200)])
async def test_a_model_on_storage_that_hangs_is_refused_by_name_and_file_and_others_are_served(
    api: Api, hung: HungFile, path: str, right: int
) -> None:
    body = {"name": "far", "source": f"path:{hung.path.parent}"}
    asking = asyncio.create_task(api.ask("POST", path, body))
    assert (await api.ask("GET", "models"))[0] == 200
    assert await turns_until(asking) > 5
    status, sentence = said(await asking)
    words = f"model far: {hung.path} can't be read: its storage does not answer within 0.4 s"
    assert (status, sentence) == (503, words)
    hung.answer(b'{"architectures": ["L"]}')
    await until_readers(0)
    assert (await api.ask("POST", path, body))[0] == right


async def test_a_folder_that_can_not_be_looked_at_holds_no_other_call(
    api: Api, hung: HungFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether there is a folder is asked first, when a specification is read."""
    is_dir = Path.is_dir

    def look(path: Path) -> bool:
        if path == hung.path.parent:
            hung.path.read_bytes()
        return is_dir(path)

    monkeypatch.setattr("kvmig.fleet.spec.Path.is_dir", look)
    body = {"name": "far", "source": f"path:{hung.path.parent}"}
    for path, sent in (("models", body), ("apply", {"fleet": {"models": [body]}})):
        asking = asyncio.create_task(api.ask("POST", path, sent))
        assert await turns_until(asking) > 5
        status, sentence = said(await asking)
        assert status == 503
        words = f"model far: {hung.path.parent} can't be read: its storage does not answer"
        assert sentence.startswith(words)


async def test_what_changed_in_a_folder_is_known_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmig.fleet.model_folders.LOOK_S", 0.01)
    folders, config = WatchedFolders(StorageReads()), tmp_path / "config.json"
    config.write_text('{"architec')
    await folders.take_models([spec(tmp_path)])
    assert folders.facts_of(spec(tmp_path)).config == {}
    watching = asyncio.create_task(folders.run())
    before = folders.changes
    config.write_text('{"architectures": ["L"]}')
    await until(lambda: folders.facts_of(spec(tmp_path)).config)
    assert folders.changes == before + 1
    watching.cancel()


async def test_a_model_whose_storage_hangs_waits_and_starts_once_it_answers(
    api: Api, hung: HungFile
) -> None:
    far = spec(hung.path.parent, "far")
    await api.folders.take_models([far])
    assert api.folders.is_silent(far.source)
    with pytest.raises(StorageSilent, match="model far"):
        await api.folders.learn(far)
    assert not api.folders.is_silent("path:/else")
    hung.answer(b"{}")
    await until_readers(0)
    await api.folders.learn(far)
    assert not api.folders.is_silent(far.source)


async def test_claims_follow_what_files_say_later(api: Api, tmp_path: Path) -> None:
    config = {"vocab_size": 2048, "hidden_size": 256, "num_attention_heads": 8}
    one = spec(tmp_path)
    await api.folders.take_models([one])
    api.models.take_catalogue([CatalogEntry("m1", "m", 1, True, one)])
    api.models.reconcile()
    model = api.models.shown("m")
    assert model is not None
    before = model.claim
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    await api.folders.learn(one)
    api.models.reconcile()
    assert model.claim != before


async def test_a_file_that_may_not_be_read_is_named_with_its_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    folders = WatchedFolders(StorageReads())
    words = f"model m: {tmp_path / 'config.json'} can't be read: Is a directory"
    with pytest.raises(ConfigError, match=words):
        await folders.learn(spec(tmp_path))


async def test_a_catalogue_on_storage_that_hangs_is_refused_in_time(hung: HungFile) -> None:
    reader = CatalogueReader(str(hung.path), lambda: 0.0, StorageReads(silent_s=SILENT_S))
    with pytest.raises(StoreError, match=f"{hung.path} can't be read: its storage"):
        await reader.read()
    await reader.close()
