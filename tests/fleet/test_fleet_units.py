"""Units of a fleet: models that share KV cache on one GPU, and the agent that the server has
started, as a real process where it says so."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvmig.core.api_records import InstanceRow
from kvmig.core.devices import DeviceInventory, DeviceProcess, DeviceRecord
from kvmig.core.errors import ConfigError
from kvmig.fleet.capacity import HostCapacity
from kvmig.fleet.controller import ModelController
from kvmig.fleet.deployments import DeploymentEvent
from kvmig.fleet.device_budget import DeviceBudget
from kvmig.fleet.device_claims import REST
from kvmig.fleet.device_watch import DeviceSample, DeviceWatch
from kvmig.fleet.host_memory import MemoryBudget
from kvmig.fleet.managed_model import CatalogEntry
from kvmig.fleet.orders import (
    DeployedProgram,
    DeploymentEnded,
    DeploymentStarted,
    Order,
    StartDeployment,
    StopDeployment,
)
from kvmig.fleet.settings import FleetSettings, make_folders
from kvmig.fleet.spec import ModelSpec
from kvmig.fleet.units import AgentWatcher, ManagedUnit
from kvmig.sharing.messages import MemberShare, UnitState
from tests.support.inside import OwnSupervisor
from tests.support.model_bench import ControllerBench, running
from tests.support.waiting import until

GIB = 1 << 30
ARENA, OWN = 8 * GIB, 3 * GIB


class Host(MemoryBudget):
    """With two GPUs, and as much memory as anybody wants."""

    def __init__(self, total: int) -> None:
        devices = tuple(
            DeviceRecord(
                id=str(at),
                index=at,
                uuid=f"GPU-{at}",
                name="H100",
                total=total,
                peers=(f"GPU-{1 - at}",),
            )
            for at in range(2)
        )
        watch = DeviceWatch(read=lambda: DeviceInventory(devices=devices))
        watch.read_sample()
        super().__init__(devices=DeviceBudget(watch))

    def host(self) -> HostCapacity:
        return HostCapacity(1 << 50, 1 << 50)


class Fleet(ControllerBench):
    """A server without its processes, of which a test may start some; time is the test's."""

    def __init__(self, folder: Path, total: int = 20 * GIB) -> None:
        self.now = 1000.0
        self.settings = FleetSettings(data=str(folder))
        make_folders(self.settings)
        self.memory = Host(total)
        self.ordered: list[Order] = []
        self.specs: dict[str, ModelSpec] = {}
        self.models = self.server()
        self.adopt()

    def server(self) -> ModelController:
        """Another one, which knows nothing."""
        return ModelController(
            self.settings, self.ordered.append, lambda *_: 0, self.memory, self.clock, self.clock
        )

    def clock(self) -> float:
        return self.now

    def add(self, name: str, **more: Any) -> None:
        more = {"unit": "u", "unit_memory": ARENA, "gpu_memory": OWN, **more}
        self.specs[name] = ModelSpec(name=name, source="path:/models/a", **more)
        self.catalogue()

    async def begin_again(self, *running: DeployedProgram) -> None:
        """Another server takes over what runs."""
        await self.models.close()
        self.models = self.server()
        self.catalogue()
        self.adopt(*running)

    def catalogue(self) -> None:
        self.models.take_catalogue(
            CatalogEntry(f"m-{name}", name, 1, True, one) for name, one in self.specs.items()
        )

    def turn(self, seconds: float = 0.1) -> None:
        self.now += seconds
        self.models.reconcile()

    def taken(self, kind: type[Order]) -> list[Any]:
        """The orders of that kind since the last look."""
        found = [one for one in self.ordered if isinstance(one, kind)]
        self.ordered[:] = [one for one in self.ordered if not isinstance(one, kind)]
        return found

    def start_of(self, program: str) -> StartDeployment:
        """The only order to start something."""
        start: StartDeployment
        (start,) = self.taken(StartDeployment)
        assert start.program == program
        return start

    @property
    def unit(self) -> ManagedUnit:
        (unit,) = self.models.units.every()
        return unit

    def answers(self) -> None:
        """Its agent does, from now on."""
        assert self.unit.watched is not None
        self.unit.watched.state = UnitState(ARENA, "kvmig", [])

    def held(self) -> dict[str, dict[str, int]]:
        """Bytes by GPU, and who claims them."""
        return {one.id: dict(one.claims) for one in self.models.places.devices()}


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    made = Fleet(tmp_path / "data")
    yield made
    await made.models.close()


def two_that_run(fleet: Fleet) -> tuple[StartDeployment, StartDeployment, StartDeployment]:
    """Agent and models."""
    fleet.add("a")
    fleet.add("b")
    fleet.want("a")
    agent = fleet.start_of("unit")
    fleet.answers()
    fleet.want("a")
    first = fleet.start_of("serve")
    fleet.want("b")
    return agent, first, fleet.start_of("serve")


