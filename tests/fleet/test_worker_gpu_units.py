"""Units on workers with GPUs: each has one GPU, which Ray gives it, and its bytes are nobody
else's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvmig.core.api_records import InstanceRow
from kvmig.core.errors import ConfigError
from kvmig.fleet.capacity import ResidentModel, SharedHold, WaitingModel, plan
from kvmig.fleet.device_room import DeviceMemory, DeviceNeed
from kvmig.fleet.placement_controller import DesiredPlacement, PlacementController
from kvmig.fleet.spec import ModelSpec
from kvmig.fleet.unit_plan import allowed_gpus, check_kinds, whole_need
from kvmig.fleet.worker_nodes import WorkerNode
from kvmig.fleet.workers import LEASE_S
from kvmig.launcher.node_files import WantedUnit
from kvmig.launcher.node_reports import NodeReport, UnitReport
from tests.fleet.test_worker_gpus import node
from tests.fleet.test_worker_units import UnitBench
from tests.support.made_up_nodes import GIB
from tests.support.model_bench import silence
from tests.support.worker_bench import A, B, row

ARENA, EACH = 20 * GIB, 5 * GIB
ENGINE: dict[str, Any] = {"engine": "vllm", "unit_memory": ARENA, "memory": 0, "gpu_memory": EACH}


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[UnitBench]:
    silence(monkeypatch)  # what a deployment tells, the test says
    made = UnitBench(tmp_path)
    yield made
    await made.models.close()


def add(bench: UnitBench, **more: Any) -> None:
    bench.add_both(of_a={**ENGINE, **more}, **{**ENGINE, **more})


def member(name: str, **more: Any) -> ModelSpec:
    """A model in unit u."""
    return ModelSpec(name=name, source="path:/a", unit="u", **{**ENGINE, **more})


def answering(bench: UnitBench, found: NodeReport, gpu: str) -> NodeReport:
    """The node once its agent has a GPU for the unit, and the unit's agent answers."""
    free = {**found.free, "GPU": found.free["GPU"] - 1}
    return replace(with_unit(found, UnitReport(path=bench.path, gpus=(gpu,))), free=free)


def with_unit(found: NodeReport, unit: UnitReport) -> NodeReport:
    assert found.measured is not None
    return replace(found, measured=replace(found.measured, units=(unit,)))


def claims(bench: UnitBench) -> dict[str, dict[str, int]]:
    return {one.id: dict(one.claims) for one in bench.models.places.devices() if one.claims}


def wanted(bench: UnitBench, *gpus: str) -> WantedUnit:
    return WantedUnit(path=bench.path, memory=ARENA, gpus=gpus)


def there(name: str, node: str, gpu: str) -> InstanceRow:
    return replace(row(name, node), gpus=(gpu,))


async def both_start(bench: UnitBench) -> None:
    """Models a and b on GPU 1 of worker a, which Ray has given."""
    bench.see(node("a", 0, 0))
    add(bench)
    bench.see(answering(bench, node("a", 0, 0), "GPU-a1"))
    bench.ask()
    bench.ask()
    assert len(bench.started) == 2


async def both_serve(bench: UnitBench, *others: NodeReport) -> None:
    await both_start(bench)
    for name in "ab":
        bench.tell(name, there("i0", A, "1"))
    bench.see(answering(bench, node("a", 0, 0), "GPU-a1"), *others)
    bench.ask()


async def test_a_unit_goes_to_a_gpu_with_room_for_all_of_it_and_may_get_any_such(
    bench: UnitBench,
) -> None:
    bench.see(node("a", 15 * GIB), node("b", 30 * GIB, 5 * GIB, 0))
    add(bench)
    assert bench.wish() == {B: (wanted(bench, "GPU-b2", "GPU-b1"),)}
    assert claims(bench) == {"GPU-b2": {"unit u": ARENA}}
    assert bench.started == []


async def test_models_start_on_the_units_worker_and_take_no_gpu_of_their_own(
    bench: UnitBench,
) -> None:
    await both_start(bench)
    for start in bench.started:
        assert f"--unit={bench.path}" in start.words
        assert f"--instance-node=i0: {A}" in start.words
    (at,) = bench.models.places.nodes()
    assert at.free_resources["GPU"] == 1.0, "the unit has one of two"


