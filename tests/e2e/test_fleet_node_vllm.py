"""Two models of vLLM on a node of a real Ray cluster: their instances are forked by the node's fork
server, and share the KV cache of a unit whose agent the node's has started."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvmig.models import BUNDLED
from tests.support.fleets import ToyFleet, answer, ask, counted
from tests.support.waiting import until_yes, wait_until

pytest.importorskip("ray", reason="needs the extra kvmig[ray]")

from tests.e2e.test_fleet_node_forks import (
    FORK_SERVER,
    ForkingNodes,
    forks,
    instance_of,
    running,
    text_of,
)
from tests.support.ray_nodes import RAYS_OWN

pytestmark = [pytest.mark.server, pytest.mark.long]

LOADED_S, SERVES_S = 300.0, 300.0
ARENA = 256 << 20
FLAGS = ["--enforce-eager", "--block-size=32", "--max-num-seqs=16", "--max-model-len=2048",
         "--dtype=float32"]  # fmt: skip


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[ToyFleet]:
    """On a cluster of a head and one node."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in RAYS_OWN.items():
            patched.setenv(name, value)
        (folder := tmp_path / "nodes").mkdir()
        made = ForkingNodes(folder)
        try:
            made.add("left")
            with ToyFleet(tmp_path, f"--ray={made.cluster.address}", "--threads=1") as found:
                yield found
        finally:
            made.cluster.shutdown()


def leased(fleet: ToyFleet) -> dict[str, int]:
    """Bytes that models have of the unit on the node, by model."""
    units: list[dict[str, Any]] = fleet.get("status")["units"]
    return next((one["leased_bytes"] or {} for one in units if one["worker"] == "left"), {})


def unit_agents(fleet: ToyFleet) -> list[psutil.Process]:
    node = fleet.get("workers/left")["node"]
    return [one for one in running("kvmig.sharing") if f"/node-{node[:16]}/" in text_of(one)]


async def both_answer(fleet: ToyFleet) -> None:
    async with fleet.client() as client:
        client.timeout = SERVES_S
        answers = await asyncio.gather(*(answer(client, ask(name, 20)) for name in "ab"))
    assert answers == [counted(20)] * 2


async def test_two_models_on_a_node_are_forked_there_and_share_the_cache_of_their_unit(
    fleet: ToyFleet,
) -> None:
    for name in "ab":
        spec = {
            "name": name, "source": f"path:{BUNDLED}", "flags": FLAGS, "memory": 1 << 30,
            "unit": "u", "unit_memory": ARENA,
            "instances": {"min": 0, "max": 1, "start_timeout_s": SERVES_S},
        }  # fmt: skip
        await asyncio.to_thread(fleet.add, spec)
    wait_until(lambda: forks(fleet, "left") == {"vllm": "ready"}, within_s=LOADED_S)
    await both_answer(fleet)
    instances = [instance_of(fleet, name) for name in "ab"]
    assert all(FORK_SERVER in text_of(one.parent()) for one in instances)
    await until_yes(lambda: leased(fleet).keys() == {"a", "b"})
    assert sum(leased(fleet).values()) <= ARENA

    (agent,) = unit_agents(fleet)
    agent.kill()
    await until_yes(lambda: unit_agents(fleet) not in ([], [agent]))
    await until_yes(lambda: leased(fleet).keys() == {"a", "b"})
    await both_answer(fleet)
    assert [instance_of(fleet, name) for name in "ab"] == instances, "they have served on"