async def test_the_agent_starts_first_and_each_model_joins_it_on_the_units_gpu(
    fleet: Fleet,
) -> None:
    fleet.add("a")
    fleet.add("b", gpus=("1",))
    fleet.want("a", "b")
    agent = fleet.start_of("unit")
    path = str(fleet.settings.unit("u"))
    assert agent.words == (path, f"--memory={ARENA}B", "--end-with-stdin")
    for name in "ab":
        life = fleet.named(name).life
        assert (life.state, life.why) == ("waiting", "the agent of unit u starts")
    fleet.answers()
    fleet.want("a", "b")
    starts = fleet.taken(StartDeployment)
    assert len(starts) == 2
    for one in starts:
        assert f"--unit={path}" in one.words
        assert "--instance-gpus=i0: 1" in one.words, "the only GPU that both may have"
        assert not [word for word in one.words if word.startswith("--gpu-memory-utilization")]


async def test_what_models_share_is_claimed_once_and_until_the_last_has_ended(fleet: Fleet) -> None:
    agent, first, second = two_that_run(fleet)
    assert fleet.held() == {"GPU-0": {"unit u": ARENA, "a": OWN, "b": OWN}, "GPU-1": {}}
    fleet.report_end(first.deployment)
    fleet.turn(10)
    assert fleet.held()["GPU-0"] == {"unit u": ARENA, "b": OWN}
    assert not fleet.taken(StopDeployment)
    fleet.report_end(second.deployment)
    fleet.turn()
    assert fleet.taken(StopDeployment) == [StopDeployment(agent.deployment)]
    fleet.turn()
    assert not fleet.taken(StopDeployment), "once is enough"
    fleet.report_end(agent.deployment)
    fleet.turn()
    assert fleet.held() == {"GPU-0": {}, "GPU-1": {}}
    assert not fleet.ordered or not fleet.taken(StartDeployment)


async def test_an_agent_that_dies_is_started_again_where_its_models_look_for_it(
    fleet: Fleet,
) -> None:
    agent, _, _ = two_that_run(fleet)
    fleet.report_end(agent.deployment, "signal 9")
    fleet.turn()
    assert not fleet.taken(StartDeployment), "not at once, if it keeps dying"
    fleet.turn(1)
    again = fleet.start_of("unit")
    assert again.words == agent.words
    assert again.deployment != agent.deployment
    assert not fleet.taken(StopDeployment), "the models serve on"


@pytest.mark.parametrize("left", ["all", "the agent", "the models"])
async def test_the_next_server_takes_over_whatever_of_a_unit_is_left(
    fleet: Fleet, left: str
) -> None:
    started = two_that_run(fleet)
    agent, *models = started
    runs = {"all": started, "the agent": (agent,), "the models": models}[left]
    await fleet.begin_again(*map(running, runs))
    before = fleet.held()["GPU-0"]
    assert before["unit u"] == ARENA
    fleet.turn()
    match left:
        case "all":
            assert not fleet.taken(StartDeployment)
            assert not fleet.taken(StopDeployment)
            assert fleet.held()["GPU-0"] == {"unit u": ARENA, "a": OWN, "b": OWN}
        case "the agent":
            assert fleet.taken(StopDeployment) == [StopDeployment(agent.deployment)], (
                "nobody wants it"
            )
        case "the models":
            again = fleet.start_of("unit")
            assert again.words == agent.words


async def test_a_look_at_an_agent_that_fails_is_followed_by_the_next_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[UnitState | Exception] = [
        ZeroDivisionError(),
        UnitState(arena=ARENA, rule="kvmig", shares=[]),
    ]

    async def fetch(path: str) -> UnitState:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr("kvmig.fleet.units.fetch_unit", fetch)
    monkeypatch.setattr("kvmig.fleet.units.UNFORESEEN_S", 0.01)
    watched = AgentWatcher("/u.sock", lambda: None)
    await until(lambda: watched.state is not None)
    await watched.close()
    assert "the unit at /u.sock can't be looked at" in caplog.text


async def test_of_two_agents_of_a_unit_one_ends(fleet: Fleet) -> None:
    agent, _, _ = two_that_run(fleet)
    twice = DeployedProgram("another", "", agent.note, 1, "unit")
    fleet.models.units.adopt(twice)
    assert fleet.taken(StopDeployment) == [StopDeployment("another")]


