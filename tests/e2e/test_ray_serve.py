"""`kvmig.serve --ray` on a real Ray cluster of three nodes, which are processes of this machine.

The nodes say that they have a GPU each; a toy doesn't look for it. Real vLLM on nodes is in
`tests.e2e.test_network_namespaces`.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvmig.core.config import RayConfig
from kvmig.core.errors import ConfigError
from kvmig.launcher import ray_cluster, ray_launcher
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import Served
from tests.conftest import NEVER_BY_ITSELF
from tests.support.leaks import assert_server_is_empty
from tests.support.streams import (
    Answer,
    Stream,
    count_from,
    counted,
    move,
    place,
    run_unmoved,
    start_stream,
)
from tests.support.toys import Toys

pytest.importorskip("ray", reason="needs the extra kvmig[ray]")
from ray.cluster_utils import Cluster

from tests.support.ray_nodes import RAYS_OWN
from tests.support.waiting import until_yes

pytestmark = [pytest.mark.server, pytest.mark.long]

PATH = "/v1/completions"
STORE_BYTES = 80_000_000
QUICK_TO_NOTICE = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3}
"""By Ray, that a node is gone."""
STREAMS = 4
TOKENS = 60
HELD = 20
"""Where streams wait for the test."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without GPUs, and two nodes with one each."""
    patched = pytest.MonkeyPatch()
    for name, value in RAYS_OWN.items():
        patched.setenv(name, value)
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES,
            "_system_config": QUICK_TO_NOTICE}  # fmt: skip
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            made.add_node(num_gpus=1, object_store_memory=STORE_BYTES)
        yield made
    finally:
        made.shutdown()
        patched.undo()


@pytest.fixture(scope="module")
def spread(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toys]:
    """One server for this file; each of its instances takes a GPU. The tests are in order."""
    flags = ["--instances=2", NEVER_BY_ITSELF, f"--ray={cluster.address}"]
    with Toys(flags, tmp_path_factory.mktemp("spread")) as served:
        yield served


def llumlets(cluster: Cluster) -> list[psutil.Process]:
    """Those that run on the cluster's nodes."""
    raylets = [node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()]
    return [
        process
        for raylet in raylets
        for process in psutil.Process(raylet).children(recursive=True)
        if "kvmig.launcher.llumlet_main" in " ".join(process.cmdline())
    ]


def free_gpus(cluster: Cluster) -> float:
    """Of all nodes, as Ray knows them."""
    ray_cluster.connect(cluster.address)
    try:
        return sum(node.free.get("GPU", 0.0) for node in ray_cluster.nodes())
    finally:
        ray_cluster.disconnect()


def states(served: Served) -> dict[str, str]:
    """Of the instances."""
    return {row["id"]: row["state"] for row in served.get("instances")}


@pytest.mark.parametrize(
    ("resources", "instances", "reason"),
    [
        ({"TPU": 1.0}, 1, "the Ray cluster has no TPU, only CPU, GPU, memory: name what an"),
        ({"GPU": 2.0}, 1, "an instance needs 2 GPU, but the largest node of the Ray cluster has 1"),
        ({}, 3, "the Ray cluster has room for 2 of 3 instances with 1 GPU each"),
    ],
)
async def test_a_cluster_without_the_resources_is_refused_and_left_as_it_was(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    resources: dict[str, float],
    instances: int,
    reason: str,
) -> None:
    monkeypatch.setattr(ray_launcher, "ROOM_WAIT_S", 0.5)
    config = RayConfig(address=cluster.address, resources=resources)
    launcher = ray_launcher.RayLauncher(config, [1] * instances, "model", None)

    with pytest.raises(ConfigError, match=reason):
        await launcher.open()

    assert free_gpus(cluster) == 2


async def test_a_stream_moves_between_two_nodes_and_its_client_sees_no_difference(
    cluster: Cluster, spread: Toys
) -> None:
    body = count_from(17, TOKENS, logprobs=1, temperature=1.2, seed=7)
    unmoved = await run_unmoved(spread, PATH, body)

    moved, report = await moved_while_held(spread, body)

    assert (report["state"], report["transport"]) == ("committed", "shm"), "of one host"
    moved.same_as(unmoved)
    assert len(await asyncio.to_thread(llumlets, cluster)) == 2


async def moved_while_held(spread: Toys, body: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    """The call, moved in the middle, and the report."""
    with spread.held(HELD):
        stream = await start_stream(spread, body, HELD)
        (report,) = await move(spread, stream)
    return await stream.end(), report


async def test_a_killed_nodes_streams_go_on_and_a_new_node_takes_its_instance(
    cluster: Cluster, spread: Toys
) -> None:
    with spread.held(HELD):
        streams = [Stream(spread, PATH, count_from(1000 * n, TOKENS)) for n in range(STREAMS)]
        for number, stream in enumerate(streams):
            await place(spread, stream, f"i{number % 2}")

        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)

        await until_yes(lambda: "starting" in states(spread).values())
    for number, stream in enumerate(streams):
        answer = await stream.end()
        assert answer.tokens == TOKENS
        counted(answer, 1000 * number)
    assert sorted(states(spread).values()) == ["serving", "starting"]
    assert (await run_unmoved(spread, PATH, count_from(20, 20))).tokens == 20

    cluster.add_node(num_gpus=1, object_store_memory=STORE_BYTES)
    await until_yes(lambda: set(states(spread).values()) == {"serving"})
    moved, report = await moved_while_held(spread, count_from(40, TOKENS))
    assert report["state"] == "committed", report
    counted(moved, 40)
    await asyncio.to_thread(assert_server_is_empty, spread)


async def test_a_killed_server_leaves_nothing_on_the_nodes(cluster: Cluster, spread: Toys) -> None:
    running = await asyncio.to_thread(llumlets, cluster)
    shared = {Path(file.path) for one in running for file in one.open_files()}
    shared = {path for path in shared if path.name.startswith("kvmig-")}
    assert (len(running), len(shared)) == (2, 2)
    assert spread.process is not None
    spread.process.send_signal(signal.SIGKILL)

    _, alive = await asyncio.to_thread(psutil.wait_procs, running, SERVER_PATIENCE_S)

    assert not alive
    assert not [path for path in shared if path.exists()], "they were not killed, but ended"
    await until_yes(lambda: free_gpus(cluster) == 2)
