"""Two servers of one fleet and a node of a real Ray cluster: the one that led before stands still,
and goes on later by what it knew. The tests are in order.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvmig.launcher.node_files import WantedUnit
from kvmig.launcher.node_reports import NodeReport, UnitReport

pytest.importorskip("ray", reason="needs the extra kvmig[ray]")
from ray.cluster_utils import Cluster

from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.support.ray_nodes import RAYS_OWN, STORE_BYTES
from tests.support.servers_watch import ServersWatch

pytestmark = [pytest.mark.server, pytest.mark.long]

ROOT = str(Path(__file__).parents[2])
FLEET = "f" * 32
UNIT = WantedUnit(path="/run/unit-u.sock", memory=1 << 20)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patched:
        for name, value in RAYS_OWN.items():
            patched.setenv(name, value)
        head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        made = Cluster(initialize_head=True, head_node_args=head)
        yield made
        made.shutdown()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of files, at the same path for both servers."""
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def earlier(cluster: Cluster, root: Path) -> Iterator[ServersWatch]:
    made = ServersWatch(cluster.address, 1, root, cluster.head_node.node_id)
    made.wish(UNIT, engines=("toy",))
    yield made
    made.close()


@pytest.fixture(scope="module")
def later(cluster: Cluster, root: Path) -> Iterator[ServersWatch]:
    made = ServersWatch(cluster.address, 2, root, cluster.head_node.node_id)
    made.wish(UNIT, engines=("toy",))
    yield made
    made.close()


def holds(node: NodeReport) -> bool:
    """Whether the node does all that the server wishes: nobody else uses its folder, and its
    instances can be forked, and join their unit."""
    if node.measured is None or not node.measured.files.root:
        return False
    measured = node.measured
    found = measured.files.why, measured.fork_servers, measured.units
    return found == ("", {"toy": "ready"}, (UnitReport(path=UNIT.path),))


def running(node: NodeReport, module: str) -> list[psutil.Process]:
    """What runs a module for the node."""
    found = []
    for one in psutil.process_iter(["cmdline"]):
        words = " ".join(one.info["cmdline"] or ())
        if module in words and f"/node-{node.node_id[:16]}/" in words:
            found.append(one)
    return found


def fork_servers(node: NodeReport) -> list[psutil.Process]:
    return running(node, "shared_fork_server")


def unit_agents(node: NodeReport) -> list[psutil.Process]:
    return running(node, "kvmig.sharing")


def test_a_server_that_leads_has_its_wish(earlier: ServersWatch) -> None:
    node = earlier.until(holds)
    assert len(fork_servers(node)) == 1
    assert len(unit_agents(node)) == 1


def test_the_next_leader_has_the_node_though_the_one_before_stands_still(
    earlier: ServersWatch, later: ServersWatch
) -> None:
    (before,), (agent,) = fork_servers(node := earlier.next_report()), unit_agents(node)
    earlier.signal(signal.SIGSTOP)
    node = later.until(holds)
    (now,), (another,) = fork_servers(node), unit_agents(node)
    assert now != before
    assert another != agent


def test_a_server_that_goes_on_after_another_has_led_changes_nothing_and_is_told_why(
    earlier: ServersWatch, later: ServersWatch
) -> None:
    earlier.signal(signal.SIGCONT)
    node = earlier.until(lambda node: node.why)
    assert "its token is 1.0, must be 2.0 or higher" in node.why
    servers = fork_servers(node), unit_agents(node)
    for _ in range(5):
        assert earlier.next_report().why == node.why
        assert holds(later.next_report())
    assert (fork_servers(node), unit_agents(node)) == servers


def test_a_unit_that_is_wanted_no_more_ends_with_the_server_that_wished_it(
    later: ServersWatch,
) -> None:
    (agent,) = unit_agents(later.next_report())
    later.close()
    agent.wait(SERVER_PATIENCE_S)
