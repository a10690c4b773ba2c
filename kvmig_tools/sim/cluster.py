"""The simulated cluster: arrivals, dispatch and rounds, by the live control plane's code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from kvmig.controlplane.dispatch import NewRequest
from kvmig.controlplane.messages import ClusterMember, PairedDestination
from kvmig.controlplane.policy import Policy
from kvmig.controlplane.scheduler import RoundScheduler
from kvmig.controlplane.session_hints import SessionHints, SessionPlace
from kvmig.controlplane.view import ClusterView, ViewBuilder
from kvmig.core.config import ScalingConfig
from kvmig.core.priorities import NORMAL, PriorityClass
from kvmig_tools.sim.cost import CostModel
from kvmig_tools.sim.engine import SimEngine
from kvmig_tools.sim.events import EventQueue
from kvmig_tools.sim.llumlet import SimLlumlet
from kvmig_tools.sim.migration import Migration, Outcome
from kvmig_tools.sim.network import Network
from kvmig_tools.sim.outcomes import Outcomes
from kvmig_tools.sim.policies import Setting
from kvmig_tools.sim.reports import Reports
from kvmig_tools.sim.request import SimRequest
from kvmig_tools.sim.scale import Scaling
from kvmig_tools.sim.series import Series
from kvmig_tools.sim.session_moves import SessionRules, SimSessionMoves


class _Ears:
    """An engine's listener: to its llumlet and to the outcomes."""

    def __init__(self, cluster: SimCluster, name: str) -> None:
        self._cluster = cluster
        self._name = name

    def changed(self) -> None:
        """News for the next report."""
        self._cluster.changed(self._name)

    def first_token(self, request: SimRequest) -> None:
        """Nobody needs to know."""

    def finished(self, request: SimRequest) -> None:
        """Count it."""
        self._cluster.llumlets[self._name].gone(request, "finished")
        self._cluster.finished(request)

    def preempted(self, request: SimRequest) -> None:
        """Its migration, if any, ends."""
        self._cluster.llumlets[self._name].gone(request, "preempted")


