"""Models' files on the nodes of a real Ray cluster, which are processes of this machine with
folders of their own: one download from the hub, however many nodes have the model. The tests are in
order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleets import ToyFleet, answer, ask, counted, kill
from tests.support.model_hub import ModelHub, small_model
from tests.support.waiting import until_yes, wait_until

pytest.importorskip("ray", reason="needs the extra kvmig[ray]")
from ray.cluster_utils import Cluster

from tests.support.ray_nodes import RAYS_OWN, STORE_BYTES

pytestmark = [pytest.mark.server, pytest.mark.long]

NAMES = ("left", "middle", "right")
SIZE = 6_000_000
SMALL, OTHER = "hf:Org/Small-1B", "hf:Org/Other-1B"
COUNT = Path(__file__).parents[2] / "kvmig" / "models" / "count"
FLAGS = ["--enforce-eager", "--block-size=32", "--kv-cache-memory-bytes=268435456"]
EVERYWHERE = dict.fromkeys(("head", *NAMES), "whole")


class NodesWithFiles:
    """A Ray cluster whose nodes have names, two CPUs and a folder of models' files each; the head
    has no CPU."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES,
                "node_name": "head"}  # fmt: skip
        self.cluster = Cluster(initialize_head=True, head_node_args=head)

    def add(self, name: str, *, shares: bool = False) -> None:
        """shares: whether it sees the fleet's own folder, as one does by NFS, and has none."""
        own = {} if shares else {"KVMIG_FILES": str(self.folder / name)}
        self.cluster.add_node(
            num_cpus=2, node_name=name, object_store_memory=STORE_BYTES, env_vars=own
        )

    def weights(self, name: str) -> list[Path]:
        """The files with weights in a node's folder that models start from."""
        return sorted((self.folder / name / "whole").glob("*/*.safetensors"))


@pytest.fixture(scope="module")
def hub() -> Iterator[ModelHub]:
    with ModelHub() as made:
        made.add("Org/Small-1B", small_model(SIZE))
        made.add("Org/Other-1B", small_model(SIZE // 2))
        yield made


@pytest.fixture(scope="module")
def nodes(hub: ModelHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodesWithFiles]:
    with pytest.MonkeyPatch.context() as patched:
        for name, value in RAYS_OWN.items():
            patched.setenv(name, value)
        patched.setenv("HF_ENDPOINT", hub.url)
        patched.setenv("HF_HUB_OFFLINE", "0")
        made = NodesWithFiles(tmp_path_factory.mktemp("nodes"))
        try:
            for name in NAMES[:2]:
                made.add(name)
            yield made
        finally:
            made.cluster.shutdown()


@pytest.fixture(scope="module")
def fleet(nodes: NodesWithFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyFleet]:
    flags = (f"--ray={nodes.cluster.address}", "--threads=1")
    with ToyFleet(tmp_path_factory.mktemp("fleet"), *flags) as made:
        wait_until(lambda: ready(made) >= {*NAMES[:2]})
        yield made


def workers(fleet: ToyFleet) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in fleet.get("workers")["data"]}


def ready(fleet: ToyFleet) -> set[str]:
    return {name for name, one in workers(fleet).items() if one["state"] == "ready"}


def on_workers(fleet: ToyFleet, source: str) -> dict[str, str]:
    """States of a source's files, by the workers' names."""
    (one,) = fleet.get(f"files?source={source}")["data"]
    return {name: it["state"] for name, it in one["workers"].items()}


async def test_three_nodes_get_a_model_with_one_download_and_serve_it(
    fleet: ToyFleet, nodes: NodesWithFiles, hub: ModelHub
) -> None:
    nodes.add("right")
    await until_yes(lambda: ready(fleet) >= {*NAMES})
    fleet.add_toy("a", source=SMALL, instances={"min": 3, "max": 3})
    fleet.until("models/a", state="serving", serving=3)
    async with fleet.client() as client:
        assert await answer(client, ask("a", 20)) == counted(20)
    await until_yes(lambda: on_workers(fleet, SMALL) == EVERYWHERE)
    sent = small_model(SIZE)["model.safetensors"]
    for name in NAMES:
        (weights,) = nodes.weights(name)
        assert weights.read_bytes() == sent
    assert hub.downloads("model.safetensors") == [""]
    shown = fleet.get("workers/right")["files"]
    assert shown["folder"] == str(nodes.folder / "right")
    (one,) = shown["models"]
    assert (one["source"], one["state"], one["took_s"] > 0) == (SMALL, "whole", True)


async def test_a_prefetched_model_is_on_every_node_before_it_starts(
    fleet: ToyFleet, nodes: NodesWithFiles, hub: ModelHub
) -> None:
    fleet.add_toy("early", source=OTHER, prefetch=True)
    await until_yes(lambda: on_workers(fleet, OTHER) == EVERYWHERE)
    nodes.add("late")
    await until_yes(lambda: on_workers(fleet, OTHER) == {**EVERYWHERE, "late": "whole"})
    assert fleet.get("models/early")["state"] == "zero"
    assert hub.downloads("model.safetensors") == ["", ""]
    assert "late" not in on_workers(fleet, SMALL)


async def test_agents_that_start_again_fetch_nothing_twice(
    fleet: ToyFleet, nodes: NodesWithFiles, hub: ModelHub
) -> None:
    (watch,) = fleet.processes("kvmig.launcher.ray_watch")
    kill(watch)
    await until_yes(lambda: fleet.processes("kvmig.launcher.ray_watch") not in ([], [watch]))
    await until_yes(lambda: on_workers(fleet, SMALL).items() >= EVERYWHERE.items())
    models = [one["files"]["models"] for one in workers(fleet).values()]
    assert {it["took_s"] for one in models for it in one} == {None}
    assert hub.downloads("model.safetensors") == ["", ""]


async def test_a_node_that_sees_the_fleets_folder_starts_from_it_and_fetches_nothing(
    fleet: ToyFleet, nodes: NodesWithFiles, hub: ModelHub
) -> None:
    nodes.add("shares", shares=True)
    await until_yes(lambda: "shares" in ready(fleet))
    fleet.add_toy("b", source=OTHER, instances={"min": 1}, worker_selector={"worker": "shares"})
    fleet.until("models/b", state="serving", serving=1)
    async with fleet.client() as client:
        assert await answer(client, ask("b", 20)) == counted(20)
    found = workers(fleet)["shares"]
    assert [one["model"] for one in found["instances"]] == ["b"]
    assert found["files"]["shared"]
    assert {one["took_s"] for one in found["files"]["models"]} == {None}
    assert hub.downloads("model.safetensors") == ["", ""]


async def test_vllm_loads_the_copy_on_its_node(
    fleet: ToyFleet, nodes: NodesWithFiles, hub: ModelHub
) -> None:
    hub.add("Org/Count", {one.name: one.read_bytes() for one in COUNT.iterdir() if one.is_file()})
    source = "hf:Org/Count"
    model = {"name": "count", "source": source, "flags": FLAGS, "prefetch": True}
    fleet.add({**model, "worker_selector": {"worker": "left"}})
    await until_yes(lambda: on_workers(fleet, source).get("left") == "whole")
    (one,) = fleet.get(f"files?source={source}")["data"]
    (Path(one["folder"]) / "model.safetensors").unlink()  # only nodes with own folders have it now
    async with fleet.client() as client:
        assert "0043 0044" in await answer(client, ask("count", 20, start=41))
