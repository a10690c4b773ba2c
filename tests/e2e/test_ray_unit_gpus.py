"""The GPU of a unit on a real Ray node: Ray gives it to nobody else, a server that comes later
finds it, and it goes back with the unit. The GPUs are the tests' own. The tests are in order.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmig.launcher.node_files import WantedUnit
from kvmig.launcher.node_reports import NodeReport, UnitReport

pytest.importorskip("ray", reason="needs the extra kvmig[ray]")
from ray.cluster_utils import Cluster

from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.support.fake_devices import GIB, FakeMachine, devices
from tests.support.ray_nodes import RAYS_OWN, STORE_BYTES
from tests.support.servers_watch import ROOT, ServersWatch

pytestmark = [pytest.mark.server, pytest.mark.long]

PATH = "/run/unit-gpu.sock"
LEASE_S = 10.0
TAKE = """
import sys, ray
from kvmig.launcher.ray_gpus import RayHolders
ray.init(address=sys.argv[1], log_to_driver=False)
RayHolders(sys.argv[2], float(sys.argv[3])).take_gpu("unit-of-one-that-dies", 0)
[actor] = ray.util.list_named_actors(all_namespaces=True)
ray.get(ray.get_actor(**actor).uuid.remote(), timeout=60)
"""
GPUS = [one.uuid for one in devices(2)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    machine = FakeMachine(tmp_path_factory.mktemp("nvml"))
    machine.install(devices(2, 8 * GIB))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", ROOT)
        for name, value in {**machine.environment, **RAYS_OWN}.items():
            patched.setenv(name, value)
        head = {
            "num_cpus": 1, "num_gpus": 2, "include_dashboard": False,
            "object_store_memory": STORE_BYTES,
        }  # fmt: skip
        made = Cluster(initialize_head=True, head_node_args=head)
        yield made
        made.shutdown()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def earlier(cluster: Cluster, root: Path) -> Iterator[ServersWatch]:
    made = ServersWatch(cluster.address, 1, root, cluster.head_node.node_id)
    yield made
    made.close()


@pytest.fixture(scope="module")
def later(cluster: Cluster, root: Path) -> Iterator[ServersWatch]:
    made = ServersWatch(cluster.address, 2, root, cluster.head_node.node_id)
    yield made
    made.close()


def has_second(node: NodeReport) -> bool:
    """Whether the unit has the second GPU, and Ray the first one."""
    there = (UnitReport(path=PATH, gpus=(GPUS[1],)),)
    return node.measured is not None and node.measured.units == there and node.free["GPU"] == 1.0


WANTED = WantedUnit(path=PATH, memory=1 << 30, gpus=(GPUS[1],))


def test_a_unit_has_the_gpu_that_it_names_and_ray_no_more(earlier: ServersWatch) -> None:
    earlier.wish(WANTED)
    earlier.until(has_second)


def test_the_gpu_stays_the_units_when_the_server_dies_and_the_next_one_finds_it(
    earlier: ServersWatch, later: ServersWatch
) -> None:
    earlier.kill()
    later.wish(WANTED)
    later.until(has_second)


def test_units_that_name_each_others_gpus_get_their_own(later: ServersWatch) -> None:
    other = WantedUnit(path="/run/unit-other.sock", memory=0, gpus=(GPUS[0],))
    later.wish(WANTED, other)
    both = (
        UnitReport(path=PATH, gpus=(GPUS[1],)),
        UnitReport(path=other.path, gpus=(GPUS[0],)),
    )
    later.until(lambda node: node.measured is not None and node.measured.units == both)


def test_a_unit_of_two_gpus_has_both(later: ServersWatch) -> None:
    later.wish(WantedUnit(path=PATH, memory=0, gpus=tuple(GPUS), count=2))
    there = (UnitReport(path=PATH, gpus=tuple(GPUS)),)
    later.until(lambda node: node.measured is not None and node.measured.units == there)


def test_a_unit_that_is_wanted_no_more_gives_its_gpu_back_to_ray(later: ServersWatch) -> None:
    later.wish()
    later.until(lambda node: node.free.get("GPU") == 2.0)


def test_a_gpu_goes_back_by_itself_once_nobody_asks_for_it_any_more(
    cluster: Cluster, later: ServersWatch
) -> None:
    """The server, its agents and the unit's models have all ended at once."""
    node = cluster.head_node.node_id
    subprocess.run(
        [sys.executable, "-c", TAKE, cluster.address, node, str(LEASE_S)],
        check=True, timeout=SERVER_PATIENCE_S, env={**os.environ, "PYTHONPATH": ROOT},
    )  # fmt: skip
    later.until(lambda node: node.free.get("GPU") == 1.0)
    later.until(lambda node: node.free.get("GPU") == 2.0)
