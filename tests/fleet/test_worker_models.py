"""Models on workers: where their instances are ordered to, and how these leave."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvmig.core.errors import ConfigError, StartupError
from kvmig.fleet.deployments import DeploymentEvent
from kvmig.fleet.managed_model import CatalogEntry
from kvmig.fleet.rollout import RolloutPlan, RolloutTerms, begun
from kvmig.fleet.rollout_table import StoredRollout
from kvmig.fleet.settings import FleetSettings, check_settings
from kvmig.fleet.spec import InstanceCounts, ModelSpec
from kvmig.fleet.worker_pool import WorkerPool
from kvmig.fleet.workers import LEASE_S, WorkerWish
from kvmig.placement.file import PlacedUnit
from kvmig.proxy.messages import ModelDemand, ModelWanted, ProxyDemand
from tests.support.made_up_nodes import GIB, cluster_of, made_up_node, node_id
from tests.support.model_bench import silence
from tests.support.worker_bench import A, B, WorkerBench, drain, row


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WorkerBench]:
    silence(monkeypatch)  # what a deployment tells, the test says
    made = WorkerBench(tmp_path)
    yield made
    await made.models.close()


async def test_a_model_waits_for_a_worker_and_says_so(bench: WorkerBench) -> None:
    bench.add()
    assert bench.model.life.why == "no room: there is no worker"
    bench.see(made_up_node("a"))
    bench.turn()
    assert bench.model.life.state == "starting"


async def test_its_first_instances_are_ordered_to_nodes(bench: WorkerBench) -> None:
    bench.see(made_up_node("a"), made_up_node("b"))
    bench.add(instances=InstanceCounts(min=2, max=2))
    words = bench.start.words
    assert "--ray=10.0.0.1:6379" in words
    assert '--ray-resources={"CPU":2.0}' in words
    placed = {one.rpartition(" ")[2] for one in words if one.startswith("--instance-node=")}
    assert placed == {A, B}
    (note,) = bench.notes
    assert sorted(note.nodes.values()) == [A, B]


async def test_on_nodes_with_gpus_an_instance_takes_a_gpu(bench: WorkerBench) -> None:
    bench.see(made_up_node("a", total={"GPU": 1.0}, free={"GPU": 1.0}))
    bench.add()
    assert '--ray-resources={"GPU":1.0}' in bench.start.words


async def test_the_resources_of_its_flags_are_its_own(bench: WorkerBench) -> None:
    bench.see(made_up_node("a"))
    bench.add(flags=("--ray-resources", '{"CPU": 5}'))
    assert bench.model.life.why == "no room: it needs 5 CPU, 4 CPU is free"
    (node,) = bench.models.why_not(bench.model).nodes
    assert (node.node, node.refusals[0].why) == ("worker-a", "it has 4 CPU free of 5 CPU")


def test_a_limit_of_all_memory_is_refused_on_workers(tmp_path: Path) -> None:
    settings = FleetSettings(data=str(tmp_path), ray="10.0.0.1:6379", memory=1 << 30)
    with pytest.raises(ConfigError, match="--memory is 1073741824, must be left out with --ray"):
        check_settings(settings)


async def test_only_a_worker_with_its_labels_gets_an_instance(bench: WorkerBench) -> None:
    bench.pool.take_wishes([WorkerWish(name="worker-b", labels={"zone": "east"})])
    bench.see(made_up_node("a", memory=64 * GIB), made_up_node("b"))
    bench.add(worker_selector={"zone": "east"})
    assert f"--instance-node=i0: {B}" in bench.start.words
    kept = bench.models.places.history.decision(bench.model.deployment, "i0")
    assert kept is not None
    chosen, refused = kept.explanation.nodes
    assert (chosen.node, chosen.chosen, refused.node) == ("worker-b", True, "worker-a")
    assert refused.refusals[0].why == "it has no label zone, must have 'east'"


def other_model(cpus: int) -> CatalogEntry:
    """Model b, each instance of which needs so many CPUs."""
    flags = ("--ray-resources", f'{{"CPU": {cpus}}}')
    spec = ModelSpec(name="b", source="path:/models/b", engine="toy", flags=flags)
    return CatalogEntry("m2", "b", 1, True, spec)


async def test_a_busy_model_moves_to_another_worker_where_that_makes_room(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.see(made_up_node("a"))
    bench.add(flags=("--ray-resources", '{"CPU": 2}'))
    bench.see(made_up_node("a"), made_up_node("b", total={"CPU": 2.0}, free={"CPU": 2.0}))
    bench.serve(monkeypatch, row("i0", A))
    bench.turn(1)
    bench.models.take_catalogue([bench.model.wanted, other_model(cpus=4)])
    bench.models.take_want(ModelWanted("b"))
    watched = bench.watched_of()

    async def add(count: int, gpus: Any = (), node: str = "") -> set[str]:
        bench.asked.append(("add", node))
        watched.take_event(DeploymentEvent(1, data=(row("i0", A), row("i9", B, "starting"))))
        return {"i9"}

    monkeypatch.setattr(watched, "add", add)
    bench.turn()
    assert (
        bench.named("b").life.why == "no room: it needs 4 CPU, 2 CPU is free; instances move for it"
    )
    await asyncio.sleep(0)
    assert bench.asked == [("add", B)]
    assert bench.model.nodes.node_of(row("i9", "")) == B
    watched.take_event(DeploymentEvent(1, data=(row("i0", A), row("i9", B))))
    assert bench.model.ordering is not None
    await bench.model.ordering
    assert bench.asked == [("add", B), ("drain", "i0", None)]
    watched.take_event(DeploymentEvent(1, data=(row("i9", B),)))
    bench.turn()
    assert f"--instance-node=i0: {A}" in bench.started[-1].words


async def test_an_idle_model_ends_on_the_worker_where_another_one_has_room_then(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.see(made_up_node("a"), made_up_node("b", total={"CPU": 1.0}, free={"CPU": 1.0}))
    bench.add(flags=("--ray-resources", '{"CPU": 3}'))
    assert f"--instance-node=i0: {A}" in bench.start.words
    bench.serve(monkeypatch, row("i0", A))
    bench.turn(1)
    idle = ProxyDemand(0, 0.5, (ModelDemand("a", 0, 0, 0, 0.0),))
    bench.models.take_catalogue([bench.model.wanted, other_model(cpus=2)])
    bench.watched_of().told = DeploymentEvent(0, data=(row("i0", A),))
    bench.now += 60
    bench.models.take_demand("p0", idle)
    bench.models.take_want(ModelWanted("b"))
    bench.models.reconcile()
    assert (
        bench.named("b").life.why
        == "no room: it needs 2 CPU, 1 CPU is free; idle models end for it"
    )
    assert bench.model.life.state == "emptying"


async def test_a_cordoned_worker_gets_no_instance(bench: WorkerBench) -> None:
    bench.pool.take_wishes([WorkerWish(name="worker-a", cordoned=True)])
    bench.see(made_up_node("a"), made_up_node("b", memory=GIB))
    bench.add()
    assert f"--instance-node=i0: {B}" in bench.start.words


async def test_an_instance_more_is_ordered_where_memory_is_left(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.see(made_up_node("a"), made_up_node("b", memory=7 * GIB))
    bench.add(instances=InstanceCounts(min=2, max=2), memory=2 * GIB)
    bench.serve(monkeypatch, row("i0", A))
    assert await bench.orders() == [("add", B)]


async def test_a_drained_workers_instance_leaves_once_another_one_serves(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.see(made_up_node("a"), made_up_node("b"))
    bench.pool.take_wishes([drain(until=1060.0)])
    bench.add()
    bench.serve(monkeypatch, row("i0", A))
    assert await bench.orders() == [("add", B)]
    bench.serve(monkeypatch, row("i0", A), row("i1", B, "starting"))
    assert await bench.orders() == []
    assert bench.model.stays == "other instances start first"
    bench.serve(monkeypatch, row("i0", A), row("i1", B))
    assert await bench.orders() == [("drain", "i0", 1060.0 - bench.now)]
    bench.serve(monkeypatch, row("i0", A, "draining"), row("i1", B))
    assert await bench.orders() == []


async def test_the_next_server_goes_on_with_a_drain(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows no more than the database and what the deployment tells."""
    bench.see(made_up_node("a"), made_up_node("b"))
    bench.pool.take_wishes([drain()])
    bench.add()
    bench.model.scaling = None
    bench.serve(monkeypatch, row("i0", A), row("i1", B))
    assert await bench.orders() == [("drain", "i0", None)]


