"""A model that is changed, in any order of events: no stream is cut, and all comes to an end.

One proxy learns of routes late; requests come and end; deployments get ready, end and crash; people
change the model, pause, resume and go back; the server is killed and another one takes over.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvmig.fleet.deployments import DeploymentEvent
from kvmig.fleet.managed_model import CatalogEntry, DeploymentRecord
from kvmig.fleet.orders import StartDeployment, StopDeployment
from kvmig.fleet.rollout import RolloutPlan, RolloutTerms, begun, need_of, paused, promoted, resumed
from kvmig.fleet.rollout_table import StoredRollout
from kvmig.proxy.activator import socket_of
from kvmig.proxy.messages import ModelDemand, ModelRoute, ModelWanted, ProxyDemand
from tests.support.examples import examples
from tests.support.model_bench import Bench, running, served, silence, spec

SOURCES = ["path:/one", "path:/two", "path:/three"]


@dataclass(eq=False)
class Deployment:
    """A process, as init and the proxy see it."""

    start: StartDeployment
    socket: str
    source: str
    ready: bool = False
    stopping: bool = False
    streams: int = 0


@dataclass
class Stored:
    """What the database has."""

    specs: list[str] = field(default_factory=lambda: [SOURCES[0]])
    """Sources by revisions."""
    plan: RolloutPlan | None = None


class StoringBench(Bench):
    """Whose steps are stored."""

    def __init__(self, folder: Path, stored: Stored) -> None:
        self.stored = stored
        super().__init__(folder)

    def keep(self, model_id: str, plan: RolloutPlan, done: bool) -> None:
        if self.stored.plan is not None and self.stored.plan.target == plan.target:
            self.stored.plan = None if done else plan


class RollingModel(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.patch = pytest.MonkeyPatch()
        silence(self.patch)
        self.folder = tempfile.TemporaryDirectory()
        self.stored = Stored()
        self.deployments: list[Deployment] = []
        self.route: ModelRoute | None = None
        self.heard = self.obeyed = 0
        self.held = 0
        self.over: set[str] = set()
        """Sockets of deployments that were told to end, and did."""
        self.do(self.begin)
        self.turn(0)
        self.a_request_comes(0)
        self.all_get_ready()
        self.the_proxy_hears_all()

    def begin(self) -> None:
        """A server that has just started."""
        self.bench = StoringBench(Path(self.folder.name), self.stored)
        self.heard = self.obeyed = 0
        self.load()
        self.bench.adopt(*(running(one.start) for one in self.deployments))

    def load(self) -> None:
        """The server reads the catalogue."""
        newest, plan = len(self.stored.specs), self.stored.plan
        stored = None
        if plan is not None:
            stored = StoredRollout(plan, spec(self.stored.specs[plan.base - 1]))
        wanted = spec(self.stored.specs[-1])
        self.bench.models.take_catalogue([CatalogEntry("m1", "a", newest, True, wanted, stored)])

    def do(self, what: Callable[[], object]) -> None:
        async def go() -> None:
            what()

        self.loop.run_until_complete(go())

    def turn(self, seconds: float) -> None:
        """A round of the server, and init obeys."""

        def turn() -> None:
            for one in self.deployments:
                self.show(one)
            self.bench.turn(seconds)

        self.do(turn)
        for order in self.bench.ordered[self.obeyed :]:
            if isinstance(order, StartDeployment):
                note = msgspec.json.decode(order.note, type=DeploymentRecord)
                source = f"path:{order.words[0]}"
                alike = [one for one in self.deployments if one.source == source]
                assert all(one.stopping or self.retires(one) for one in alike), "it is there"
                self.deployments.append(Deployment(order, note.socket, source))
            elif isinstance(order, StopDeployment):
                one = self.named(order.deployment)
                assert not one.streams, "a deployment is told to end while it answers"
                one.stopping = True
        self.obeyed = len(self.bench.ordered)

    def named(self, deployment: str) -> Deployment:
        return next(one for one in self.deployments if one.start.deployment == deployment)

    def retires(self, one: Deployment) -> bool:
        models = self.bench.every
        return any(each.deployment == one.start.deployment and each.retires for each in models)

    def show(self, one: Deployment) -> None:
        """What it tells of itself."""
        for model in self.bench.every:
            if model.deployment == one.start.deployment and model.watched is not None:
                rows = (served("i0"),) if one.ready and not one.stopping else ()
                model.watched.told = DeploymentEvent(one.streams, data=rows)

    def end(self, one: Deployment, how: str) -> None:
        self.deployments.remove(one)
        self.do(lambda: self.bench.report_end(one.start.deployment, how))

    # -- what may happen

    @rule(seconds=st.sampled_from([0.0, 1.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.turn(seconds)

    @rule()
    def all_get_ready(self) -> None:
        """And the server learns of it."""
        for _ in range(3):
            self.turn(1)
            for one in list(self.deployments):
                self.gets_ready_or_has_ended(one)
        self.turn(1)

    @rule()
    def the_proxy_hears_all(self) -> None:
        while self.heard < len(self.bench.told):
            self.the_proxy_hears()
        self.the_proxy_says()

    @rule()
    def the_proxy_hears(self) -> None:
        if self.heard < len(self.bench.told):
            routes, _ = self.bench.told[self.heard]
            self.heard += 1
            self.route = routes[-1] if routes else self.route

    @rule()
    def the_proxy_says(self) -> None:
        streams = [
            ModelDemand("a", one.streams, 0, 0, 0.5 * one.streams, one.socket)
            for one in self.deployments
        ]
        held = ModelDemand("a", 0, self.held, 0, 0.5 * self.held)
        demand = ProxyDemand(self.heard, 0.5, (*streams, held))
        self.do(lambda: self.bench.models.take_demand("p0", demand))

    @rule(draw=st.integers(0, 99))
    def a_request_comes(self, draw: int) -> None:
        if self.route is None or self.route.state != "ready":
            self.held = 1
            self.do(lambda: self.bench.models.take_want(ModelWanted("a")))
            return
        socket = socket_of(self.route, draw)
        assert socket not in self.over, "a request goes to a deployment that was told to end"
        for one in self.deployments:
            if one.socket == socket:
                assert not one.stopping, "a request goes to a deployment that was told to end"
                one.streams += 1
                self.held = 0

    @precondition(lambda self: self.deployments)
    @rule(which=st.integers(0, 9))
    def a_stream_ends(self, which: int) -> None:
        one = self.deployments[which % len(self.deployments)]
        one.streams = max(0, one.streams - 1)

    @precondition(lambda self: self.deployments)
    @rule(which=st.integers(0, 9))
    def one_gets_ready_or_has_ended(self, which: int) -> None:
        self.gets_ready_or_has_ended(self.deployments[which % len(self.deployments)])

    def gets_ready_or_has_ended(self, one: Deployment) -> None:
        if one.stopping:
            self.over.add(one.socket)
            self.end(one, "exit code 0")
        one.ready = True

    @precondition(lambda self: self.deployments)
    @rule(which=st.integers(0, 9))
    def one_crashes(self, which: int) -> None:
        if which < 3:  # seldom: little else would happen
            self.end(self.deployments[which % len(self.deployments)], "killed")

    @rule(source=st.sampled_from(SOURCES), canary=st.sampled_from([(), (50,)]))
    def somebody_changes_it(self, source: str, canary: tuple[int, ...]) -> None:
        stored = self.stored
        if source == stored.specs[-1]:
            return
        base = len(stored.specs) if stored.plan is None else stored.plan.base
        stored.specs.append(source)
        same = need_of(spec(stored.specs[base - 1]), spec(source)) == "nothing"
        terms = RolloutTerms(canary=canary, hold_s=60)
        plan = begun(terms, base, len(stored.specs), self.bench.now)
        stored.plan = None if same else plan
        self.do(self.load)

    @precondition(lambda self: self.stored.plan is not None)
    @rule(order=st.sampled_from(["pause", "resume", "promote"]))
    def somebody_steers_it(self, order: str) -> None:
        plan = self.stored.plan
        assert plan is not None
        changes = {
            ("pause", "running"): paused, ("resume", "paused"): resumed,
            ("resume", "stopped"): resumed, ("promote", "running"): promoted,
        }  # fmt: skip
        change = changes.get((order, plan.state))
        if change is None or (order == "promote" and (plan.share == 100 or plan.step < 0)):
            return
        self.stored.plan = change(plan, self.bench.now)
        self.do(self.load)

    @rule()
    def the_server_is_killed(self) -> None:
        now = self.bench.now
        self.loop.run_until_complete(self.bench.models.close())
        self.do(self.begin)
        self.bench.now = now

    # -- and in the end

    def teardown(self) -> None:
        try:
            self.comes_to_an_end()
        finally:
            self.loop.run_until_complete(self.bench.models.close())
            self.loop.close()
            self.patch.undo()
            self.folder.cleanup()

    def comes_to_an_end(self) -> None:
        """Whoever waits is served; with what is wanted, and nothing else is left."""
        if self.stored.plan is not None and self.stored.plan.state != "running":
            self.stored.plan = resumed(self.stored.plan, self.bench.now)
            self.do(self.load)
        self.a_request_comes(0)
        for _ in range(12):
            self.turn(70)
            self.the_proxy_hears_all()
            for one in self.deployments:
                one.streams = 0
            self.a_request_comes(0)
            for one in list(self.deployments):
                self.gets_ready_or_has_ended(one)
        assert self.stored.plan is None
        (one,) = self.deployments
        assert (one.source, one.ready) == (self.stored.specs[-1], True)
        assert self.route is not None
        assert (self.route.state, self.route.socket) == ("ready", one.socket)


TestRollingModel = RollingModel.TestCase
TestRollingModel.settings = examples(40, stateful_step_count=40, deadline=None)