async def test_a_unit_whose_agent_cannot_be_started_keeps_no_other_one_back(fleet: Fleet) -> None:
    broken = ['"u"']

    def order(one: Order) -> None:
        if isinstance(one, StartDeployment) and any(name in one.note for name in broken):
            raise ZeroDivisionError
        fleet.ordered.append(one)

    fleet.models = ModelController(
        fleet.settings, order, lambda *_: 0, fleet.memory, fleet.clock, fleet.clock
    )
    fleet.adopt()
    fleet.add("a")
    fleet.add("b", unit="v")
    fleet.want("a", "b")
    assert '"v"' in fleet.start_of("unit").note
    assert fleet.models.faults.count["units"] == 1
    broken.clear()
    fleet.turn()
    assert '"u"' in fleet.start_of("unit").note


async def test_an_idle_model_elsewhere_ends_for_a_unit_and_one_that_never_fits_is_refused(
    fleet: Fleet,
) -> None:
    fleet.add("a")
    large = ModelSpec(name="b", source="path:/b", unit="u", unit_memory=ARENA, gpu_memory=10 * GIB)
    with pytest.raises(ConfigError, match=r"unit u \(8.00 GiB of KV cache, .*, 10.00 GiB of b\)"):
        fleet.models.units.check("u", [fleet.specs["a"], large])
    for name in ("left", "right"):
        fleet.add(name, unit="", unit_memory=0, gpu_memory=15 * GIB)
        fleet.want(name)
        fleet.models.take_news(DeploymentStarted(fleet.start_of("serve").deployment, 1))
    fleet.want("a")
    assert not fleet.taken(StartDeployment)
    why = "no room: it needs 11.0 GiB of a GPU's memory, 5.0 GiB is"
    assert fleet.named("a").life.why.startswith(why)


async def test_what_a_model_takes_besides_its_lease_is_measured_where_nothing_changes_meanwhile(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver and the agent are asked at different times, so one of them alone may be late."""
    monkeypatch.setattr("kvmig.fleet.deployments.RETRY_S", 60.0)
    monkeypatch.setattr("kvmig.fleet.device_budget.weight_files", lambda spec, facts: 2 * GIB)
    fleet.add("a", gpu_memory=0)
    fleet.want("a")
    fleet.answers()
    fleet.want("a")
    watched = fleet.watched_of("a")
    await watched.looked.wait()  # there is no deployment that would say anything
    row = InstanceRow(id="i0", state="serving", pid=os.getpid(), gpus=("0",))
    watched.told = DeploymentEvent(0, data=(row,))
    devices = fleet.memory.devices
    found = []
    for used, lease in [(7, 1), (7, 4), (8, 4), (7, 4), (7, 4), (7, 4), (6, 4), (6, 4)]:
        with_process = DeviceInventory(
            devices=tuple(
                replace(one, used=used * GIB, processes=(DeviceProcess(os.getpid(), used * GIB),))
                for one in devices.watch.inventory.devices
            )
        )
        devices.watch.sample = DeviceSample(with_process, {})
        share = MemberShare("i0", "a", 1, 0, 0, lease * GIB, 0, 0, 0, True)
        assert fleet.unit.watched is not None
        fleet.unit.watched.state = UnitState(ARENA, "kvmig", [share])
        fleet.turn()
        found.append(devices.known(fleet.specs["a"]).rest)
    assert found == [REST] * 4 + [GIB] * 4, "7 less 4 less the weights; the most counts"
    assert devices.known(fleet.specs["a"]).rest_basis.endswith("with a")
    assert devices.measured(fleet.specs["a"]) == 0, "which would count what it leased"


# -- a real agent


async def test_the_agent_is_a_process_that_answers_and_another_one_after_kill_9(
    fleet: Fleet,
) -> None:
    with socket.socket() as sock:
        init = OwnSupervisor(fleet.settings, sock)
        news = init.news

        async def next_news(kind: type[Any]) -> Any:
            await until(lambda: [one for one in news if isinstance(one, kind)])
            (found,) = [one for one in news if isinstance(one, kind)]
            news.clear()
            return found

        fleet.add("a")
        fleet.want("a")
        init.carry_out(fleet.start_of("unit"))
        first = await next_news(DeploymentStarted)
        await until(lambda: fleet.unit.state is not None)
        fleet.want("a")
        member = fleet.start_of("serve")
        (shown,) = init.deployed().deployments
        assert shown.program == "unit"
        os.kill(first.pid, signal.SIGKILL)
        fleet.models.take_news(await next_news(DeploymentEnded))
        fleet.turn(1)
        init.carry_out(fleet.start_of("unit"))
        second = await next_news(DeploymentStarted)
        assert second.pid != first.pid
        await until(lambda: fleet.unit.state is not None)
        fleet.report_end(member.deployment)
        fleet.turn(10)
        (stop,) = fleet.taken(StopDeployment)
        init.carry_out(stop)
        fleet.models.take_news(await next_news(DeploymentEnded))
        fleet.turn()
        assert not fleet.models.units.every()
        assert not fleet.settings.unit("u").exists()
        async with asyncio.timeout(20):
            await init.end()
