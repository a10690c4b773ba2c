"""Models' files as a server keeps them: fetched by real fetchers, from a hub of the tests' own."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmig.core.background import cancel_tasks
from kvmig.core.clock import monotonic
from kvmig.core.errors import ConfigError
from kvmig.fleet import model_files
from kvmig.fleet.files_table import read_files
from kvmig.fleet.model_files import FilesView, ModelFiles
from kvmig.fleet.settings import FleetSettings
from kvmig.fleet.spec import ModelSpec
from kvmig.fleet.store import FleetStore, NameTaken, NotThere
from kvmig.fleet.tables import StoreError
from kvmig.fleet.worker_folders import WorkerFolders
from kvmig.fleet.worker_pool import WorkerPool
from kvmig.sources.messages import FetchHeads, FetchLaunch
from tests.support.fleet_stores import ANNA, Place
from tests.support.model_hub import TOKEN, ModelHub, small_model
from tests.support.waiting import until

NAME = "org/small"
SOURCE = f"hf:{NAME}"
LARGE = 4_000_000
"""More than three pieces of the client's."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    with ModelHub() as made:
        made.add(NAME, small_model(LARGE))
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield made


class FilesBench:
    """A server's part that keeps files, and what is around it."""

    def __init__(self, store: FleetStore, folder: Path) -> None:
        self.store = store
        self.folder = folder
        self.used: set[str] = set()
        self.changes = 0

    async def _stored(self, call: Callable[..., Any], *args: Any) -> Any:
        return call(*args)

    async def _changed(self) -> None:
        self.changes += 1

    async def start(self, **more: Any) -> None:
        """As a server on that folder; after `close`, as the next one."""
        self.settings = FleetSettings(data=str(self.folder), **more)
        self.settings.path("logs").mkdir(parents=True, exist_ok=True)
        self.files = ModelFiles(
            self.settings, self.store.database, self._stored, self._changed, lambda: self.used,
            monotonic, time.time,
        )  # fmt: skip
        await self.files.start()
        self._running = asyncio.create_task(self.files.run())

    async def close(self) -> None:
        await cancel_tasks(self._running)
        await self.files.close()

    async def until(self, state: str, source: str = SOURCE) -> FilesView:
        def reached() -> bool:
            found = self.files.view(source)
            assert state == "failed" or found.state != "failed", found.why
            return found.state == state

        await until(reached)
        return self.files.view(source)


@pytest.fixture
async def bench(sqlite_place: Place, hub: ModelHub) -> AsyncIterator[FilesBench]:
    store = sqlite_place.store()
    store.open()
    made = FilesBench(store, sqlite_place.folder / "data")
    await made.start()
    yield made
    await made.close()
    store.close()


def is_there(found: FilesView) -> bool:
    return Path(found.folder).is_dir()


def weights_in(found: FilesView) -> bytes:
    return Path(found.folder, "model.safetensors").read_bytes()


def spec(source: str = SOURCE) -> ModelSpec:
    return ModelSpec(name="a", source=source)


async def test_a_model_of_the_catalogue_gets_its_files_once_whoever_asks(
    bench: FilesBench, hub: ModelHub
) -> None:
    await bench.files.take_models({"a": SOURCE, "b": f"hf:{NAME}", "c": "path:/elsewhere"})
    await asyncio.gather(*(bench.files.pull(SOURCE, ANNA) for _ in range(10)))
    missing = bench.files.missing(SOURCE)
    assert missing is not None
    assert not missing.failed
    found = await bench.until("whole")

    assert found.models == ["a", "b"]
    assert found.revision == hub.models[NAME].newest
    assert hub.downloads("model.safetensors") == [""]
    assert bench.files.missing(SOURCE) is None
    assert bench.files.resolved(spec()).folder == found.folder
    assert weights_in(found) == small_model(LARGE)["model.safetensors"]
    assert bench.changes == 1
    (row,) = read_files(bench.store.database)
    assert (row.size, row.digest, row.pulled) == (found.size, found.digest, True)


async def test_a_source_that_cannot_be_read_keeps_no_other_models_files_back(
    bench: FilesBench,
) -> None:
    odd = "of-tomorrow:org/name"
    await bench.files.take_models({"odd": odd, "b": SOURCE})
    assert [one.models for one in bench.files.views()] == [["b"]]
    missing = bench.files.missing(odd)
    assert missing is not None
    assert missing.failed
    assert bench.files.resolved(spec(odd)).source == odd
    assert bench.files.of_model(odd) is None


