"""Models on workers whose files come there before their instances start."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvmig.fleet.spec import InstanceCounts
from kvmig.fleet.worker_files import PrefetchedFolder
from kvmig.fleet.workers import WorkerWish
from kvmig.launcher.node_files import FolderReport, NodeFilesReport, WantedFolder
from kvmig.launcher.node_reports import NodeMeasure, NodeReport
from tests.support.made_up_nodes import GIB, made_up_node, node_id
from tests.support.model_bench import silence
from tests.support.worker_bench import A, B, WorkerBench, row

FOLDER = "/data/files/whole/m"
SOURCE = f"path:{FOLDER}"
DIGEST = "of all files"
WANTED = (WantedFolder(folder=FOLDER, digest=DIGEST),)


def node(letter: str, state: str = "", memory: int = 8 * GIB, **more: Any) -> NodeReport:
    """A node with the model's files in this state; empty: nothing is known of them."""
    own = dict[str, Any](engines=more.pop("engines", ()))
    folders = (FolderReport(folder=FOLDER, state=state, **more),) if state else ()  # type: ignore[arg-type]
    files = NodeFilesReport(root="/data/files", folders=folders)
    measured = NodeMeasure(memory_total=memory, memory_free=memory, files=files, **own)
    return made_up_node(letter, measured=measured)


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WorkerBench]:
    silence(monkeypatch)  # what a deployment tells, the test says
    made = WorkerBench(tmp_path)
    made.pool.files.take_place("/data/files", "word", 0)
    made.pool.files.take_folders({FOLDER: DIGEST}, ())
    yield made
    await made.models.close()


def wanted(bench: WorkerBench) -> dict[str, tuple[WantedFolder, ...]]:
    return dict(bench.pool.wish().folders)


async def test_a_model_starts_once_its_files_are_on_its_worker(bench: WorkerBench) -> None:
    bench.see(node("a"))
    bench.add(source=SOURCE)
    assert wanted(bench) == {A: WANTED}
    assert bench.model.life.why == "on its worker its files are looked for"
    bench.see(node("a", "downloading", why="its files are downloaded: 1 GB of 2 GB"))
    bench.turn()
    assert bench.model.life.why == "on its worker its files are downloaded: 1 GB of 2 GB"
    bench.see(node("a", "whole"))
    bench.turn()
    assert bench.model.life.state == "starting"
    assert f"--instance-node=i0: {A}" in bench.start.words
    assert "--ray-files=/data/files" in bench.start.words
    assert wanted(bench) == {A: WANTED}, "they stay as long as its instance is there"


async def test_a_worker_that_has_the_files_is_preferred(bench: WorkerBench) -> None:
    bench.see(node("a", memory=64 * GIB), node("b", "whole"))
    bench.add(source=SOURCE)
    assert f"--instance-node=i0: {B}" in bench.start.words
    kept = bench.models.places.history.decision(bench.model.deployment, "i0")
    assert kept is not None
    assert [one.locality for one in kept.explanation.nodes] == [5.0, 0.0]


async def test_where_files_can_not_come_another_worker_is_taken(bench: WorkerBench) -> None:
    full = "its files can't be downloaded: the disk is too full: 9 bytes are needed, 5 are free"
    bench.see(node("a", "failed", why=full), node("b"))
    bench.add(source=SOURCE)
    assert wanted(bench) == {B: WANTED}
    refused = bench.models.why_not(bench.model).nodes[-1]
    assert (refused.node, refused.refusals[0].filter, refused.refusals[0].why) == (
        "worker-a", "files", full
    )  # fmt: skip


@pytest.mark.parametrize("source", [SOURCE, "path:/models/a"])
async def test_a_worker_whose_folder_can_not_be_used_is_refused(
    bench: WorkerBench, source: str
) -> None:
    origin = NodeFilesReport(origin=True, paths={"/models/a": "r7"})
    head = NodeMeasure(memory_total=GIB, memory_free=GIB, files=origin)
    broken = NodeFilesReport(why="/data/files can't be used for models' files: it is in use")
    measured = NodeMeasure(memory_total=8 * GIB, memory_free=8 * GIB, files=broken)
    bench.pool.files.take_folders({FOLDER: DIGEST}, ["/models/a"])
    bench.see(
        made_up_node("c", measured=head, total={}, free={}), made_up_node("a", measured=measured)
    )
    bench.turn()
    bench.add(source=source)
    assert bench.model.life.state == "waiting"
    refused = {one.node: one.refusals for one in bench.models.why_not(bench.model).nodes}
    assert refused["worker-a"][0].why == broken.why


async def test_callers_learn_no_reason_of_a_disk(bench: WorkerBench) -> None:
    bench.see(node("a", "failed", why="/data is full"))
    bench.add(source=SOURCE)
    why = "no room: no worker takes it now: of 1, 1 without its files"
    assert bench.model.life.why == why


async def test_an_engine_that_is_not_installed_refuses_its_worker(bench: WorkerBench) -> None:
    bench.see(node("a", "whole", engines=("vllm",)), node("b", engines=("toy", "vllm")))
    bench.add(source=SOURCE)
    assert wanted(bench) == {B: WANTED}


