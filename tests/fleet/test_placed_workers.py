"""Placements whose units have GPUs of workers, or KV cache there that their models share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvmig.core.devices import DeviceInventory, DeviceRecord
from kvmig.core.errors import ConfigError
from kvmig.fleet.managed_model import CatalogEntry
from kvmig.fleet.node_reserve import ReserveLadder
from kvmig.fleet.orders import StartDeployment
from kvmig.fleet.placed_workers import check_replan
from kvmig.fleet.placement_controller import DesiredPlacement, PlacementController
from kvmig.fleet.settings import FleetSettings
from kvmig.fleet.spec import ModelSpec
from kvmig.fleet.workers import LEASE_S
from kvmig.launcher.node_files import WantedUnit
from kvmig.launcher.node_reports import NodeReport, UnitReport
from kvmig.placement.file import placement_from
from tests.fleet.test_worker_gpus import node
from tests.support.made_up_nodes import GIB
from tests.support.model_bench import silence
from tests.support.worker_bench import A, B, WorkerBench

EACH, ARENA, KV = 5 * GIB, 8 * GIB, 2 * GIB
SPEC: dict[str, Any] = {"engine": "vllm", "memory": 0, "gpu_memory": EACH}


def unit(name: str, worker: str, gpus: list[int], models: str, **more: Any) -> dict[str, Any]:
    sizes = {"kv_bytes": KV, "held_bytes": GIB, "decode_share": 0.6}
    placed = [{"name": one, **sizes} for one in models.split()]
    whole = {"name": name, "worker": worker, "gpus": gpus, "memory_bytes": 30 * GIB}
    return {**whole, "models": placed, **more}


def placed(*units: dict[str, Any]) -> dict[str, Any]:
    return {"units": list(units)}


LEFT = unit("left", "worker-a", [1], "a b")
RIGHT = unit("right", "worker-b", [0], "b")
TWO = placed(LEFT, RIGHT)


class PlacedBench(WorkerBench):
    """A fleet on workers with a placement, and models a and b."""

    def __init__(self, folder: Path, reserve: ReserveLadder | None = None) -> None:
        super().__init__(folder, reserve)
        self.settings = FleetSettings(data=str(folder))
        self.placement = PlacementController(self.models, self.store)
        self.specs: dict[str, ModelSpec] = {}

    async def store(self, wanted: DesiredPlacement) -> None:
        pass

    def add_models(self, names: str = "a b", **more: Any) -> None:
        for name in names.split():
            one = ModelSpec(name=name, source=f"path:/models/{name}", **{**SPEC, **more})
            self.specs[name] = one
        self.models.take_catalogue(
            CatalogEntry(f"m-{one.name}", one.name, 1, True, one) for one in self.specs.values()
        )
        self.models.reconcile()

    async def want_placement(self, given: Mapping[str, Any]) -> list[str]:
        lines = await self.placement.accept_placement(given, self.store)
        for name in self.specs:
            self.models.wake(name)
        self.turns()
        return lines

    async def refused(self, given: Mapping[str, Any], replan: object = None) -> str:
        with pytest.raises(ConfigError) as error:
            await self.placement.accept_placement(given, None, replan)
        return str(error.value)

    def turns(self) -> None:
        for _ in range(3):
            self.models.reconcile()

    def path(self, unit: str) -> str:
        return str(self.settings.unit(unit))

    def with_units(self, found: NodeReport, **gpus: str) -> NodeReport:
        """The node once its units are there."""
        assert found.measured is not None
        units = tuple(
            UnitReport(path=self.path(name), gpus=tuple(uuids.split()))
            for name, uuids in gpus.items()
        )
        return replace(found, measured=replace(found.measured, units=units))

    def wish(self) -> dict[str, tuple[WantedUnit, ...]]:
        return dict(self.pool.wish().units)

    def starts(self) -> dict[str, StartDeployment]:
        notes = zip(self.notes, self.started, strict=True)
        return {note.model: start for note, start in notes}

    def claims(self) -> dict[str, dict[str, int]]:
        return {one.id: dict(one.claims) for one in self.models.places.devices() if one.claims}


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PlacedBench]:
    silence(monkeypatch)  # what a deployment tells, the test says
    made = PlacedBench(tmp_path)
    yield made
    await made.placement.close()
    await made.models.close()


def two_nodes(bench: PlacedBench, **more: Any) -> None:
    """Models a and b, and workers a and b, which have three GPUs."""
    bench.see(node("a", 0, 0), node("b", 0))
    bench.add_models(**more)


async def both_start(bench: PlacedBench, given: Mapping[str, Any] = TWO) -> None:
    """As a placement like TWO has it."""
    two_nodes(bench)
    await bench.want_placement(given)
    take_units(bench)


def take_units(bench: PlacedBench, left: str = "GPU-a1", right: str = "GPU-b0") -> None:
    """The workers have the units, on these GPUs."""
    a, b = node("a", 0, 0), node("b", 0)
    bench.see(bench.with_units(a, left=left), bench.with_units(b, right=right))
    bench.turns()


# -- spare nodes


async def test_a_model_that_waits_for_its_unit_asks_the_autoscaler_for_no_gpu_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence(monkeypatch)  # what a deployment tells, the test says
    bench = PlacedBench(tmp_path, ReserveLadder(((9, 0),)))
    bench.see(node("a", 0, 0), node("b", 0), node("c", 0))
    bench.add_models()
    await bench.want_placement(TWO)
    assert not bench.starts()
    assert bench.pool.wish().bundles == ({"CPU": 4.0, "GPU": 2.0}, {"CPU": 4.0, "GPU": 1.0})
    await bench.placement.close()
    await bench.models.close()


# -- GPUs


async def test_a_unit_that_cannot_be_looked_at_keeps_its_wish_and_no_other_one_back(
    bench: PlacedBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit_on, broken = bench.pool.unit_on, {bench.path("left")}

    def look(node: str, path: str) -> UnitReport | None:
        if path in broken:
            raise ZeroDivisionError
        return unit_on(node, path)

    monkeypatch.setattr(bench.pool, "unit_on", look)
    two_nodes(bench)
    await bench.want_placement(TWO)
    right = {B: (WantedUnit(path=bench.path("right"), memory=0, gpus=("GPU-b0",)),)}
    assert bench.wish() == right
    broken.clear()
    bench.turns()
    both = bench.wish()
    assert both.keys() == {A, B}
    broken.add(bench.path("left"))
    bench.turns()
    assert bench.wish() == both


async def test_workers_take_the_gpus_that_units_name_before_their_models_start(
    bench: PlacedBench,
) -> None:
    two_nodes(bench)
    assert await bench.want_placement(TWO) == ["a, b start in their units, once they are on"]
    assert bench.wish() == {
        A: (WantedUnit(path=bench.path("left"), memory=0, gpus=("GPU-a1",)),),
        B: (WantedUnit(path=bench.path("right"), memory=0, gpus=("GPU-b0",)),),
    }
    assert bench.starts() == {}
    assert bench.named("a").life.why == "unit left takes its GPUs on its worker"


async def test_a_unit_whose_gpu_others_have_says_so_and_the_other_units_models_start(
    bench: PlacedBench,
) -> None:
    two_nodes(bench)
    await bench.want_placement(placed(unit("left", "worker-a", [1], "a"), RIGHT))
    busy = "Ray has given GPU GPU-a1 to others, or does not have it"
    a = node("a", 0, 0)
    assert a.measured is not None
    units = (UnitReport(path=bench.path("left"), why=busy),)
    bench.see(
        replace(a, measured=replace(a.measured, units=units)),
        bench.with_units(node("b", 0), right="GPU-b0"),
    )
    bench.turns()
    assert bench.named("a").life.why == f"unit left takes its GPUs on its worker: {busy}"
    assert bench.starts().keys() == {"b"}


async def test_models_start_on_the_gpus_of_their_units_and_take_none_of_ray(
    bench: PlacedBench,
) -> None:
    await both_start(bench)
    a, b = (bench.starts()[name].words for name in "ab")
    assert "--instance-gpus=i0: GPU-a1" in a
    for word in (
        "--instance-unit=i0: left", f"--instance-node=i0: {A}", "--instance-gpus=i0: GPU-a1",
        "--instance-unit=i1: right", f"--instance-node=i1: {B}", "--instance-gpus=i1: GPU-b0",
    ):  # fmt: skip
        assert word in b
    assert not [one for one in b if one.startswith("--unit")]
    assert bench.claims() == {"GPU-a1": {"a": EACH, "b": EACH}, "GPU-b0": {"b": EACH}}
    left = {one.name: one.free_resources["GPU"] for one in bench.models.places.nodes()}
    assert left == {"worker-a": 1.0, "worker-b": 0.0}


async def test_a_unit_of_two_gpus_has_an_instance_with_two_workers(bench: PlacedBench) -> None:
    two_nodes(bench, flags=("--mixed-shapes",))
    await bench.want_placement(placed(unit("left", "worker-a", [1, 0], "a"), RIGHT))
    (wanted,) = bench.wish()[A]
    assert (wanted.gpus, wanted.count) == (("GPU-a1", "GPU-a0"), 2)
    take_units(bench, left="GPU-a1 GPU-a0")
    words = bench.starts()["a"].words
    assert "--instance-gpus=i0: GPU-a1,GPU-a0" in words
    assert "--instance-flags=i0: --tensor-parallel-size=2" in words
    assert bench.claims()["GPU-a0"] == {"a": EACH}


async def test_places_with_kv_caches_of_their_own_sizes_start_with_these(
    bench: PlacedBench,
) -> None:
    other = [{"name": "b", "kv_bytes": GIB, "held_bytes": GIB}]
    await both_start(bench, placed(LEFT, {**RIGHT, "models": other}))
    words = bench.starts()["b"].words
    assert f"--instance-flags=i0: --kv-cache-memory-bytes={KV}" in words
    assert f"--instance-flags=i1: --kv-cache-memory-bytes={GIB}" in words


async def test_a_worker_that_comes_back_gives_its_units_the_gpus_that_it_has_now(
    bench: PlacedBench,
) -> None:
    await both_start(bench)
    bench.see(replace(node("a", 0, 0), alive=False), node("b", 0))
    bench.turn(1)
    assert bench.wish().keys() == {A, B}
    bench.turn(LEASE_S)
    assert bench.wish().keys() == {B}
    assert "GPU-a1" not in {gpu for one in bench.models.units.every() for gpu in one.every_gpu}
    assert bench.models.units.waits("left") == "worker worker-a of unit left is not there"
    fresh = replace(node("c", 0, 0), name="worker-a")
    bench.see(replace(node("a", 0, 0), alive=False), node("b", 0), fresh)
    bench.turn(1)
    assert bench.wish()[fresh.node_id][0].gpus == ("GPU-c1",)


async def test_a_worker_that_comes_back_without_a_units_gpu_is_named_with_it(
    bench: PlacedBench,
) -> None:
    await both_start(bench)
    bench.see(replace(node("a", 0, 0), alive=False), node("b", 0))
    bench.turn(1)
    bench.turn(LEASE_S)
    fresh = replace(node("c", 0), name="worker-a")
    bench.see(replace(node("a", 0, 0), alive=False), node("b", 0), fresh)
    bench.turn(1)
    assert fresh.node_id not in bench.wish()
    assert bench.models.units.waits("left") == "unit left: worker worker-a has no GPU 1"


async def test_the_next_server_keeps_the_gpus_of_units_in_which_models_run(
    bench: PlacedBench, tmp_path: Path
) -> None:
    await both_start(bench)
    then = PlacedBench(tmp_path)
    then.specs = bench.specs
    then.adopt(*bench.running)
    then.see(node("a", 0, 0), node("b", 0))
    then.models.take_catalogue(bench.named(name).wanted for name in "ab")
    then.adopt(*bench.running)
    then.turns()
    assert {name: one[0].gpus for name, one in then.wish().items()} == {
        A: ("GPU-a1",), B: ("GPU-b0",),
    }  # fmt: skip
    await then.models.close()


async def test_what_a_workers_gpus_cant_do_is_refused_with_a_sentence(bench: PlacedBench) -> None:
    two_nodes(bench)
    allowed = "unit left: gpus has 7, allowed are those of worker worker-a: 0, 1"
    assert allowed in await bench.refused(placed(unit("left", "worker-a", [7], "a b")))
    half = unit("left", "worker-a", [], "a")
    assert "unit left: gpus is empty, must have GPUs as unit right" in await bench.refused(
        placed(half, RIGHT)
    )
    two = unit("left", "worker-a", [0, 1], "a b")
    assert "must have 1, one for each worker of model a" in await bench.refused(placed(two))
    twice = placed(unit("x", "worker-a", [0], "a"), unit("y", "worker-a", [0], "b"))
    assert "GPU 0 of worker worker-a is in two units" in await bench.refused(twice)
    bench.add_models("b", flags=("--ray-resources", '{"CPU": 1}'))
    assert "model b uses no GPU by --ray-resources" in await bench.refused(TWO)


async def test_a_model_that_ray_has_given_a_gpu_must_start_again_in_its_unit(
    bench: PlacedBench,
) -> None:
    bench.see(node("a", 0, 0), node("b", 0))
    bench.add_models("a")
    bench.models.wake("a")
    bench.turns()
    assert await bench.refused(placed(unit("left", "worker-a", [1], "a"))) == (
        "placement: model a was not started on GPUs of unit left, must start as a member: kvmig"
        " model off a, set the placement, kvmig model on a"
    )


async def test_a_unit_stays_on_its_worker_and_gpus_as_long_as_its_models_run(
    bench: PlacedBench,
) -> None:
    await both_start(bench)
    assert all(bench.watched_of(name) for name in "ab")
    await bench.placement.reach_placement(None)
    said = await bench.refused(placed({**LEFT, "gpus": [0]}, RIGHT))
    assert "unit left: gpus is [0], must be [1] as long as models of it run there" in said
    said = await bench.refused(placed({**LEFT, "worker": "worker-b", "gpus": [0]}))
    assert "unit left: worker is 'worker-b', must be worker-a as long as models" in said


# -- KV cache that models share


def shared(*units: dict[str, Any]) -> dict[str, Any]:
    return placed(*({**one, "arena_bytes": ARENA} for one in units))


async def test_workers_start_the_agents_of_units_on_their_gpus_and_models_join_them(
    bench: PlacedBench,
) -> None:
    two_nodes(bench)
    await bench.want_placement(shared(LEFT, RIGHT))
    assert bench.wish()[A] == (WantedUnit(path=bench.path("left"), memory=ARENA, gpus=("GPU-a1",)),)
    assert bench.named("a").life.why == "the agent of unit left starts on its worker"
    take_units(bench)
    words = bench.starts()["b"].words
    for word in (
        f"--unit={bench.path('left')}", f"--unit=left: {bench.path('left')}",
        f"--unit=right: {bench.path('right')}", "--instance-unit=i1: right",
        f"--instance-node=i1: {B}",
    ):  # fmt: skip
        assert word in words
    assert not [one for one in words if one.startswith("--instance-gpu")]
    assert bench.claims()["GPU-a1"] == {"unit left": ARENA, "a": EACH, "b": EACH}


async def test_units_on_workers_cpus_keep_their_kv_cache_of_the_nodes_memory(
    bench: PlacedBench,
) -> None:
    bench.see(node("a", memory=40 * GIB), node("b", memory=40 * GIB))
    bench.add_models(gpu_memory=0, memory=GIB)
    await bench.want_placement(shared({**LEFT, "gpus": []}, {**RIGHT, "gpus": []}))
    assert bench.wish()[A] == (WantedUnit(path=bench.path("left"), memory=ARENA),)
    left = {one.name: one.available for one in bench.models.places.nodes()}
    assert left == {"worker-a": 40 * GIB - ARENA, "worker-b": 40 * GIB - ARENA}
    a, b = node("a", memory=40 * GIB), node("b", memory=40 * GIB)
    bench.see(bench.with_units(a, left=""), bench.with_units(b, right=""))
    bench.turns()
    assert f"--unit=right: {bench.path('right')}" in bench.starts()["b"].words


async def test_kv_cache_on_a_worker_without_the_name_of_its_gpu_is_refused(
    bench: PlacedBench,
) -> None:
    two_nodes(bench)
    said = await bench.refused(shared({**LEFT, "gpus": []}))
    assert said == (
        "placement: unit left: gpus is empty, must have one of those of worker worker-a, 0, 1:"
        " model a uses a GPU, on which its KV cache is"
    )


# -- planned again


def inventory(*kinds: str) -> DeviceInventory:
    return DeviceInventory(
        devices=tuple(
            DeviceRecord(id=str(at), index=at, uuid=f"GPU-{at}", name=kind, total=GIB, used=0)
            for at, kind in enumerate(kinds)
        )
    )


def test_a_placement_on_workers_can_be_planned_again_where_each_model_may_be_everywhere() -> None:
    wanted = placement_from(TWO, "placement")
    there = {"worker-a": inventory("A100", "A100"), "worker-b": inventory("A100")}
    check_replan(wanted, lambda name, worker: "", there)
    with pytest.raises(ConfigError) as error:
        check_replan(wanted, lambda name, worker: "no" if worker == "worker-b" else "", there)
    assert str(error.value) == (
        "replan is given, must be left out: model a may come to each unit, but worker worker-b of"
        " unit right can't have it: no"
    )


def test_units_on_gpus_of_several_kinds_are_not_planned_again() -> None:
    there = {"worker-a": inventory("H100", "A100"), "worker-b": inventory("H100")}
    with pytest.raises(ConfigError, match=r"have A100 \(unit left\), H100 \(unit right\)"):
        check_replan(placement_from(TWO, "placement"), lambda name, worker: "", there)


async def test_why_a_worker_cant_have_a_model_names_the_label_or_the_engine(
    bench: PlacedBench,
) -> None:
    two_nodes(bench)
    spec = bench.specs["a"]
    assert bench.pool.refuses(spec, "worker-a") == ""
    east = replace(spec, worker_selector={"zone": "east"})
    assert bench.pool.refuses(east, "worker-a") == "it has no label zone=east"
    assert bench.pool.refuses(spec, "worker-z") == "it is not there"


# -- lost workers


async def test_a_placement_knows_a_worker_as_lost_after_a_lease_only(bench: PlacedBench) -> None:
    bench.see(replace(node("a", 0), alive=False), node("b", 0))
    assert not bench.pool.is_gone("worker-a")
    assert not bench.pool.is_gone("worker-z")
    bench.turn(LEASE_S)
    assert [bench.pool.is_gone(f"worker-{one}") for one in "abz"] == [True, False, True]
    bench.see(replace(node("a", 0), alive=False), replace(node("c", 0), name="worker-a"))
    assert not bench.pool.is_gone("worker-a")
