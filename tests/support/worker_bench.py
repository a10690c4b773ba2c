"""A controller whose models are on made-up workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvmig.core.api_records import InstanceRow
from kvmig.fleet.controller import ModelController
from kvmig.fleet.deployments import DeploymentEvent
from kvmig.fleet.device_budget import DeviceBudget
from kvmig.fleet.host_memory import MemoryBudget
from kvmig.fleet.managed_model import CatalogEntry, ManagedModel
from kvmig.fleet.node_reserve import ReserveLadder
from kvmig.fleet.orders import Order, StartDeployment
from kvmig.fleet.settings import FleetSettings
from kvmig.fleet.spec import ModelSpec
from kvmig.fleet.worker_pool import WorkerPool
from kvmig.fleet.workers import WorkerWish
from kvmig.launcher.node_reports import NodeReport
from kvmig.proxy.messages import ModelDemand, ProxyDemand
from tests.support.made_up_nodes import cluster_of, node_id
from tests.support.model_bench import ControllerBench

A, B = node_id("a"), node_id("b")


class WorkerBench(ControllerBench):
    """A controller whose workers and deployments are made up; time is the test's."""

    def __init__(self, folder: Path, reserve: ReserveLadder | None = None) -> None:
        self.now = 1000.0
        self.ordered: list[Order] = []
        self.asked: list[tuple[Any, ...]] = []
        self.pool = WorkerPool("10.0.0.1:6379", 2, lambda: self.now, lambda: self.now, reserve)
        self.watch = self.pool.device_watch()
        devices = DeviceBudget(self.watch, "spread", self.pool.uses_gpus)
        memory = MemoryBudget(devices=devices, workers=self.pool.memory)
        self.models = ModelController(
            FleetSettings(data=str(folder), ray="10.0.0.1:6379"),
            self.ordered.append,
            lambda routes, gone: 0,
            memory,
            lambda: self.now,
            lambda: self.now,
            workers=self.pool,
        )
        self.adopt()

    def see(self, *nodes: NodeReport) -> None:
        self.pool.take_report(cluster_of(*nodes))
        assert self.watch is not None
        self.watch.read_sample()

    def turn(self, seconds: float = 0.0) -> None:
        self.now += seconds
        demand = ModelDemand("a", 1, 0, 0, 0.5)
        self.models.take_demand("p0", ProxyDemand(0, 0.5, (demand,)))
        self.models.reconcile()

    def add(self, **more: Any) -> None:
        usual: dict[str, Any] = {"source": "path:/models/a", "engine": "toy"}
        spec = ModelSpec(name="a", **{**usual, **more})
        self.models.take_catalogue([CatalogEntry("m1", "a", 1, True, spec)])
        self.want("a")

    @property
    def model(self) -> ManagedModel:
        return self.named()

    @property
    def start(self) -> StartDeployment:
        (found,) = self.started
        return found

    def serve(self, monkeypatch: pytest.MonkeyPatch, *rows: InstanceRow) -> None:
        """Its deployment tells that, and is asked from now on as `asked` has it."""
        watched = self.watched_of()
        watched.told = DeploymentEvent(1, data=rows)

        async def add(count: int, gpus: Any = (), node: str = "") -> set[str]:
            self.asked.append(("add", node))
            return {"i9"}

        async def drain(instance: str, deadline_s: float | None = None) -> None:
            self.asked.append(("drain", instance, deadline_s))

        async def stop_drain(instance: str) -> None:
            self.asked.append(("keep", instance))

        monkeypatch.setattr(watched, "add", add)
        monkeypatch.setattr(watched, "drain", drain)
        monkeypatch.setattr(watched, "stop_drain", stop_drain)

    async def orders(self) -> list[tuple[Any, ...]]:
        """What its deployment was asked since the last call."""
        self.turn(1)
        if self.model.ordering is not None:
            await self.model.ordering
        found, self.asked = self.asked, []
        return found


def row(name: str, node: str, state: str = "serving") -> InstanceRow:
    return InstanceRow(id=name, state=state, node=node, blocks_total=1000)


def drain(name: str = "worker-a", until: float | None = None) -> WorkerWish:
    return WorkerWish(name=name, cordoned=True, drained_at=1000.0, drain_until=until)