class SimCluster:
    """Runs requests, in the order of their arrival, on `instances` modelled engines."""

    def __init__(
        self,
        requests: Iterable[SimRequest],
        instances: int,
        cost: CostModel,
        policy: Policy,
        setting: Setting,
        outcomes: Outcomes,
        classes: Sequence[PriorityClass] = (NORMAL,),
        scaling: ScalingConfig | None = None,
        sample_s: float = 0.0,
        *,
        by_prefixes: bool = False,
        by_sessions: bool = False,
        session_rules: SessionRules | None = None,
    ) -> None:
        """sample_s: virtual seconds between two samples of `series`; 0: none.

        by_prefixes: dispatch knows what instances hold of a prompt; by_sessions: where the last
        request of its session was sent; session_rules: which conversations move by themselves.
        """
        self.events = EventQueue()
        self.cost = cost
        self.policy = policy
        self.setting = setting
        self.outcomes = outcomes
        self.llumlets: dict[str, SimLlumlet] = {}
        """All there ever were."""
        self.members: dict[str, SimLlumlet] = {}
        """Those that serve or drain."""
        self.series = Series()
        self._by_prefixes = by_prefixes
        self._sessions = SessionHints() if by_sessions else None
        self._reports = Reports(setting)
        self._sample_s = sample_s
        self._since: dict[str, float] = {}
        self._network = Network(self.events, cost.copy.bandwidth)
        self.session_moves = SimSessionMoves(
            session_rules or SessionRules(), self.events, self._network, cost
        )
        self._dispatch = policy.dispatcher()
        self._scheduler = RoundScheduler(policy.rounds)
        self._builder = ViewBuilder(headroom=policy.headroom)
        self._headroom = None
        if len(classes) > 1:
            tokens = cost.capacity.block_tokens
            self._headroom = {one.priority: one.headroom_tokens / tokens for one in classes}
        self._arrivals: Iterator[SimRequest] = iter(requests)
        self._more = True
        self._left = 0
        self._scaling = None
        if scaling is not None:
            self._scaling = Scaling(
                scaling, self.events, cost.start_s, self._order, self._serve, self._leave
            )
        for _ in range(instances):
            self._serve(self._order())

    def run(self) -> Outcomes:
        """Until every request has ended."""
        self._next_arrival()
        if self._scheduler.rebalances or self._scaling is not None:
            self.events.at(0.0, self._round)
        if self._sample_s:
            self.events.at(0.0, self._sample)
        self.events.run()
        for llumlet in self.llumlets.values():
            if not llumlet.idle or llumlet.engine.used or llumlet.here:
                raise AssertionError(f"{llumlet.name} holds something at the end")
        for name in list(self._since):
            self._leave(name)
        self.outcomes.close(self.events.now, self.llumlets.values(), self._network.bytes)
        return self.outcomes

    @property
    def busy(self) -> bool:
        """Whether a request is here or to come."""
        return self._more or self._left > 0

    # -- instances

    def _order(self) -> str:
        """A member that doesn't serve yet: it costs from now on."""
        name = f"i{len(self.llumlets)}"
        engine = SimEngine(self.events, self.cost, _Ears(self, name))
        self.llumlets[name] = SimLlumlet(
            name,
            self.events,
            engine,
            self.policy,
            self.setting,
            self._headroom,
            self._migration,
        )
        self._builder.join(ClusterMember(name, name))
        self._since[name] = self.events.now
        return name

    def _serve(self, name: str) -> None:
        self.members[name] = self.llumlets[name]
        self._reports.join(self.llumlets[name])

    def _leave(self, name: str) -> None:
        self.members.pop(name, None)
        self._reports.leave(name)
        self._builder.leave(name)
        self.outcomes.instance_s += self.events.now - self._since.pop(name)

    def add_instance(self) -> None:
        """Another one serves from now on."""
        self._serve(self._order())

    def drain_instance(self, name: str) -> None:
        """Nothing new comes there."""
        self.members[name].state = "draining"
        self.changed(name)

    def kill_instance(self, name: str) -> None:
        """Its cache is lost, and its requests are dispatched again with the tokens that they have.

        It ends between two steps. Requests that were moving to it then end there.
        """
        self._reports.leave(name)
        self._builder.leave(name)
        self.drain_instance(name)

        def end() -> None:
            self._leave(name)
            for request in self.llumlets[name].lose_requests():
                self._place(request)

        self.llumlets[name].engine.at_boundary(end)

    def changed(self, name: str) -> None:
        """Something happened there that a report shall tell."""
        self._reports.news(name)

    def _sample(self) -> None:
        self.series.sample(self.events.now, self.members.values())
        if self.busy:
            self.events.after(self._sample_s, self._sample)

    # -- requests

    def _next_arrival(self) -> None:
        request = next(self._arrivals, None)
        if request is None:
            self._more = False
            return
        self.events.at(request.arrival, partial(self._arrive, request))

    def _arrive(self, request: SimRequest) -> None:
        if request.final_tokens > self.cost.capacity.largest:
            self.outcomes.refuse(request)
        else:
            self._left += 1
            if self.setting.front_end_s:
                self.events.after(self.setting.front_end_s, partial(self._place, request))
            else:
                self._place(request)
        self._next_arrival()

    def _place(self, request: SimRequest) -> None:
        demand = -(-request.tokens // self.cost.capacity.block_tokens)
        held = self._held_blocks(request) if self._by_prefixes and request.prefix else {}
        last = None
        if self._sessions is not None and request.session is not None:
            last = self._sessions.find(request.session)
        if last is not None and not self._by_prefixes:
            held.setdefault(last.instance, last.presumed_blocks(demand))
        ratio = self.session_moves.ratio(held)
        order = NewRequest(demand, request.priority, held_blocks=held, carry_ratio=ratio)
        chosen = self._dispatch.pick(self._view(), order)
        if self._sessions is not None and request.session is not None:
            self._sessions.remember_place(request.session, SessionPlace(chosen.instance, demand))
        if self.setting.reports == "live":
            self._builder.dispatched(chosen.instance, demand, self.events.now)
        submit = partial(self.llumlets[chosen.instance].submit, request)
        self.session_moves.carry_ahead(request, held, self.members, chosen.instance, submit)

    def _held_blocks(self, request: SimRequest) -> dict[str, float]:
        found = {name: one.engine.held_blocks(request) for name, one in self.members.items()}
        return {name: float(blocks) for name, blocks in found.items() if blocks}

    def finished(self, request: SimRequest) -> None:
        """An engine is done with it."""
        self._left -= 1
        self.outcomes.finish(request)

    # -- rounds

    def _view(self) -> ClusterView:
        now = self.events.now
        for report in self._reports.collect(now):
            self._builder.report(report, now)
        return self._builder.view(now)

    def _round(self) -> None:
        view = self._view()
        orders = self._scheduler.round(view)
        if self._scaling is not None:
            self._scaling.decide(view, self.members)
        for source, pairs in orders:
            self.llumlets[source].pair(pairs.pairs)
        self.session_moves.round(self.members)
        if self.busy:
            self.events.after(self.setting.round_s, self._round)

    # -- migrations

    def _migration(
        self, source: SimLlumlet, request: SimRequest, pair: PairedDestination
    ) -> Migration:
        destination = pair.destination
        there = self.llumlets[destination]
        counted = ended = False

        def may_enter() -> str:
            nonlocal counted
            refusal = there.may_enter()
            # It may have ended while this was on its way: then an abort comes right behind.
            if not refusal and not ended:
                counted = True
                there.incoming += 1
                self.changed(destination)
            return refusal

        def end(outcome: Outcome) -> None:
            nonlocal ended
            ended = True
            if counted:
                there.incoming -= 1
                self.changed(destination)
            self.outcomes.migrated(outcome)
            source.migration_ended(request, destination, outcome)

        return Migration(
            self.events,
            self._network,
            request,
            (source.name, source.engine),
            (destination, there.engine),
            self.setting.max_stages,
            may_enter,
            there.arrived,
            end,
            after_prompt=pair.why == "prompt",
        )
