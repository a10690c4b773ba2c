"""`kvmig up --ray` on a real Ray cluster of a head and three nodes, which are processes of this
machine, with toys: a worker drained under streams, a killed server, a killed node, a node that was
cut off and comes back. The tests are in order.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvmig.core.errors import ConfigError
from kvmig.fleet.cluster_watch import check_cluster
from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.support.fleets import Streamed, ToyFleet, ask, counted, hold_streams, kill
from tests.support.waiting import until_yes, wait_until

pytest.importorskip("ray", reason="needs the extra kvmig[ray]")
from ray.cluster_utils import Cluster

from tests.support.ray_nodes import QUICK_TO_NOTICE, RAYS_OWN, STORE_BYTES

pytestmark = [pytest.mark.server, pytest.mark.long]

NAMES = ("left", "middle", "right")
STREAMS = 40
TOKENS = 120
HELD = 20


class NamedNodes:
    """A Ray cluster whose nodes have names, and two CPUs each; the head has none."""

    def __init__(self) -> None:
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES,
                "node_name": "head", "_system_config": QUICK_TO_NOTICE}  # fmt: skip
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes: dict[str, Any] = {}

    def add(self, name: str) -> None:
        self.nodes[name] = self.cluster.add_node(
            num_cpus=2, node_name=name, object_store_memory=STORE_BYTES
        )

    def kill(self, name: str) -> None:
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=False)

    def processes(self, name: str) -> list[psutil.Process]:
        """The raylet and everything below it."""
        raylet = psutil.Process(self.nodes[name].all_processes["raylet"][0].process.pid)
        return [raylet, *raylet.children(recursive=True)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[NamedNodes]:
    patched = pytest.MonkeyPatch()
    for name, value in RAYS_OWN.items():
        patched.setenv(name, value)
    made = NamedNodes()
    try:
        for name in NAMES:
            made.add(name)
        yield made
    finally:
        made.cluster.shutdown()
        patched.undo()


@pytest.fixture(scope="module")
def spread(nodes: NamedNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyFleet]:
    """One fleet for this file, with a model of two instances."""
    folder = tmp_path_factory.mktemp("fleet")
    with ToyFleet(folder, f"--ray={nodes.cluster.address}", "--threads=1") as made:
        wait_until(
            lambda: (
                {name for name, one in workers(made).items() if one["state"] == "ready"} >= {*NAMES}
            )
        )
        made.add_toy("a", instances={"min": 2, "max": 2})
        made.until("models/a", state="serving", serving=2)
        yield made


def workers(fleet: ToyFleet) -> dict[str, dict[str, Any]]:
    """By name."""
    return {one["name"]: one for one in fleet.get("workers")["data"]}


def places(fleet: ToyFleet) -> list[str]:
    """Names of the workers of all instances that serve."""
    return sorted(
        name
        for name, one in workers(fleet).items()
        for instance in one["instances"]
        if instance["state"] == "serving"
    )


def order(fleet: ToyFleet, name: str, what: str, body: Any = None) -> dict[str, Any]:
    answer = fleet.ask("POST", f"workers/{name}/{what}", body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def forty(fleet: ToyFleet) -> list[Streamed]:
    """Streams that stand in the middle."""
    bodies = [ask("a", TOKENS, start=100 * number) for number in range(STREAMS)]
    return await hold_streams(fleet, *bodies, tokens=HELD)


async def all_whole(streams: list[Streamed]) -> None:
    async with asyncio.timeout(SERVER_PATIENCE_S):
        for number, stream in enumerate(streams):
            assert await stream.task == counted(TOKENS, 100 * number)


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("nowhere", "--ray is 'nowhere', must be auto or HOST:PORT"),
        ("127.0.0.1:1", "--ray is 127.0.0.1:1, but no Ray cluster answers there"),
    ],
)
def test_an_address_without_a_cluster_is_refused_before_anything_starts(
    tmp_path: Path, address: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_cluster(address)
    command = [sys.executable, "-m", "kvmig", f"--data={tmp_path / 'data'}", "up", "--ray", address]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=SERVER_PATIENCE_S, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"kvmig: {sentence}")
    assert not (tmp_path / "data").exists()


def test_every_node_is_a_worker_and_instances_spread(spread: ToyFleet) -> None:
    found = workers(spread)
    assert set(found) == {"head", *NAMES}
    assert all(found[one]["state"] == "ready" and found[one]["memory_bytes"] for one in NAMES)
    assert len(set(places(spread))) == 2


async def test_a_worker_is_drained_under_streams_and_stays_empty(spread: ToyFleet) -> None:
    leaving = places(spread)[0]
    streams = await forty(spread)
    await until_yes(lambda: sum(one["streams"] for one in workers(spread)[leaving]["instances"]))
    assert order(spread, leaving, "drain", {"deadline_s": 300})["drain"]["left"]["streams"]
    await until_yes(lambda: workers(spread)[leaving]["drain"]["state"] == "drained")
    assert leaving not in places(spread)
    spread.hold(None)
    await all_whole(streams)
    assert len(places(spread)) == 2
    assert workers(spread)[leaving]["cordoned"]
    order(spread, leaving, "uncordon")
    assert workers(spread)[leaving]["drain"] is None


async def test_a_server_that_is_killed_in_a_drain_goes_on_with_it(spread: ToyFleet) -> None:
    leaving = places(spread)[0]
    streams = await forty(spread)
    order(spread, leaving, "drain")
    (server,) = spread.processes("kvmig.fleet.server")
    kill(server)
    await until_yes(lambda: spread.listens_after(server))
    await until_yes(lambda: (workers(spread)[leaving]["drain"] or {}).get("state") == "drained")
    spread.hold(None)
    await all_whole(streams)
    order(spread, leaving, "uncordon")


async def test_a_killed_nodes_streams_go_on_and_its_instance_starts_elsewhere(
    spread: ToyFleet, nodes: NamedNodes
) -> None:
    lost = places(spread)[0]
    order(spread, lost, "labels", {"labels": {"zone": "east"}})
    streams = await forty(spread)
    nodes.kill(lost)
    await until_yes(lambda: workers(spread)[lost]["state"] == "lost")
    spread.hold(None)
    await all_whole(streams)
    await until_yes(lambda: len(places(spread)) == 2)
    assert lost not in places(spread)
    nodes.add(lost)
    await until_yes(lambda: workers(spread)[lost]["state"] == "ready")
    assert workers(spread)[lost]["labels"] == {"zone": "east"}


async def test_a_node_that_was_cut_off_is_fenced_when_it_comes_back(
    spread: ToyFleet, nodes: NamedNodes
) -> None:
    lost = places(spread)[0]
    streams = await forty(spread)
    stopped = nodes.processes(lost)
    for process in stopped:
        os.kill(process.pid, signal.SIGSTOP)
    await until_yes(lambda: workers(spread)[lost]["state"] == "lost")
    spread.hold(None)
    await all_whole(streams)
    await until_yes(lambda: len(set(places(spread)) - {lost}) == 2)
    for process in stopped:
        os.kill(process.pid, signal.SIGCONT)
    _, alive = await asyncio.to_thread(psutil.wait_procs, stopped, SERVER_PATIENCE_S)
    assert not alive, "what ran there has ended"
    streams = await forty(spread)
    spread.hold(None)
    await all_whole(streams)


async def test_an_instance_moves_under_streams_so_that_a_model_has_a_whole_node(
    spread: ToyFleet, nodes: NamedNodes
) -> None:
    gone = next((name for name in NAMES if workers(spread)[name]["state"] == "lost"), "")
    if not gone:  # the test before has lost one, if it ran
        gone = NAMES[0]
        nodes.kill(gone)
        await until_yes(lambda: workers(spread)[gone]["state"] == "lost")
        await until_yes(lambda: len(places(spread)) == 2)
    nodes.add(gone)
    await until_yes(lambda: workers(spread)[gone]["state"] == "ready")
    streams = await forty(spread)
    for name in ("wide", "wider"):  # each takes both CPUs of a node
        flags = ["--ray-resources", '{"CPU": 2}']
        spread.add_toy(name, flags=flags, instances={"min": 1})
        await asyncio.to_thread(spread.until, f"models/{name}", serving=1)
    events = [one["what"] for one in spread.get("models/a")["events"]]
    assert sum("moves so that another model has room" in one for one in events) == 1
    assert len(places(spread)) == 4
    assert len(set(places(spread))) == 3
    spread.hold(None)
    await all_whole(streams)
    (instance, *_) = (
        one["instance"] for one in workers(spread)[gone]["instances"] if one["model"] == "wide"
    )
    found = spread.get(f"why/wide?instance={instance}")
    assert (found["worker"], found["decision"]["nodes"][0]["node"]) == (gone, gone)
