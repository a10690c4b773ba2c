"""Units on workers: where they go, when their models start, and what becomes of a lost worker's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvmig.core.errors import ConfigError
from kvmig.fleet.deployments import DeploymentEvent
from kvmig.fleet.host_memory import MemoryBudget
from kvmig.fleet.managed_model import CatalogEntry
from kvmig.fleet.settings import FleetSettings
from kvmig.fleet.spec import ModelSpec
from kvmig.fleet.unit_plan import check_selectors
from kvmig.fleet.workers import LEASE_S
from kvmig.launcher.node_files import WantedUnit
from kvmig.launcher.node_reports import NodeMeasure, NodeReport, UnitReport
from kvmig.proxy.messages import ModelWanted
from tests.support.made_up_nodes import GIB, made_up_node
from tests.support.model_bench import silence
from tests.support.worker_bench import A, B, WorkerBench, drain, row

ARENA = 2 * GIB
NOTHING: Mapping[str, Any] = {}


class UnitBench(WorkerBench):
    """Of models a and b, which are in unit u."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.path = str(FleetSettings(data=str(folder)).unit("u"))

    def add_both(self, of_a: Mapping[str, Any] = NOTHING, **of_b: Any) -> None:
        usual: dict[str, Any] = {
            "engine": "toy", "unit": "u", "unit_memory": ARENA, "memory": GIB,
        }  # fmt: skip
        specs = [
            ModelSpec(name=name, source=f"path:/models/{name}", **{**usual, **more})
            for name, more in (("a", of_a), ("b", of_b))
        ]
        every = [CatalogEntry(f"m-{one.name}", one.name, 1, True, one) for one in specs]
        self.models.take_catalogue(every)
        self.ask()

    def ask(self) -> None:
        """A request waits for each of them."""
        for name in "ab":
            self.models.take_want(ModelWanted(name))
        self.models.reconcile()

    def node(self, letter: str, *, answers: bool = False, why: str = "", **more: Any) -> NodeReport:
        """A node. answers: whether its unit's agent does; why: that one has failed."""
        leased = {"a": GIB // 2} if answers else {}
        units = (UnitReport(path=self.path, leased=leased, why=why),) if answers or why else ()
        size = more.pop("memory", 8 * GIB)
        measured = NodeMeasure(memory_total=size, memory_free=size, units=units)
        return made_up_node(letter, **{"measured": measured, **more})

    def wish(self) -> dict[str, tuple[WantedUnit, ...]]:
        """The units that nodes are to have."""
        return dict(self.pool.wish().units)

    def tell(self, name: str, *rows: Any) -> None:
        self.watched_of(name).told = DeploymentEvent(1, data=rows)

    def next_server(self, folder: Path) -> UnitBench:
        """Another one, which is told what runs."""
        then = UnitBench(folder)
        then.models.take_catalogue([self.named(name).wanted for name in "ab"])
        then.adopt(*self.running)
        return then


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[UnitBench]:
    silence(monkeypatch)  # what a deployment tells, the test says
    made = UnitBench(tmp_path)
    yield made
    await made.models.close()


async def both_serve(bench: UnitBench) -> None:
    """Models a and b, on worker a."""
    bench.see(bench.node("a"), bench.node("b", memory=GIB))
    bench.add_both()
    bench.see(bench.node("a", answers=True), bench.node("b", memory=GIB))
    bench.ask()
    bench.ask()
    for name in "ab":
        bench.tell(name, row("i0", A))
    bench.ask()


async def test_a_unit_goes_where_all_of_it_has_room_and_its_models_wait_for_its_agent(
    bench: UnitBench,
) -> None:
    bench.see(bench.node("a", memory=4 * GIB - 1), bench.node("b", memory=4 * GIB))
    bench.add_both()
    assert bench.wish() == {B: (WantedUnit(path=bench.path, memory=ARENA),)}
    assert bench.started == []
    bench.ask()
    whys = {bench.named(name).life.why for name in "ab"}
    assert whys == {"the agent of unit u starts on its worker"}

    bench.see(bench.node("a"), bench.node("b", answers=True, memory=4 * GIB))
    bench.ask()
    bench.ask()
    for start in bench.started:
        assert f"--unit={bench.path}" in start.words
        assert f"--instance-node=i0: {B}" in start.words
    assert len(bench.started) == 2


async def test_a_unit_that_no_worker_holds_as_a_whole_waits_and_says_what_it_needs(
    bench: UnitBench,
) -> None:
    bench.see(bench.node("a", memory=4 * GIB - 1))
    bench.add_both()
    assert bench.wish() == {}
    assert bench.named("a").life.why.startswith("no room: it needs 4.0")
    assert bench.named("b").life.why == "unit u has no worker yet"


async def test_what_members_may_lease_yet_is_nobody_elses(bench: UnitBench) -> None:
    await both_serve(bench)
    (there, _) = bench.models.places.nodes()
    assert there.available == 8 * GIB - (ARENA - GIB // 2)
    assert [one.model for one in there.instances] == ["a", "b"]


async def test_an_agent_that_fails_is_named_to_who_waits(bench: UnitBench) -> None:
    bench.see(bench.node("a"))
    bench.add_both()
    bench.see(bench.node("a", why="its agent has ended: exit code 2"))
    bench.ask()
    bench.ask()
    assert bench.named("a").life.why == (
        "the agent of unit u starts on its worker: its agent has ended: exit code 2"
    )
    assert bench.started == []


async def test_a_lost_workers_unit_starts_elsewhere_after_a_lease_and_its_agent_first(
    bench: UnitBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await both_serve(bench)
    bench.serve(monkeypatch, row("i0", A, "starting"))
    bench.see(bench.node("a", alive=False), bench.node("b"))
    bench.turn(1)
    assert bench.models.units.every()[0].worker == "worker-a"
    bench.now += LEASE_S
    assert await bench.orders() == []
    assert await bench.orders() == [], "its agent does not answer yet"
    assert bench.wish()[B] == (WantedUnit(path=bench.path, memory=ARENA),)
    bench.see(bench.node("a", alive=False), bench.node("b", answers=True))
    bench.turn()
    assert await bench.orders() == [("add", B)]


async def test_a_lost_workers_unit_that_has_no_room_elsewhere_says_why(
    bench: UnitBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await both_serve(bench)
    bench.serve(monkeypatch, row("i0", A, "starting"))
    bench.see(bench.node("a", alive=False), bench.node("b", memory=3 * GIB))
    bench.turn(LEASE_S)
    bench.turn(LEASE_S)
    assert await bench.orders() == []
    found = bench.models.why_not(bench.model)
    why = {one.node: one.refusals[0].why for one in found.nodes}
    assert why["worker-b"] == f"memory: needs {4 * GIB} bytes, {3 * GIB} of {3 * GIB} are free"


async def test_a_drained_workers_unit_is_on_both_workers_until_its_instances_have_left(
    bench: UnitBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await both_serve(bench)
    bench.serve(monkeypatch, row("i0", A))
    bench.pool.take_wishes([drain()])
    bench.see(bench.node("a", answers=True), bench.node("b"))
    bench.turn(1)
    bench.turn(1)
    assert bench.wish().keys() == {A, B}
    bench.see(bench.node("a", answers=True), bench.node("b", answers=True))
    bench.turn()
    assert await bench.orders() == [("add", B)]
    bench.serve(monkeypatch, row("i0", A), row("i9", B))
    assert await bench.orders() == [("drain", "i0", None)]
    for name in "ab":
        bench.tell(name, row("i9", B))
    bench.turn(1)
    assert bench.wish().keys() == {B}


async def test_a_unit_whose_models_have_ended_has_no_agent(bench: UnitBench) -> None:
    bench.see(bench.node("a"))
    bench.add_both()
    assert bench.wish().keys() == {A}
    off = [msgspec.structs.replace(bench.named(name).wanted, on=False) for name in "ab"]
    bench.models.take_catalogue(off)
    bench.models.reconcile()
    bench.models.reconcile()
    assert bench.wish() == {}


async def test_the_next_server_knows_where_a_unit_is(bench: UnitBench, tmp_path: Path) -> None:
    await both_serve(bench)
    assert bench.notes[0].nodes == {"i0": A}
    then = bench.next_server(tmp_path)
    then.models.reconcile()
    then.see(bench.node("a", answers=True), bench.node("b"))
    then.models.reconcile()
    assert then.wish().keys() == {A}
    assert then.models.units.every()[0].worker == "worker-a"
    await then.models.close()


def test_models_of_a_unit_that_no_worker_may_have_together_are_refused() -> None:
    east, west = (
        ModelSpec(
            name=name, source="path:/a", engine="toy", unit="u", unit_memory=ARENA,
            worker_selector={"zone": zone},
        )
        for name, zone in (("a", "east"), ("b", "west"))
    )  # fmt: skip
    with pytest.raises(ConfigError, match="worker_selector of b has zone=west, must be zone=east"):
        check_selectors("u", [east, west])


async def test_a_worker_without_gpus_may_have_units_and_this_host_may_not(
    bench: UnitBench,
) -> None:
    spec = ModelSpec(
        name="a", source="path:/a", engine="toy", unit="u", unit_memory=ARENA, memory=GIB
    )
    bench.see(bench.node("a"))
    bench.models.memory.check(spec)
    bench.models.units.check("u", [spec])
    with pytest.raises(ConfigError, match="unit is 'u', must be left out: there is no GPU"):
        MemoryBudget().check(spec)
