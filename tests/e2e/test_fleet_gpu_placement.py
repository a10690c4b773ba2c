"""A placement whose units name GPUs of workers, on a real Ray cluster of a head and two nodes,
which are processes of this machine, with toys. The GPUs are the tests' own. The tests are in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_devices import GIB, FakeMachine, devices
from tests.support.fleets import Streamed, ToyFleet, ask, counted, hold_streams
from tests.support.waiting import until_yes, wait_until

pytest.importorskip("ray", reason="needs the extra kvmig[ray]")

from tests.e2e.test_fleet_worker_placement import body, left_and_right, places, reached, ready
from tests.e2e.test_fleet_workers import NamedNodes, workers
from tests.support.ray_nodes import STORE_BYTES

pytestmark = [pytest.mark.server, pytest.mark.long]

TOKENS, HELD = 120, 20


class GpuNodes(NamedNodes):
    """Nodes with two GPUs each."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def add(self, name: str) -> None:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        machine = FakeMachine(folder)
        machine.install(
            [
                replace(one, uuid=f"GPU-{name}-{at}", peers=[], nvlinks=[])
                for at, one in enumerate(devices(2, 8 * GIB))
            ]
        )
        self.nodes[name] = self.cluster.add_node(
            num_cpus=2, num_gpus=2, node_name=name, object_store_memory=STORE_BYTES,
            env_vars=machine.environment,
        )  # fmt: skip


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuNodes]:
    folder = tmp_path_factory.mktemp("gpus")
    with left_and_right(lambda: GpuNodes(folder)) as made:
        yield made


@pytest.fixture(scope="module")
def fleet(nodes: GpuNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyFleet]:
    """With models a and b, which don't run."""
    folder = tmp_path_factory.mktemp("fleet")
    with ToyFleet(folder, f"--ray={nodes.cluster.address}", "--threads=1") as made:
        wait_until(lambda: {"left", "right"} <= ready(made))
        for name in "ab":
            made.add_toy(name, instances={"min": 0, "max": 2})
        yield made


def on_gpus(**units: tuple[str, int]) -> dict[str, Any]:
    """Units by their workers, with the models in them and the GPU."""
    made = body(**{worker: models for worker, (models, _) in units.items()})
    for unit, (worker, (_, gpu)) in zip(made["placement"]["units"], units.items(), strict=True):
        unit |= {"name": f"of-{worker}", "gpus": [gpu], "memory_bytes": 10_000}
        for one in unit["models"]:
            one |= {"decode_share": 0.5, "kv_bytes": 1000}
    return made


def gpus(fleet: ToyFleet) -> dict[str, set[tuple[str, str]]]:
    """Workers and GPUs of the instances that serve, by model."""
    there = {one["name"]: one for one in fleet.get("status")["units"]}
    return {
        model: {(worker, *there[f"of-{worker}"]["gpus"]) for worker in on}
        for model, on in places(fleet).items()
    }


def free_gpus(fleet: ToyFleet) -> dict[str, float]:
    """GPUs that Ray has left on each node."""
    return {
        name: one["free_resources"]["GPU"]
        for name, one in workers(fleet).items()
        if one["state"] == "ready" and name != "head"
    }


async def held(fleet: ToyFleet) -> list[Streamed]:
    """Streams of both models that stand in the middle."""
    bodies = [ask(name, TOKENS, start) for name in "ab" for start in (100, 200)]
    return await hold_streams(fleet, *bodies, tokens=HELD)


async def all_whole(streams: list[Streamed]) -> None:
    wanted = [counted(TOKENS, start) for _ in "ab" for start in (100, 200)]
    assert [await one.task for one in streams] == wanted


async def test_models_start_on_the_gpus_of_workers_that_their_units_name(fleet: ToyFleet) -> None:
    said = fleet.ask("PUT", "placement", on_gpus(left=("a b", 1), right=("a", 0)))
    assert said.status_code == 200, said.text
    await until_yes(lambda: reached(fleet))
    assert gpus(fleet) == {
        "a": {("left", "GPU-left-1"), ("right", "GPU-right-0")},
        "b": {("left", "GPU-left-1")},
    }
    await until_yes(lambda: free_gpus(fleet) == {"left": 1.0, "right": 1.0})


async def test_models_change_units_under_streams(fleet: ToyFleet) -> None:
    streams = await held(fleet)
    said = fleet.ask("PUT", "placement", on_gpus(left=("b", 1), right=("a b", 0)))
    assert said.status_code == 200, said.text
    await until_yes(lambda: reached(fleet))
    fleet.hold(None)
    await all_whole(streams)
    assert places(fleet) == {"a": {"right"}, "b": {"left", "right"}}


async def test_a_model_whose_only_worker_is_lost_is_in_another_unit_until_it_is_back(
    fleet: ToyFleet, nodes: GpuNodes
) -> None:
    streams = await held(fleet)
    nodes.kill("right")
    await until_yes(lambda: places(fleet).get("a") == {"left"})
    shown = fleet.get("placement")["why"]
    assert shown.startswith("worker right of unit of-right: it is lost"), shown
    assert shown.endswith("model a is in unit of-left until then"), shown
    fleet.hold(None)
    await all_whole(streams)
    nodes.add("right")  # Ray wants the main thread
    await until_yes(
        lambda: reached(fleet) and places(fleet) == {"a": {"right"}, "b": {"left", "right"}}
    )
    assert gpus(fleet)["a"] == {("right", "GPU-right-0")}


async def test_a_gpu_that_no_placement_names_goes_back_to_ray(fleet: ToyFleet) -> None:
    assert fleet.ask("DELETE", "placement").status_code == 200
    for name in "ab":
        assert fleet.ask("POST", f"models/{name}/switch", {"on": False}).status_code == 200
    await until_yes(lambda: free_gpus(fleet) == {"left": 2.0, "right": 2.0})
