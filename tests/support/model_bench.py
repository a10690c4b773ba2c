"""A fleet's models with everything around them made up; time is the test's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvmig.core.api_records import InstanceRow
from kvmig.fleet.controller import ModelController
from kvmig.fleet.deployments import DeploymentEvent, DeploymentWatcher
from kvmig.fleet.host_memory import MemoryBudget
from kvmig.fleet.managed_model import CatalogEntry, DeploymentRecord, ManagedModel, MissingFiles
from kvmig.fleet.orders import (
    DeployedProgram,
    DeployedPrograms,
    DeploymentEnded,
    Order,
    StartDeployment,
    StopDeployment,
)
from kvmig.fleet.rollout import RolloutPlan
from kvmig.fleet.settings import FleetSettings
from kvmig.fleet.spec import ModelSpec
from kvmig.proxy.messages import ModelDemand, ModelRoute, ModelWanted, ProxyDemand


def served(name: str) -> InstanceRow:
    return InstanceRow(id=name, state="serving", blocks_total=1000)


def silence(patch: pytest.MonkeyPatch) -> None:
    """Whatever a deployment tells, the test says."""

    async def nothing(_: DeploymentWatcher) -> None: ...

    patch.setattr(DeploymentWatcher, "_follow", nothing)


def shown(models: ModelController, name: str) -> ManagedModel:
    """The model or deployment that people know by this name, which is there."""
    found = models.shown(name)
    assert found is not None
    return found


def watched_of(models: ModelController, name: str) -> DeploymentWatcher:
    """The watcher of its deployment, which runs."""
    watched = shown(models, name).watched
    assert watched is not None
    return watched


class ControllerBench(ABC):
    """What benches that have a controller of models ask of it, and tell it."""

    models: ModelController
    ordered: list[Order]

    @abstractmethod
    def turn(self, seconds: float = 0.0) -> None:
        """The next round comes after so many seconds."""

    def want(self, *names: str) -> None:
        """Requests wait for these models when the next round comes."""
        for name in names:
            self.models.take_want(ModelWanted(name))
        self.turn()

    def adopt(self, *running: DeployedProgram) -> None:
        """The init process says that these programs run, and no others."""
        self.models.take_news(DeployedPrograms(running))

    def report_end(self, deployment: str, how: str = "exit code 0", said: str = "") -> None:
        """The init process says that a deployment has ended."""
        self.models.take_news(DeploymentEnded(deployment, how, said))

    def named(self, name: str = "a") -> ManagedModel:
        """The model or deployment that people know by this name."""
        return shown(self.models, name)

    def watched_of(self, name: str = "a") -> DeploymentWatcher:
        """The watcher of its deployment."""
        return watched_of(self.models, name)

    @property
    def started(self) -> list[StartDeployment]:
        return [one for one in self.ordered if isinstance(one, StartDeployment)]

    @property
    def stopped(self) -> list[StopDeployment]:
        return [one for one in self.ordered if isinstance(one, StopDeployment)]

    @property
    def notes(self) -> list[DeploymentRecord]:
        """What the init process keeps of each start for the next server."""
        return [msgspec.json.decode(one.note, type=DeploymentRecord) for one in self.started]

    @property
    def running(self) -> tuple[DeployedProgram, ...]:
        """What was started, as the init process tells the next server."""
        return tuple(map(running, self.started))


class Bench(ControllerBench):
    """Models with everything around them made up; time is the test's."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        self.ahead = 0.0
        """Seconds by which Unix time is ahead of the steady clock's."""
        self.model_id = "m1"
        self.ordered: list[Order] = []
        self.told: list[tuple[Sequence[ModelRoute], Sequence[str]]] = []
        self.folder = folder
        self.learned: list[ModelSpec] = []
        self.missing: dict[str, MissingFiles] = {}
        """By source."""
        self.orders_fail = False
        """Whether no order reaches init, for a reason that nobody foresaw."""
        self.links_fail = False
        """Whether proxies can't be told of routes, for a reason that nobody foresaw."""
        self.broken: set[str] = set()
        """Sources whose files can't be looked at for a reason that nobody foresaw."""
        self.kept: list[tuple[str, RolloutPlan, bool]] = []
        """Steps of roll-outs that were stored: of which model, and whether they were the last."""
        self.models = ModelController(
            FleetSettings(data=str(folder)),
            self._take_order,
            self._tell,
            MemoryBudget(),
            lambda: self.now,
            lambda: self.wall,
            self.learned.append,
            missing=self._look_at,
            keep=self.keep,
        )

    def _take_order(self, order: Order) -> None:
        if self.orders_fail:
            raise ZeroDivisionError
        self.ordered.append(order)

    def _look_at(self, source: str) -> MissingFiles | None:
        if source in self.broken:
            raise ZeroDivisionError(source)
        return self.missing.get(source)

    def keep(self, model_id: str, plan: RolloutPlan, done: bool) -> None:
        """A step of a roll-out is stored."""
        self.kept.append((model_id, plan, done))

    @property
    def wall(self) -> float:
        """Unix time."""
        return self.now + self.ahead

    @property
    def every(self) -> list[ManagedModel]:
        """The models, with deployments that stand beside others."""
        return list(self.models._models.values())

    def _tell(self, routes: Sequence[ModelRoute], gone: Sequence[str]) -> int:
        if self.links_fail:
            raise ZeroDivisionError
        self.told.append((routes, gone))
        return len(self.told)

    def catalogue(self, *specs: ModelSpec, on: bool = True) -> None:
        self.models.take_catalogue(
            CatalogEntry(self.model_id, one.name, 1, on, one) for one in specs
        )
        self.turn()

    def turn(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.models.reconcile()
        if not (self.broken or self.orders_fail or self.links_fail):
            assert not self.models.faults.count

    def demand(self, version: int | None = None, running: int = 0, held: int = 0) -> None:
        """Of the only proxy, of the last half second."""
        total, model = running + held, self.models.shown("a")
        socket = "" if model is None else model.socket
        of_model = ModelDemand("a", running, held, 0, total * 0.5, socket)
        seen = len(self.told) if version is None else version
        self.models.take_demand("p0", ProxyDemand(seen, 0.5, (of_model,)))

    def serve(self, instances: int = 1, live: int = 0) -> None:
        """Its deployment tells that so many instances serve."""
        rows = tuple(served(f"i{one}") for one in range(instances))
        self.watched.told = DeploymentEvent(live, data=rows)

    @property
    def watched(self) -> DeploymentWatcher:
        """Its deployment."""
        return self.watched_of()

    def states_after(self, *seconds: float) -> list[str]:
        """Of its route, after each time that passes."""
        states: list[str] = []
        for each in seconds:
            self.turn(each)
            states.append(self.route.state)
        return states

    @property
    def note(self) -> DeploymentRecord:
        """Of a deployment that an earlier server has started."""
        return DeploymentRecord("m1", "a", 1, str(self.folder / "d.sock"))

    def take_over(self, *deployments: str) -> None:
        """Deployments that an earlier server has started run."""
        self.adopt(*(deployed(one, self.note) for one in deployments))

    async def ordered_all(self) -> None:
        """Until its deployment was asked for what was decided."""
        ordering = self.named().ordering
        assert ordering is not None
        await ordering

    @property
    def sources(self) -> list[str]:
        """Of what was started, in this order."""
        return [one.words[0] for one in self.started]

    @property
    def route(self) -> ModelRoute:
        """As told last."""
        return next(one for routes, _ in reversed(self.told) for one in routes)


def spec(source: str = "path:/models/a", **more: Any) -> ModelSpec:
    return ModelSpec(name="a", source=source, engine="toy", **more)


def running(start: StartDeployment) -> DeployedProgram:
    """What was started, as the init process tells the next server."""
    return DeployedProgram(start.deployment, start.engine, start.note, 7, start.program)


def deployed(name: str, note: DeploymentRecord) -> DeployedProgram:
    return DeployedProgram(name, "toy", msgspec.json.encode(note).decode(), 7)
