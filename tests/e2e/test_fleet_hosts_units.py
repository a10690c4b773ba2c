"""A unit of two models of real vLLM over hosts with addresses, shared memory and disks of their own
(see `tests.support.network`): its host is drained, and the next one cut off, under streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psutil
import pytest

from kvmig.models import BUNDLED
from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.support.fleets import Streamed, ToyFleet, ask, counted
from tests.support.network import Host, Network, hosts_or_skip
from tests.support.waiting import until_yes, wait_until

pytest.importorskip("ray", reason="needs the extra kvmig[ray]")
from tests.support.ray_nodes import QUICK_TO_NOTICE, RayHosts

pytestmark = [pytest.mark.server, pytest.mark.long]

MODELS = ("a", "b")
TOKENS, BEGUN = 3000, 50
ARENA = 512 << 20
FLAGS = ["--enforce-eager", "--block-size=32", "--max-num-seqs=16", "--max-model-len=4096",
         "--dtype=float32"]  # fmt: skip


@pytest.fixture
def network() -> Iterator[Network]:
    with hosts_or_skip(3) as made:
        yield made


@pytest.fixture
def ray(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHosts]:
    logs = tmp_path_factory.mktemp("ray")
    with closing(RayHosts(network, logs, 2, QUICK_TO_NOTICE)) as made:
        yield made


@pytest.fixture
def fleet(
    network: Network, ray: RayHosts, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ToyFleet]:
    front = network.hosts[0]
    flags = [f"--ray={ray.address}", "--threads=1"]
    folder = tmp_path_factory.mktemp("fleet")
    with ToyFleet(folder, *flags, host=front.address, enter=front.enter) as made:
        wait_until(lambda: sum(one["state"] == "ready" for one in workers(made)) == 3)
        yield made


def workers(fleet: ToyFleet) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = fleet.get("workers")["data"]
    return found


def serving(fleet: ToyFleet) -> list[tuple[str, str]]:
    """Models and addresses of the hosts that are alive and on which they serve."""
    return sorted(
        (instance["model"], row["address"])
        for row in workers(fleet)
        for instance in row["instances"]
        if instance["state"] == "serving" and row["state"] == "ready"
    )


def both_at(host: Host) -> list[tuple[str, str]]:
    return [(model, host.address) for model in MODELS]


def named(fleet: ToyFleet, host: Host) -> dict[str, Any]:
    """The worker of a host."""
    return next(one for one in workers(fleet) if one["address"] == host.address)


async def begin(fleet: ToyFleet) -> list[Streamed]:
    bodies = [ask(model, TOKENS, start) for model in MODELS for start in (100, 300)]
    streams = [Streamed(fleet, body) for body in bodies]
    for one in streams:
        await one.reach(BEGUN)
    return streams


async def all_whole(streams: list[Streamed]) -> None:
    async with asyncio.timeout(SERVER_PATIENCE_S):
        for stream, start in zip(streams, (100, 300) * len(MODELS), strict=True):
            assert await stream.task == counted(TOKENS, start)
            assert stream.error is None


async def test_a_unit_moves_between_hosts_and_starts_elsewhere_when_its_host_is_cut_off(
    fleet: ToyFleet, network: Network, ray: RayHosts
) -> None:
    for name in MODELS:
        spec = {
            "name": name, "source": f"path:{BUNDLED}", "flags": FLAGS, "memory": 1 << 30,
            "unit": "u", "unit_memory": ARENA,
            "instances": {"min": 1, "max": 1, "start_timeout_s": SERVER_PATIENCE_S},
        }  # fmt: skip
        await asyncio.to_thread(fleet.add, spec)
    await until_yes(lambda: len(serving(fleet)) == len(MODELS), SERVER_PATIENCE_S)
    first, other = sorted(network.hosts[1:], key=lambda host: serving(fleet) != both_at(host))
    assert serving(fleet) == both_at(first), "a unit is on one host"

    streams = await begin(fleet)
    drained = named(fleet, first)["name"]
    said = fleet.ask("POST", f"workers/{drained}/drain")
    assert said.status_code == 200, said.text
    await until_yes(lambda: named(fleet, first)["drain"]["state"] == "drained", SERVER_PATIENCE_S)
    assert serving(fleet) == both_at(other)
    await all_whole(streams)
    assert fleet.ask("POST", f"workers/{drained}/uncordon").status_code == 200

    streams = await begin(fleet)
    there = ray.processes(other)
    network.isolate(other)
    await until_yes(lambda: named(fleet, other)["state"] == "lost")
    await until_yes(lambda: serving(fleet) == both_at(first), SERVER_PATIENCE_S)
    await all_whole(streams)
    network.heal()
    _, alive = await asyncio.to_thread(psutil.wait_procs, there, SERVER_PATIENCE_S)
    assert not alive, "what ran there has ended"
    assert serving(fleet) == both_at(first)
    total = 2 * len(streams) * TOKENS
    await until_yes(
        lambda: sum(int(row["output"]) for row in fleet.get("usage?by=model")["data"]) == total
    )