async def test_the_gpu_that_ray_gave_the_unit_counts_with_its_cache_and_its_models(
    bench: UnitBench,
) -> None:
    await both_start(bench)
    assert claims(bench) == {"GPU-a1": {"unit u": ARENA, "a": EACH, "b": EACH}}
    assert bench.wish() == {A: (wanted(bench, "GPU-a1"),)}


async def test_a_model_waits_for_the_gpu_and_says_so(bench: UnitBench) -> None:
    bench.see(node("a", 0))
    add(bench)
    refused = UnitReport(path=bench.path, why="Ray has not given GPU GPU-a0 yet")
    bench.see(with_unit(node("a", 0), refused))
    bench.ask()
    bench.ask()
    why = "the agent of unit u starts on its worker: Ray has not given GPU GPU-a0 yet"
    assert bench.named("a").life.why == why
    assert bench.started == []


async def test_a_unit_whose_bytes_no_gpu_has_free_waits(bench: UnitBench) -> None:
    bench.see(node("a", 15 * GIB))
    add(bench)
    assert bench.wish() == {}
    assert bench.named("a").life.why.startswith("no room: it needs 30.0 GiB of a GPU")


async def test_a_lost_workers_claims_end_after_the_lease_also_if_its_gpus_come_back(
    bench: UnitBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await both_serve(bench)
    bench.serve(monkeypatch, replace(row("i0", A, "starting"), gpus=("1",)))
    back = replace(node("a", 0, 0), node_id=B, name="back")  # another node with the same GPUs
    bench.see(replace(node("a", 0, 0), alive=False), back)
    bench.turn(1)
    assert claims(bench)["GPU-a1"]["unit u"] == ARENA
    bench.turn(LEASE_S)
    assert await bench.orders() == []
    (unit,) = bench.models.units.every()
    assert unit.places.keys() == {B}
    gpus = bench.wish()[B][0].gpus
    assert sorted(gpus) == ["GPU-a0", "GPU-a1"]
    bench.see(replace(node("a", 0, 0), alive=False), answering(bench, back, "GPU-a0"))
    bench.turn()
    assert await bench.orders() == [("add", B)]
    assert claims(bench)["GPU-a0"]["unit u"] == ARENA


async def test_the_next_server_knows_the_units_gpu_and_claims_it(
    bench: UnitBench, tmp_path: Path
) -> None:
    await both_serve(bench)
    then = bench.next_server(tmp_path)
    then.see(answering(bench, node("a", 0, 0), "GPU-a1"))
    then.models.reconcile()
    assert then.wish() == {A: (wanted(bench, "GPU-a1"),)}
    assert claims(then)["GPU-a1"] == {"unit u": ARENA, "a": EACH, "b": EACH}
    await then.models.close()


async def test_a_unit_that_ends_gives_its_gpu_back(bench: UnitBench) -> None:
    await both_serve(bench)
    deployments = [bench.named(name).deployment for name in "ab"]
    bench.models.take_catalogue([replace(bench.named(one).wanted, on=False) for one in "ab"])
    bench.turn(1)
    for one in deployments:
        bench.report_end(one)
    bench.models.reconcile()
    bench.models.reconcile()
    assert bench.wish() == {}
    assert claims(bench) == {}


async def test_gpus_that_no_worker_has_are_refused_by_name(bench: UnitBench) -> None:
    bench.see(node("a", 0), node("b", 0))
    spec = member("a", gpus=("GPU-a7",))
    allowed = r"UUIDs of workers' GPUs: GPU-a0 \(worker-a\), GPU-b0 \(worker-b\)"
    with pytest.raises(ConfigError, match=f"model a: gpus has 'GPU-a7', must be {allowed}"):
        bench.pool.check(spec)
    with pytest.raises(ConfigError, match="model a: gpus has '0', must be UUIDs of workers'"):
        bench.pool.check(replace(spec, gpus=("0",)))
    bench.pool.check(replace(spec, gpus=("GPU-b0",)))
    alone = replace(spec, unit="", unit_memory=0, gpus=("GPU-b0",))
    with pytest.raises(ConfigError, match="model a: gpus is given, must be left out"):
        bench.pool.check(alone)


async def test_a_unit_goes_to_the_gpus_that_its_models_name(bench: UnitBench) -> None:
    bench.see(node("a", 0), node("b", 0, 0))
    add(bench, gpus=("GPU-b1",))
    assert bench.wish() == {B: (wanted(bench, "GPU-b1"),)}


async def test_a_named_gpu_with_too_few_bytes_is_refused_in_bytes(bench: UnitBench) -> None:
    bench.see(node("a", 0, total=24 * GIB), node("b", 0))
    specs = [member(name, gpus=("GPU-a0",)) for name in "ab"]
    few = f"has {24 * GIB} bytes, {6 * GIB} too few"
    with pytest.raises(ConfigError, match=few):
        bench.models.units.check("u", specs)


async def test_models_that_name_gpus_without_one_in_common_are_refused(bench: UnitBench) -> None:
    bench.see(node("a", 0), node("b", 0))
    specs = [member("a", gpus=("GPU-a0",)), member("b", gpus=("GPU-b0",))]
    with pytest.raises(ConfigError, match="gpus of its models must have one GPU in common"):
        bench.models.units.check("u", specs)


async def test_more_than_one_gpu_for_a_model_of_a_unit_is_refused(bench: UnitBench) -> None:
    bench.see(node("a", 0, 0))
    spec = member("a")
    two = replace(spec, flags=("--ray-resources", '{"GPU": 2}'))
    with pytest.raises(ConfigError, match="model a: --ray-resources has 2 GPU, must be 1 with"):
        bench.pool.check(two)
    cpus = replace(spec, gpus=("GPU-a0",), flags=("--ray-resources", '{"CPU": 2}'))
    with pytest.raises(ConfigError, match="gpus is GPU-a0, must be left out: it uses no GPU"):
        bench.pool.check(cpus)


def test_models_of_which_some_use_no_gpu_are_refused() -> None:
    check_kinds("u", {"a": True, "b": True})
    with pytest.raises(ConfigError, match="--ray-resources of b has no GPU, must have 1 as of a"):
        check_kinds("u", {"a": True, "b": False})


def test_a_unit_may_get_any_gpu_of_its_worker_that_is_large_enough_and_that_it_names() -> None:
    whole = whole_need({}, 10)
    usable = {"a": 9, "b": 10, "c": 20}
    assert allowed_gpus(whole, ("c",), usable) == ("c", "b")


def test_idle_models_of_a_unit_end_for_one_that_waits_for_their_gpu() -> None:
    claims = {"unit u": ARENA, "a": EACH, "b": EACH}
    gpu = DeviceMemory("g", "GPU 0", 40 * GIB, claims=claims)
    worker = WorkerNode(
        "w", 8 * GIB, 8 * GIB, (gpu,), resources={"GPU": 1.0}, free_resources={"GPU": 0.0}
    )
    unit = SharedHold("u", frozenset("ab"), {"g": ARENA}, {"w": {"GPU": 1.0}})

    def resident(name: str, *, kept: bool = False) -> ResidentModel:
        return ResidentModel(
            name, 0, since=0.0, stay_s=0.0, idle_s=9.0, held={"g": EACH}, shared=unit, on={"w": 0},
            kept=kept,
        )  # fmt: skip

    c = WaitingModel("c", 0, 0.0, DeviceNeed(5 * GIB), resources={"GPU": 1.0})
    assert plan([worker], [c], [resident("a"), resident("b")], 99.0).yielding == {"a", "b"}
    assert plan([worker], [c], [resident("a"), resident("b", kept=True)], 99.0).yielding == set()


class OwnPlacements(PlacementController):
    """What a placement sees of an instance."""

    def seen(self, one: InstanceRow) -> InstanceRow:
        return self._by_index(one)


async def test_an_instance_whose_worker_is_silent_is_seen_with_the_gpus_that_it_reports(
    bench: UnitBench,
) -> None:
    async def store(wanted: DesiredPlacement) -> None:
        raise AssertionError(wanted)

    bench.see(replace(node("a", 0, 0), silent_s=60.0))
    placements = OwnPlacements(bench.models, store)
    assert placements.seen(there("i0", A, "1")) == there("i0", A, "1")
