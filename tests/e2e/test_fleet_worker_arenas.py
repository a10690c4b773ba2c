"""A placement whose units share KV cache on workers, on a real Ray cluster of a head and two nodes,
which are processes of this machine, with real vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from kvmig.models import BUNDLED
from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.support.fleets import Streamed, ToyFleet, ask, counted
from tests.support.waiting import until_yes

pytest.importorskip("ray", reason="needs the extra kvmig[ray]")

from tests.e2e.test_fleet_worker_placement import fleet_on, left_and_right, places, reached
from tests.e2e.test_fleet_workers import NamedNodes

pytestmark = [pytest.mark.server, pytest.mark.long]

MIB = 1 << 20
TOKENS, BEGUN = 2000, 30
FLAGS = ["--enforce-eager", "--block-size=32", "--max-num-seqs=16", "--max-model-len=4096",
         "--dtype=float32"]  # fmt: skip


@pytest.fixture
def nodes() -> Iterator[NamedNodes]:
    with left_and_right(NamedNodes) as made:
        yield made


@pytest.fixture
def fleet(nodes: NamedNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyFleet]:
    with fleet_on(nodes, tmp_path_factory.mktemp("fleet")) as made:
        yield made


def body(**units: str) -> dict[str, Any]:
    """Units by their workers, with the models in them."""
    size = {"held_bytes": 700 * MIB, "floor_bytes": 40 * MIB, "kv_bytes": 128 * MIB}
    return {
        "placement": {
            "units": [
                {
                    "name": f"of-{worker}", "worker": worker, "memory_bytes": 4096 * MIB,
                    "arena_bytes": 512 * MIB,
                    "models": [{"name": one, **size} for one in models.split()],
                }
                for worker, models in units.items()
            ]
        }
    }  # fmt: skip


async def test_models_share_kv_cache_on_workers_and_move_between_units_under_streams(
    fleet: ToyFleet,
) -> None:
    for name in "ab":
        spec = {
            "name": name, "source": f"path:{BUNDLED}", "flags": FLAGS, "memory": 1 << 30,
            "instances": {"min": 0, "max": 2, "start_timeout_s": SERVER_PATIENCE_S},
        }  # fmt: skip
        await asyncio.to_thread(fleet.add, spec)
    said = fleet.ask("PUT", "placement", body(left="a b", right=""))
    assert said.status_code == 200, said.text
    assert said.json()["plan"] == ["a, b start in their units, once they are on"]
    await until_yes(lambda: reached(fleet), SERVER_PATIENCE_S)
    assert places(fleet) == {"a": {"left"}, "b": {"left"}}
    units = {one["name"]: one for one in fleet.get("status")["units"]}
    assert units["of-left"]["leased_bytes"].keys() == {"a", "b"}

    streams = [Streamed(fleet, ask(name, TOKENS, 100)) for name in "ab"]
    for one in streams:
        await one.reach(BEGUN)
    said = fleet.ask("PUT", "placement", body(left="a", right="b"))
    assert said.status_code == 200, said.text
    await until_yes(lambda: reached(fleet), SERVER_PATIENCE_S)
    assert places(fleet) == {"a": {"left"}, "b": {"right"}}
    async with asyncio.timeout(SERVER_PATIENCE_S):
        assert [await one.task for one in streams] == [counted(TOKENS, 100)] * 2
