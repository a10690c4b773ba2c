"""A fleet with `--reserve` on a Ray cluster with a real autoscaler, whose nodes are processes of
this machine: a spare node comes, a model takes it, and the next one comes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvmig.process.sockets import free_port
from tests.support.fleets import ToyFleet, answer, ask, counted
from tests.support.waiting import until_yes, wait_until

pytest.importorskip("ray", reason="needs the extra kvmig[ray]")
import ray

from tests.support.ray_nodes import RAYS_OWN, STORE_BYTES, UP

pytestmark = [pytest.mark.server, pytest.mark.long]

FAKE = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
NOTHING: dict[str, Any] = {
    "auth": {}, "docker": {}, "file_mounts": {}, "cluster_synced_files": [], "rsync_exclude": [],
    "rsync_filter": [], "initialization_commands": [], "setup_commands": [],
    "head_setup_commands": [], "worker_setup_commands": [], "head_start_ray_commands": [],
    "worker_start_ray_commands": [], "file_mounts_sync_continuously": False,
}  # fmt: skip


def autoscaling(address: str) -> dict[str, Any]:
    """The autoscaler's settings: up to three workers with two CPUs each, none of which goes."""
    sizes = {"CPU": 2, "object_store_memory": STORE_BYTES}
    return NOTHING | {
        "cluster_name": "fake",
        "max_workers": 3,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 60,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {"resources": sizes, "node_config": {}, "min_workers": 0, "max_workers": 3},
        },
    }


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The head of a cluster without workers."""
    folder = tmp_path_factory.mktemp("ray")
    port = free_port()
    found = f"{ray.util.get_node_ip_address()}:{port}"
    config, log = folder / "autoscaling.json", folder / "log"
    config.write_text(json.dumps(autoscaling(found)))
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}",
        f"--autoscaling-config={config}", "--num-cpus=0", "--include-dashboard=false",
        f"--object-store-memory={STORE_BYTES}",
    ]  # fmt: skip
    with log.open("wb") as out:
        head = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **RAYS_OWN, **FAKE}
        )
    try:
        wait_until(lambda: UP in log.read_text())
        yield found
    finally:
        below = psutil.Process(head.pid).children(recursive=True)
        head.terminate()
        _, alive = psutil.wait_procs([psutil.Process(head.pid), *below], 40)
        for one in alive:
            one.kill()
        head.wait(10)


def cpu_workers(fleet: ToyFleet) -> dict[str, int]:
    """Numbers of instances of the workers that are ready and have CPUs, by name."""
    return {
        one["name"]: len(one["instances"])
        for one in fleet.get("workers")["data"]
        if one["resources"].get("CPU") and one["state"] == "ready"
    }


async def test_a_model_takes_the_spare_node_and_another_one_comes(
    address: str, tmp_path: Path
) -> None:
    flags = ("--reserve=9=1", '--reserve-node={"CPU": 2}', "--threads=2")
    with ToyFleet(tmp_path, f"--ray={address}", *flags) as fleet:
        await until_yes(lambda: 0 in cpu_workers(fleet).values())
        fleet.add_toy("a", instances={"min": 1})
        async with fleet.client() as client:
            assert await answer(client, ask("a", 20)) == counted(20)
        # Ray may have started one more while it had not seen yet what it had started.
        await until_yes(lambda: {0, 1} <= {*cpu_workers(fleet).values()})
