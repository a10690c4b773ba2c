"""Fork servers on the nodes of a real Ray cluster, which are processes of this machine, with toys:
instances are forked there, what fails is not tried for each order, and nothing outlives its agent.
The tests are in order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvmig.core.errors import StartupError
from kvmig.launcher.node_forks import FIRST_PAUSE_S
from kvmig.process.fork_server import join
from tests.support.fleets import ToyFleet, answer, ask, counted
from tests.support.waiting import until_yes, wait_until

pytest.importorskip("ray", reason="needs the extra kvmig[ray]")
from ray.cluster_utils import Cluster

from tests.support.ray_nodes import RAYS_OWN, STORE_BYTES

pytestmark = [pytest.mark.server, pytest.mark.long]

FORK_SERVER, LLUMLET = "kvmig.launcher.shared_fork_server", "kvmig.launcher.llumlet_main"
READY = {"toy": "ready"}
BROKEN = """
import sys
if "kvmig.launcher.shared_fork_server" in sys.orig_argv:
    with open({tried!r}, "a") as tried:
        tried.write("x")
    sys.exit("no library here")
"""
"""A library that can't be loaded on one node."""


class ForkingNodes:
    """A Ray cluster of a head without CPUs, and a node on which nothing can be loaded."""

    def __init__(self, folder: Path) -> None:
        self.tried = folder / "tried"
        self._library = folder / "library"
        self._library.mkdir()
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES,
                "node_name": "head"}  # fmt: skip
        self.cluster = Cluster(initialize_head=True, head_node_args=head)

    def add(self, name: str, *, broken: bool = False) -> None:
        path = str(Path(__file__).parents[2])
        if broken:
            (self._library / "sitecustomize.py").write_text(BROKEN.format(tried=str(self.tried)))
            path = f"{self._library}:{path}"
        self.cluster.add_node(
            num_cpus=2, node_name=name, object_store_memory=STORE_BYTES,
            env_vars={"PYTHONPATH": path},
        )  # fmt: skip


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkingNodes]:
    with pytest.MonkeyPatch.context() as patched:
        for name, value in RAYS_OWN.items():
            patched.setenv(name, value)
        made = ForkingNodes(tmp_path_factory.mktemp("nodes"))
        try:
            made.add("left")
            yield made
        finally:
            made.cluster.shutdown()


@pytest.fixture(scope="module")
def fleet(nodes: ForkingNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyFleet]:
    flags = [f"--ray={nodes.cluster.address}", "--threads=1"]
    with ToyFleet(tmp_path_factory.mktemp("fleet"), *flags) as made:
        wait_until(lambda: "left" in ready(made))
        yield made


def ready(fleet: ToyFleet) -> list[str]:
    """Names of the workers that are ready."""
    return [one["name"] for one in fleet.get("workers")["data"] if one["state"] == "ready"]


def forks(fleet: ToyFleet, name: str) -> dict[str, str]:
    """States of a worker's fork servers."""
    found: dict[str, str] = fleet.get(f"workers/{name}")["fork_servers"]
    return found


def instances_of(fleet: ToyFleet, model: str) -> list[psutil.Process]:
    """The processes of a model's instances."""
    words = f" of {model} at unix:{fleet.folder}"
    return [one for one in running(LLUMLET) if words in text_of(one)]


def instance_of(fleet: ToyFleet, model: str) -> psutil.Process:
    """The process of a model's only instance, once it is there."""
    wait_until(lambda: instances_of(fleet, model))
    (found,) = instances_of(fleet, model)
    return found


def running(module: str) -> list[psutil.Process]:
    return [one for one in psutil.process_iter() if module in text_of(one)]


def text_of(one: psutil.Process | None) -> str:
    """Its command line; empty: it has ended."""
    try:
        return "" if one is None else " ".join(one.cmdline())
    except psutil.Error:
        return ""


def fork_servers(fleet: ToyFleet, worker: str) -> list[psutil.Process]:
    """Those of a worker's node."""
    node = fleet.get(f"workers/{worker}")["node"]
    return [one for one in running(FORK_SERVER) if f"/node-{node[:16]}/" in text_of(one)]


def listens(one: psutil.Process) -> bool:
    """Whether a fork server has loaded."""
    (address,) = (word for word in text_of(one).split() if word.endswith(".sock"))
    try:
        join(address, {}).close()
    except StartupError:
        return False
    return True


def serves(fleet: ToyFleet, model: str) -> psutil.Process:
    """Add a model with one instance, and wait until it serves; its process."""
    fleet.add_toy(model, instances={"min": 1, "max": 1})
    fleet.until(f"models/{model}", state="serving", serving=1)
    return instance_of(fleet, model)


def test_an_instance_is_forked_on_its_node(fleet: ToyFleet) -> None:
    fleet.add_toy("early", instances={"min": 0, "max": 1})
    wait_until(lambda: forks(fleet, "left") == READY)
    assert FORK_SERVER in text_of(serves(fleet, "a").parent())


async def test_an_instance_that_ends_is_reported_and_forked_again(fleet: ToyFleet) -> None:
    before = instance_of(fleet, "a")
    before.kill()
    await asyncio.to_thread(before.wait, 20)
    await until_yes(lambda: instances_of(fleet, "a") not in ([], [before]))
    await until_yes(lambda: fleet.get("models/a")["serving"] == 1)
    after = instance_of(fleet, "a")
    assert FORK_SERVER in text_of(after.parent())
    async with fleet.client() as client:
        assert await answer(client, ask("a", 20)) == counted(20)


async def test_a_fork_server_dies_with_its_agent_and_its_instances_serve_on(
    fleet: ToyFleet,
) -> None:
    instance, left = instance_of(fleet, "a"), instance_of(fleet, "a").parent()
    assert left is not None
    agent = left.parent()
    assert agent is not None
    agent.kill()
    await asyncio.to_thread(left.wait, 20)
    async with fleet.client() as client:
        assert await answer(client, ask("a", 20)) == counted(20)
    assert instance.is_running()
    assert instance_of(fleet, "a") == instance

    await until_yes(lambda: any(map(listens, fork_servers(fleet, "left"))))
    (again,) = fork_servers(fleet, "left")
    await asyncio.to_thread(serves, fleet, "b")
    assert instance_of(fleet, "b").parent() == again


def test_what_cannot_be_loaded_is_not_tried_for_each_instance(
    fleet: ToyFleet, nodes: ForkingNodes
) -> None:
    nodes.add("broken", broken=True)
    wait_until(lambda: "broken" in ready(fleet))
    wait_until(lambda: "has failed" in forks(fleet, "broken").get("toy", ""))
    tried = len(nodes.tried.read_text())
    began = time.monotonic()
    for model in ("c", "d"):
        assert FORK_SERVER not in text_of(serves(fleet, model).parent())
    by_pauses = 1 + (time.monotonic() - began) // FIRST_PAUSE_S
    assert len(nodes.tried.read_text()) <= tried + by_pauses


async def test_nothing_is_left_on_the_nodes_when_the_fleet_has_ended(fleet: ToyFleet) -> None:
    left = fork_servers(fleet, "left")
    assert left
    await asyncio.to_thread(fleet.stop)
    _, alive = await asyncio.to_thread(psutil.wait_procs, left, 30)
    assert not alive
