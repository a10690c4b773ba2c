"""`kvmig up --ray` over hosts with addresses, shared memory and disks of their own, on a network
that breaks (see `tests.support.network`), with its database in PostgreSQL. The tests are in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psutil
import pytest

from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.support import postgres
from tests.support.fleets import Streamed, ToyFleet, ask, counted, hold_streams
from tests.support.network import Host, Network, hosts_or_skip
from tests.support.waiting import until_yes, wait_until

pytest.importorskip("ray", reason="needs the extra kvmig[ray]")
from tests.support.ray_nodes import QUICK_TO_NOTICE, RayHosts

pytestmark = [pytest.mark.server, pytest.mark.long]

STREAMS, TOKENS, HELD = 12, 120, 20


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with hosts_or_skip(4) as made:
        yield made


@pytest.fixture(scope="module")
def ray(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHosts]:
    logs = tmp_path_factory.mktemp("ray")
    with closing(RayHosts(network, logs, 1, QUICK_TO_NOTICE)) as made:
        yield made


@pytest.fixture(scope="module")
def fleet(
    network: Network,
    ray: RayHosts,
    postgres_cluster: postgres.Cluster,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ToyFleet]:
    """One for this file: its model a has two instances, on two of three hosts with a CPU each."""
    front = network.hosts[0]
    flags = [f"--ray={ray.address}", "--threads=1", f"--database={postgres_cluster.new()}"]
    folder = tmp_path_factory.mktemp("fleet")
    with ToyFleet(folder, *flags, host=front.address, enter=front.enter) as made:
        wait_until(lambda: sum(one["state"] == "ready" for one in rows(made)) == 4)
        made.add_toy("a", instances={"min": 2, "max": 2})
        made.until("models/a", state="serving", serving=2)
        yield made


def rows(fleet: ToyFleet) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = fleet.get("workers")["data"]
    return found


def serving(fleet: ToyFleet) -> list[str]:
    """Names of the workers of the instances of a that serve."""
    return [
        one["name"]
        for one in rows(fleet)
        for instance in one["instances"]
        if instance["state"] == "serving" and instance["model"] == "a"
    ]


def host_of(network: Network, ray: RayHosts, fleet: ToyFleet) -> Host:
    """A host with an instance of a."""
    (found, *_) = [
        host for host in network.hosts[1:] if ray.running_on(host, "kvmig.launcher.llumlet_main")
    ]
    return found


async def streams(fleet: ToyFleet) -> list[Streamed]:
    bodies = [ask("a", TOKENS, start=100 * number) for number in range(STREAMS)]
    return await hold_streams(fleet, *bodies, tokens=HELD)


async def all_whole(fleet: ToyFleet, started: list[Streamed]) -> None:
    fleet.hold(None)
    async with asyncio.timeout(SERVER_PATIENCE_S):
        for number, stream in enumerate(started):
            assert await stream.task == counted(TOKENS, 100 * number)


async def test_streams_go_on_while_postgresql_restarts(
    fleet: ToyFleet, postgres_cluster: postgres.Cluster
) -> None:
    started = await streams(fleet)
    await asyncio.to_thread(postgres_cluster.stop)
    try:
        await all_whole(fleet, started)
        late = Streamed(fleet, ask("a", TOKENS))
        assert await late.task == counted(TOKENS), "a key that is known is let in"
    finally:
        await asyncio.to_thread(postgres_cluster.start)

    def counts() -> bool:
        answer = fleet.ask("GET", "usage?by=model")
        if answer.status_code != 200:
            return False
        outputs = [int(row["output"]) for row in answer.json()["data"]]
        return sum(outputs) == (STREAMS + 1) * TOKENS

    await until_yes(counts)
    made = await asyncio.to_thread(fleet.ask, "POST", "users", {"name": "bea"})
    assert made.status_code == 201, made.text


async def test_a_cut_that_ray_does_not_notice_loses_no_stream(
    fleet: ToyFleet, network: Network, ray: RayHosts
) -> None:
    started = await streams(fleet)
    network.isolate(host_of(network, ray, fleet))
    await asyncio.sleep(1.0)
    network.heal()
    await all_whole(fleet, started)


async def test_a_host_that_is_cut_off_is_fenced_when_its_network_is_back(
    fleet: ToyFleet, network: Network, ray: RayHosts
) -> None:
    started = await streams(fleet)
    lost = host_of(network, ray, fleet)
    there = ray.processes(lost)
    network.isolate(lost)
    await until_yes(lambda: any(one["state"] == "lost" for one in rows(fleet)))
    await all_whole(fleet, started)
    await until_yes(lambda: len(serving(fleet)) == 2)
    network.heal()
    _, alive = await asyncio.to_thread(psutil.wait_procs, there, SERVER_PATIENCE_S)
    assert not alive, "what ran there has ended"
    await all_whole(fleet, await streams(fleet))


async def test_a_host_that_joins_while_a_model_waits_for_room_starts_it(
    fleet: ToyFleet, network: Network, ray: RayHosts
) -> None:
    (gone,) = [host for host in network.hosts[1:] if not ray.processes(host)]
    fleet.add_toy("b", instances={"min": 1})
    await until_yes(lambda: fleet.get("models/b")["state"] == "waiting")
    why = fleet.get("models/b")["why"]
    assert why.startswith("no room: it needs 1 CPU, 0 CPU is free"), why
    call = Streamed(fleet, ask("b", 20))
    await asyncio.sleep(0.5)
    assert not call.task.done()
    await asyncio.to_thread(ray.join, gone)
    assert await call.task == counted(20)