async def test_a_drain_that_has_nowhere_to_go_says_why(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.see(made_up_node("a"))
    bench.add()
    bench.pool.take_wishes([drain()])
    bench.serve(monkeypatch, row("i0", A))
    assert await bench.orders() == []
    (here,) = bench.models.instances_on(A)
    assert here.stays == "no worker has room: worker-a: it is being drained"


async def test_what_is_drained_serves_again_when_its_worker_is_uncordoned(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.see(made_up_node("a"), made_up_node("b"))
    bench.pool.take_wishes([drain()])
    bench.add()
    bench.serve(monkeypatch, row("i0", A), row("i1", B))
    assert await bench.orders() == [("drain", "i0", None)]
    bench.pool.take_wishes([])
    bench.serve(monkeypatch, row("i0", A, "draining"), row("i1", B))
    assert await bench.orders() == [("keep", "i0")]


async def test_one_whose_drain_was_refused_is_taken_away_later_like_any_other(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(instance: str, deadline_s: float | None = None) -> None:
        raise StartupError("not now")

    monkeypatch.setattr("kvmig.fleet.instance_orders.PAUSE_S", 0.0)
    bench.see(made_up_node("a"), made_up_node("b"))
    bench.pool.take_wishes([drain()])
    bench.add()
    bench.serve(monkeypatch, row("i0", A), row("i1", B))
    monkeypatch.setattr(bench.model.watched, "drain", refuse)
    assert await bench.orders() == []
    bench.pool.take_wishes([])
    bench.serve(monkeypatch, row("i0", A), row("i1", B))
    assert await bench.orders() == [("drain", "i0", None)], "one is enough"
    bench.serve(monkeypatch, row("i0", A, "draining"), row("i1", B))
    assert await bench.orders() == []


async def test_another_instance_that_can_not_start_is_tried_less_and_less_often_and_named(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(count: int, gpus: Any = (), node: str = "") -> set[str]:
        bench.asked.append(("add", node))
        raise StartupError("its engine has no such flag")

    bench.see(made_up_node("a"), made_up_node("b"))
    bench.add()
    bench.pool.take_wishes([drain()])
    bench.serve(monkeypatch, replace(row("i0", A), blocks_used=990, running=9))
    monkeypatch.setattr(bench.model.watched, "add", refuse)
    tries = []
    for _ in range(200):
        tries += [bench.now for one in await bench.orders() if one == ("add", B)]
    pauses = [later - before for before, later in itertools.pairwise(tries)]
    assert pauses == [11.0, 21.0, 41.0, 81.0]
    (here,) = bench.models.instances_on(A)
    assert here.stays.startswith("no other instance starts: its engine has no such flag; the next")
    bench.serve(monkeypatch, row("i0", A), row("i1", B))
    assert await bench.orders() == [("drain", "i0", None)]


async def test_a_second_drain_sets_another_deadline_for_what_leaves_already(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def set_deadline(instance: str, deadline_s: float | None) -> None:
        bench.asked.append(("deadline", instance, deadline_s))

    bench.see(made_up_node("a"), made_up_node("b"))
    bench.pool.take_wishes([drain(until=5000.0)])
    bench.add()
    bench.serve(monkeypatch, row("i0", A), row("i1", B))
    assert await bench.orders() == [("drain", "i0", 5000.0 - bench.now)]
    monkeypatch.setattr(bench.model.watched, "set_deadline", set_deadline)
    bench.serve(monkeypatch, row("i0", A, "draining"), row("i1", B))
    assert await bench.orders() == []
    bench.pool.take_wishes([drain(until=1500.0)])
    assert await bench.orders() == [("deadline", "i0", 1500.0 - bench.now)]
    assert await bench.orders() == []


async def test_a_lost_workers_instance_starts_elsewhere_after_a_lease(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.see(made_up_node("a"), made_up_node("b", memory=GIB))
    bench.add()
    bench.serve(monkeypatch, row("i0", A))
    assert await bench.orders() == []
    bench.see(made_up_node("a", alive=False), made_up_node("b"))
    bench.serve(monkeypatch, row("i0", A, "starting"))
    assert await bench.orders() == []
    bench.now += LEASE_S
    assert await bench.orders() == [("add", B)]
    bench.serve(monkeypatch, row("i0", A, "starting"), row("i1", B, "starting"))
    assert await bench.orders() == [], "that one may fail, and the deployment with it"
    bench.serve(monkeypatch, row("i0", A, "starting"), row("i1", B))
    assert await bench.orders() == [("drain", "i0", None)]


async def test_a_lost_workers_instance_is_replaced_also_while_a_roll_out_is_under_way(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.see(made_up_node("a"), made_up_node("b"))
    bench.add(instances=InstanceCounts(min=2, max=2))
    rolled = replace(row("i1", B), flags="--max-num-seqs=9")
    bench.serve(monkeypatch, row("i0", A), rolled)
    assert await bench.orders() == []
    bench.turn(1)
    assert bench.model.rolls
    bench.model.ordering, bench.asked = None, []  # the restart is not what is tested
    bench.see(made_up_node("a", alive=False), made_up_node("b"))
    bench.serve(monkeypatch, row("i0", A, "starting"), rolled)
    assert await bench.orders() == []
    bench.now += LEASE_S
    assert await bench.orders() == [("add", B)]


async def test_a_worker_that_comes_back_with_its_name_has_room_for_what_it_had(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.see(made_up_node("a"))
    bench.add(memory=5 * GIB)
    bench.serve(monkeypatch, row("i0", A))
    assert await bench.orders() == []
    bench.see(made_up_node("a", alive=False), made_up_node("b", name="worker-a"))
    bench.serve(monkeypatch, row("i0", A, "starting"))
    assert await bench.orders() == []
    bench.now += LEASE_S
    assert await bench.orders() == [("add", B)]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"gpus": ("0",)}, "gpus is given, must be left out with `kvmig up --ray`"),
        ({"instances": InstanceCounts(target_kind="freeness")}, "target_kind is 'freeness'"),
        ({"load": "auto"}, "load is 'auto', must be left out with `kvmig up --ray`"),
        ({"engine": "command"}, "engine is 'command', must be vllm or transformers with"),
    ],
)
def test_what_only_one_host_has_is_refused_for_workers(more: dict[str, Any], sentence: str) -> None:
    spec = ModelSpec(name="a", source="path:/a", **more)
    with pytest.raises(ConfigError, match=sentence):
        WorkerPool("auto").check(spec)
    WorkerPool().check(spec)


def roll_out(bench: WorkerBench, plan: RolloutPlan) -> None:
    """The catalogue has a new revision, which needs a deployment of its own."""
    before = bench.model.wanted.spec
    new = replace(before, source="path:/models/new")
    entry = CatalogEntry("m1", "a", 2, True, new, StoredRollout(plan, before))
    bench.models.take_catalogue([entry])


async def test_a_roll_out_whose_new_deployment_no_worker_may_take_leaves_the_old_one(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.see(made_up_node("a"))
    bench.add()
    bench.serve(monkeypatch, row("i0", A))
    bench.turn(1)
    bench.pool.take_wishes([WorkerWish(name="worker-a", cordoned=True)])
    roll_out(bench, begun(RolloutTerms(deadline_s=5), 1, 2, bench.now))
    for _ in range(8):
        bench.turn(1)
    assert bench.model.life.state == "serving"
    beside = bench.models.rollouts.beside("a")
    assert beside is not None
    assert beside.life.why == "no room: no worker takes it now: of 1, 1 cordoned"


async def test_what_a_roll_out_leaves_gathers_away_from_a_worker_that_is_drained(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = node_id("c")
    bench.see(made_up_node("a"), made_up_node("b"), made_up_node("c"))
    bench.add(instances=InstanceCounts(min=2, max=2))
    bench.serve(monkeypatch, replace(row("i0", A), blocks_used=9), row("i1", B))
    bench.turn(1)
    roll_out(bench, replace(begun(RolloutTerms(), 1, 2, bench.now), step=0))
    bench.turn(1)
    beside = bench.models.rollouts.beside("a")
    assert beside is not None
    assert beside.watched is not None
    beside.watched.told = DeploymentEvent(0, data=(row("i0", c), row("i1", c)))
    bench.turn(1)
    bench.pool.take_wishes([drain(until=bench.now + 60)])
    ((what, instance, deadline_s),) = await bench.orders()
    assert (what, instance) == ("drain", "i0")
    assert deadline_s == pytest.approx(60, abs=5), "the drain's deadline counts"


def unit_on(worker: str) -> PlacedUnit:
    return PlacedUnit(memory_bytes=9, name=f"of {worker}", worker=worker)


async def test_a_model_that_a_placement_has_on_workers_starts_on_these(bench: WorkerBench) -> None:
    bench.see(made_up_node("a"), made_up_node("b"), made_up_node("c", memory=64 * GIB))
    bench.models.place({"a": [unit_on("worker-b"), unit_on("worker-a")]})
    bench.add()
    words = bench.start.words
    assert {f"--instance-node=i0: {B}", f"--instance-node=i1: {A}"} <= {*words}
    assert {"--instance-unit=i0: of worker-b", "--instance-unit=i1: of worker-a"} <= {*words}


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ([made_up_node("a")], "no room: a worker that the placement names is not there"),
        (
            [made_up_node("a", memory=64 * GIB), made_up_node("b", alive=False)],
            "no room: a worker that the placement names is not ready",
        ),
        (
            [made_up_node("a"), made_up_node("b", total={"CPU": 1.0}, free={"CPU": 1.0})],
            "no room: it needs 2 CPU, 1 CPU is free, the rest is taken for good",
        ),
    ],
)
async def test_a_model_whose_placements_worker_takes_none_waits_and_says_why(
    bench: WorkerBench, nodes: list[Any], why: str
) -> None:
    bench.see(*nodes)
    bench.models.place({"a": [unit_on("worker-b")]})
    bench.add()
    assert bench.model.life.why == why


def test_a_placements_workers_are_shown_with_their_states() -> None:
    pool = WorkerPool("10.0.0.1:6379")
    pool.take_wishes([WorkerWish(name="worker-a", cordoned=True)])
    pool.take_report(cluster_of(made_up_node("a"), made_up_node("b", alive=False)))
    assert pool.unready("worker-a") == "", "what a placement names may be cordoned"
    assert pool.unready("worker-b") == "it is lost"
    assert pool.unready("worker-c") == "it is not there"


async def test_a_model_is_evaluated_for_one_worker_alone(bench: WorkerBench) -> None:
    bench.see(made_up_node("a"), made_up_node("b"))
    spec = ModelSpec(name="new", source="path:/models/new", engine="toy")
    anywhere, on_one = (bench.models.places.evaluate(spec, worker) for worker in ("", "worker-a"))
    assert 0 < on_one.host.total_bytes < anywhere.host.total_bytes
    bench.add(memory=GIB)
    taken = bench.start.words
    (name,) = (f"worker-{one[-1]}" for one in taken if "instance-node" in one)
    (other,) = {"worker-a", "worker-b"} - {name}
    left = {one: bench.models.places.evaluate(spec, one).host.free_bytes for one in (name, other)}
    assert left[name] == left[other] - GIB
    with pytest.raises(ConfigError, match="must be one of the workers: worker-a, worker-b"):
        bench.models.places.evaluate(spec, "c")