async def test_one_more_instance_is_added_once_its_files_are_there(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.see(node("a", "whole"), node("b"))
    bench.add(source=SOURCE, instances=InstanceCounts(min=1, max=2))
    bench.serve(monkeypatch, row("i0", A))
    spec = InstanceCounts(min=2, max=2)
    bench.add(source=SOURCE, instances=spec)
    assert await bench.orders() == []
    assert wanted(bench) == {A: WANTED, B: WANTED}
    bench.see(node("a", "whole"), node("b", "whole"))
    assert await bench.orders() == [("add", B)]


async def test_a_folder_of_the_users_is_used_only_where_it_is(bench: WorkerBench) -> None:
    def there(letter: str, has: bool) -> NodeReport:
        files = NodeFilesReport(
            root="/data/files", paths={"/models/a": "now"} if has else {}, looked=("/models/a",)
        )
        measured = NodeMeasure(memory_total=8 * GIB, memory_free=8 * GIB, files=files)
        return made_up_node(letter, measured=measured)

    bench.pool.files.take_folders({}, ["/models/a"])
    bench.see(there("a", False), there("b", True))
    bench.add()
    assert f"--instance-node=i0: {B}" in bench.start.words
    (_, refused) = bench.models.why_not(bench.model).nodes
    assert refused.refusals[0].why == "/models/a is not there"


def looking(letter: str, *looked: str, **more: Any) -> NodeReport:
    """A node that has looked for these folders of the user's, and has found none."""
    files = NodeFilesReport(root="/data/files", looked=looked, **more)
    measured = NodeMeasure(memory_total=8 * GIB, memory_free=8 * GIB, files=files)
    return made_up_node(letter, measured=measured)


async def test_a_folder_that_is_still_looked_for_is_not_called_missing(bench: WorkerBench) -> None:
    bench.pool.files.take_folders({}, ["/models/a"])
    bench.see(looking("a"), looking("b", "/models/a"))
    bench.add()
    assert bench.model.life.why == "its files are looked for on 1 of 2 workers"
    refused = bench.models.why_not(bench.model).nodes
    assert {one.node: one.refusals[0].why for one in refused} == {
        "worker-a": "its files are looked for", "worker-b": "/models/a is not there"
    }  # fmt: skip
    bench.see(looking("a", "/models/a"), looking("b", "/models/a"))
    bench.turn()
    why = "no room: no worker takes it now: of 2, 2 without its files"
    assert bench.model.life.why == why


async def test_no_worker_lacks_a_folder_until_the_servers_own_disk_was_looked_at(
    bench: WorkerBench,
) -> None:
    bench.pool.files.take_folders({}, ["/models/a"])
    bench.see(looking("c", origin=True), looking("a", "/models/a"))
    bench.turn()
    bench.add()
    assert bench.model.life.why == "its files are looked for on 2 of 2 workers"


async def test_a_worker_that_is_refused_for_something_else_is_not_waited_for(
    bench: WorkerBench,
) -> None:
    bench.pool.files.take_folders({}, ["/models/a"])
    bench.see(looking("a"))
    bench.pool.take_wishes([WorkerWish(name="worker-a", cordoned=True)])
    bench.turn()
    bench.add()
    assert bench.model.life.why == "no room: no worker takes it now: of 1, 1 cordoned"


async def test_a_folder_that_only_the_server_has_is_copied(bench: WorkerBench) -> None:
    files = NodeFilesReport(origin=True, paths={"/models/a": "r7"})
    measured = NodeMeasure(memory_total=GIB, memory_free=GIB, files=files)
    head = made_up_node("c", measured=measured, total={}, free={})
    bench.pool.files.take_folders({}, ["/models/a"])
    bench.see(head, node("a"))
    bench.add()
    bench.turn()
    assert wanted(bench) == {A: (WantedFolder(folder="/models/a", revision="r7"),)}
    assert bench.model.life.why == "on its worker its files are looked for"
    copy = FolderReport(folder="/models/a", revision="r7", state="whole")
    here = NodeFilesReport(root="/data/files", folders=(copy,))
    measured = NodeMeasure(memory_total=8 * GIB, memory_free=8 * GIB, files=here)
    bench.see(head, made_up_node("a", measured=measured))
    bench.turn()
    assert f"--instance-node=i0: {A}" in bench.start.words


async def test_files_of_a_prefetched_model_come_to_each_worker_with_its_labels(
    bench: WorkerBench,
) -> None:
    files = bench.pool.files
    files.take_folders({FOLDER: DIGEST}, (), [PrefetchedFolder(FOLDER, {"zone": "east"})])
    bench.pool.take_wishes([WorkerWish(name="worker-b", labels={"zone": "east"})])
    bench.see(node("a"), node("b"))
    bench.turn()
    assert wanted(bench) == {B: WANTED}
    files.take_folders({FOLDER: DIGEST}, (), [PrefetchedFolder(FOLDER, {})])
    bench.see(node("a"), node("b"), node("c"))
    bench.turn()
    assert wanted(bench) == dict.fromkeys((A, B, node_id("c")), WANTED)


async def test_what_an_instance_waits_for_comes_before_what_is_prefetched(
    bench: WorkerBench,
) -> None:
    other = "/data/files/whole/a"
    prefetched = [PrefetchedFolder(other, {})]
    bench.pool.files.take_folders({FOLDER: DIGEST, other: "x"}, (), prefetched)
    bench.see(node("a"))
    bench.add(source=SOURCE)
    assert [one.folder for one in wanted(bench)[A]] == [FOLDER, other]