async def test_models_get_their_files_while_the_database_is_away(
    bench: FilesBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise StoreError("it is away")

    await bench.files.take_models({"a": "hf:org/gone"})
    with monkeypatch.context() as patch:
        patch.setattr(model_files, "write_files", away)
        patch.setattr(model_files, "forget_files", away)
        await bench.files.take_models({"b": SOURCE})
    assert [one.models for one in bench.files.views()] == [["b"]]


async def test_a_folder_that_cannot_be_looked_at_keeps_no_other_one_from_workers(
    bench: FilesBench, tmp_path: Path
) -> None:
    pool = WorkerPool("auto")
    folders = WorkerFolders(pool, bench.files, set, 0)
    await folders.start("fleet", 1)
    long = f"path:/{'x' * 300}"
    await folders.take_models([spec(long), spec(f"path:{tmp_path}")])
    pool.decide_nodes((), ())
    assert pool.wish().common.paths == (str(tmp_path),)


@pytest.mark.long
async def test_a_token_is_in_no_log_row_and_answer(bench: FilesBench, hub: ModelHub) -> None:
    hub.models[NAME].gated = True
    hub.add("org/other", small_model(), gated=True)
    await bench.files.pull(SOURCE, ANNA)
    found = await bench.until("whole")
    kept = [str(found), str(bench.store.audit()), str(read_files(bench.store.database))]
    logs = [one.read_text() for one in bench.settings.path("logs").iterdir()]
    assert not any(TOKEN in one for one in [*kept, *logs])


@pytest.mark.long
async def test_a_fetcher_that_is_killed_is_started_again_and_goes_on(
    bench: FilesBench, hub: ModelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmig.sources.download_state.FIRST_RETRY_S", 0.1)
    hub.faults.hold_after = 3_500_000
    await bench.files.pull(SOURCE, ANNA)
    await until(lambda: bench.files.view(SOURCE).done > 2_000_000)
    os.kill(bench.files.fetchers()[SOURCE], signal.SIGKILL)
    failed = await bench.until("failed")
    assert "its fetcher ended (killed by SIGKILL)" in failed.why
    hub.faults.hold_after = None
    hub.faults.held.set()
    await bench.files.pull(SOURCE, ANNA)
    await bench.until("whole")
    assert int(hub.downloads("model.safetensors")[-1].removeprefix("bytes=").rstrip("-")) > 0


async def test_the_next_server_goes_on_with_a_download(bench: FilesBench, hub: ModelHub) -> None:
    hub.faults.hold_after = 3_500_000
    await bench.files.take_models({"a": SOURCE})
    await until(lambda: bench.files.view(SOURCE).done > 2_000_000)
    await bench.close()
    hub.faults.hold_after = None
    hub.faults.held.set()

    await bench.start()
    await bench.files.take_models({"a": SOURCE})
    await bench.until("whole")
    assert int(hub.downloads("model.safetensors")[-1].removeprefix("bytes=").rstrip("-")) > 0
    await bench.close()

    await bench.start()
    hub.faults.statuses = [500] * 100
    assert bench.files.missing(SOURCE) is None  # what is there serves without the hub


@pytest.mark.long
async def test_files_that_nobody_uses_go_for_others_and_pinned_ones_stay(
    bench: FilesBench, hub: ModelHub
) -> None:
    await bench.close()
    for name in ("org/b", "org/c", "org/d"):
        hub.add(name, small_model(LARGE + len(hub.models)))
    await bench.start(files_bytes=9_000_000)
    for name in ("org/small", "org/b"):
        await bench.files.pull(f"hf:{name}", ANNA)
        await bench.until("whole", f"hf:{name}")
    await bench.files.pin(SOURCE, True, ANNA)
    before = bench.files.view("hf:org/b")
    await bench.files.pull("hf:org/c", ANNA)
    await bench.until("whole", "hf:org/c")
    with pytest.raises(NotThere, match="there are no files of hf:org/b"):
        bench.files.view("hf:org/b")
    assert not is_there(before)

    await bench.files.take_models({"c": "hf:org/c"})
    await bench.files.pull("hf:org/d", ANNA)
    failed = await bench.until("failed", "hf:org/d")
    assert "more than --model-files allows (9000000)" in failed.why
    assert {one.source for one in bench.files.views() if one.folder} == {SOURCE, "hf:org/c"}
    with pytest.raises(NameTaken, match="hf:org/c is used by c"):
        await bench.files.remove("hf:org/c", ANNA)
    await bench.files.take_models({})
    bench.used.add(bench.files.view("hf:org/c").folder)
    with pytest.raises(NameTaken, match="is used by a deployment"):
        await bench.files.remove("hf:org/c", ANNA)
    bench.used.clear()
    await bench.files.remove("hf:org/c", ANNA)
    assert not any(one.source == "hf:org/c" for one in bench.files.views())


@pytest.mark.long
async def test_a_full_disk_refuses_before_a_byte_comes_and_names_the_bytes(
    bench: FilesBench, hub: ModelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "free_bytes", lambda _: 1000)
    await bench.files.take_models({"a": SOURCE})
    failed = await bench.until("failed")
    assert "the disk is too full: 4001" in failed.why
    assert "bytes are needed, 0 are free, without" in failed.why
    assert hub.downloads("model.safetensors") == []
    missing = bench.files.missing(SOURCE)
    assert missing is not None
    assert missing.failed
    assert "disk" not in missing.why  # any caller of the model gets it


async def test_two_downloads_do_not_get_the_same_bytes_of_the_limit(
    bench: FilesBench, hub: ModelHub
) -> None:
    await bench.close()
    hub.add("org/b", small_model(LARGE + 1))
    hub.faults.hold_after = 3_500_000
    await bench.start(files_bytes=6_000_000)
    await bench.files.pull(SOURCE, ANNA)
    await until(lambda: bench.files.view(SOURCE).done > 2_000_000)
    await bench.files.pull("hf:org/b", ANNA)
    failed = await bench.until("failed", "hf:org/b")
    assert "more than --model-files allows (6000000)" in failed.why


async def test_a_download_that_failed_leaves_nothing_once_it_is_removed(
    bench: FilesBench, hub: ModelHub
) -> None:
    hub.faults.other_bytes = {"model.safetensors": b"x" * LARGE}
    await bench.files.pull(SOURCE, ANNA)
    await bench.until("failed")
    await until(lambda: not bench.files.fetchers())
    hub.faults.statuses = [500] * 100
    await bench.files.pull("hf:org/other", ANNA)  # one that fails stops the tidying
    gone = await asyncio.gather(
        *(bench.files.remove(SOURCE, ANNA) for _ in range(2)), return_exceptions=True
    )
    assert [type(one) for one in gone] == [type(None), NotThere]
    assert not any((bench.files.folder.root / "part").iterdir())
    assert [one.source for one in read_files(bench.store.database)] == ["hf:org/other"]


async def test_a_model_that_is_removed_while_its_files_come_ends_their_download(
    bench: FilesBench, hub: ModelHub
) -> None:
    hub.faults.hold_after = 100_000
    await bench.files.take_models({"a": SOURCE})
    await bench.until("downloading")
    await bench.files.take_models({})
    assert bench.files.views() == []
    assert read_files(bench.store.database) == []
    assert not any((bench.files.folder.root / "part").iterdir())


@pytest.mark.long
async def test_a_new_commit_takes_effect_and_the_old_folder_stays_while_it_serves(
    bench: FilesBench, hub: ModelHub
) -> None:
    await bench.files.take_models({"a": SOURCE})
    first = await bench.until("whole")
    bench.used.add(first.folder)
    hub.models[NAME].commit({**small_model(LARGE), "config.json": b"{}"})
    await bench.files.pull(SOURCE, ANNA)
    assert bench.files.missing(SOURCE) is None  # it starts from the old ones meanwhile
    await until(lambda: bench.files.view(SOURCE).revision != first.revision)
    await until(lambda: not bench.files.fetchers())
    assert is_there(first)
    bench.used.clear()
    await bench.files.tidy()
    assert not is_there(first)
    assert is_there(bench.files.view(SOURCE))


async def test_what_is_no_remote_source_is_refused(bench: FilesBench) -> None:
    with pytest.raises(ConfigError, match="is on this disk already"):
        await bench.files.pull("path:/models/a", ANNA)
    with pytest.raises(NotThere, match="there are no files of hf:org/none"):
        await bench.files.pin("hf:org/none", True, ANNA)


async def test_a_second_fleet_on_the_same_folder_is_refused_and_removes_nothing(
    bench: FilesBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "HOLD_S", 0.2)
    await bench.files.take_models({"a": SOURCE})
    found = await bench.until("whole")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "files").symlink_to(bench.settings.files)
    second = FilesBench(bench.store, tmp_path / "other")
    with pytest.raises(ConfigError, match=f"files is in use by process {os.getpid()}"):
        await second.start()
    assert is_there(found)


async def test_what_a_failed_download_left_is_counted_by_the_next_server_and_goes_with_its_source(
    bench: FilesBench, hub: ModelHub
) -> None:
    hub.faults.hold_after = 3_500_000
    await bench.files.pull(SOURCE, ANNA)
    await until(lambda: bench.files.view(SOURCE).done > 2_000_000)
    await bench.close()
    hub.faults.statuses = [500] * 1000
    hub.faults.held.set()

    await bench.start()
    assert bench.files.view(SOURCE).done > 2_000_000
    await bench.until("failed")
    await until(lambda: not bench.files.fetchers())
    assert bench.files.view(SOURCE).done > 2_000_000
    await bench.files.remove(SOURCE, ANNA)
    assert not any((bench.files.folder.root / "part").iterdir())


async def test_what_a_download_left_of_a_source_that_nobody_wants_is_removed_at_the_start(
    bench: FilesBench, hub: ModelHub
) -> None:
    await bench.close()
    bench.files.folder.begin("small-0123", "hf:org/unknown")
    await bench.start()
    assert not any((bench.files.folder.root / "part").iterdir())


async def test_evaluations_start_two_fetchers_at_once_however_many_ask(
    bench: FilesBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SlowChild:
        running = most = 0

        @classmethod
        async def begin(cls, launch: FetchLaunch, log: Path) -> SlowChild:
            assert launch.heads
            cls.running += 1
            cls.most = max(cls.most, cls.running)
            return cls()

        async def reports(self) -> AsyncIterator[FetchHeads]:
            await asyncio.sleep(0.01)
            yield FetchHeads("folder", "abc")

        async def end(self) -> None:
            SlowChild.running -= 1

    monkeypatch.setattr(model_files, "FetcherChild", SlowChild)
    asked = (bench.files.heads(f"hf:org/m{at}") for at in range(20))
    assert await asyncio.gather(*asked) == ["folder"] * 20
    assert SlowChild.most == 2
