"""The simulator's llumlet: an engine, what it reports, and the pairs that it moves requests for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvmig.controlplane.messages import LoadReport, PairedDestination
from kvmig.controlplane.policy import Policy
from kvmig.controlplane.reporter import CHANGE_PERIOD_S
from kvmig.controlplane.victims import next_victim
from kvmig_tools.sim.engine import SimEngine
from kvmig_tools.sim.events import EventQueue
from kvmig_tools.sim.load import engine_load, request_states
from kvmig_tools.sim.migration import Migration, Outcome
from kvmig_tools.sim.policies import Setting
from kvmig_tools.sim.request import SimRequest

Begin = Callable[["SimLlumlet", SimRequest, PairedDestination], Migration]
"""(source, request, pair): a migration to the pair's destination that hasn't started yet."""


class SimLlumlet:
    """Does what `kvmig.controlplane.llumlet` and `mover` do, without sockets."""

    def __init__(
        self,
        name: str,
        events: EventQueue,
        engine: SimEngine,
        policy: Policy,
        setting: Setting,
        headroom: Mapping[int, float] | None,
        begin: Begin,
    ) -> None:
        """headroom: blocks by priority; None: all requests are of one class."""
        self.name = name
        self.engine = engine
        self._events = events
        self._rule = policy.victims
        self._setting = setting
        self._headroom = dict(headroom or {})
        self._classes = headroom is not None
        self._begin = begin
        self.here: dict[str, SimRequest] = {}
        """Requests by id."""
        self.leaving: dict[str, Migration] = {}
        self.incoming = 0
        self.state = "serving"
        self._pairs: dict[str, PairedDestination] = {}
        self._spent: dict[str, float] = {}
        self._busy: Counter[str] = Counter()
        """Requests on their way, by destination."""
        self._refused: dict[str, set[str]] = {}
        """Requests that were tried, by destination."""
        self._arrived: dict[str, float] = {}
        self._seq = 0
        self.reported_at = -1.0

    @property
    def idle(self) -> bool:
        """Whether it holds nothing, and nothing is on its way here."""
        return self.engine.empty and not self.leaving and not self.incoming

    # -- requests

    def submit(self, request: SimRequest) -> None:
        """A new request."""
        self.here[request.request_id] = request
        self.engine.submit(request)
        if any(pair.why == "prompt" for pair in self._pairs.values()):
            self._events.after(CHANGE_PERIOD_S, self._move)

    def arrived(self, request: SimRequest) -> None:
        """It came here by a migration."""
        self.here[request.request_id] = request
        self._arrived[request.request_id] = self._events.now

    def gone(self, request: SimRequest, reason: str) -> None:
        """It finished or was preempted: its migration out of here is over, if there is one."""
        if reason == "finished":
            self._forget(request)
        migration = self.leaving.get(request.request_id)
        if migration is not None:
            migration.lost(reason)

    def lose_requests(self) -> list[SimRequest]:
        """Take out all that runs or waits here, without its cache; between two steps."""
        lost = self.engine.lose_requests()
        for request in lost:
            self.gone(request, "preempted")
            self._forget(request)
        return lost

    def may_enter(self) -> str:
        """Why a request can't come here now; empty if it can."""
        if self.state == "draining":
            return "draining"
        if self.incoming >= self._setting.max_migrations:
            return "busy"
        if self._setting.refuse_when_queued and self.engine.waiting:
            return "busy"
        return ""

    def _forget(self, request: SimRequest) -> None:
        self.here.pop(request.request_id, None)
        self._arrived.pop(request.request_id, None)

    # -- reports

    def report(self) -> LoadReport | None:
        """What it says now; None: the same as before."""
        now, before = self._events.now, float("inf")
        if self._setting.reports == "step":
            before = self.engine.boundary_before()
            if before <= self.reported_at and self._seq:
                return None
        self.reported_at = now
        self._seq += 1
        return LoadReport(
            self.name,
            self._seq,
            engine_load(self.engine, before, self._classes),
            self.incoming,
            len(self.leaving),
            self.state,
            headroom=self._headroom,
        )

    # -- pairs

    def pair(self, pairs: Sequence[PairedDestination]) -> None:
        """The scheduler's word; no pairs: stop."""
        self._pairs = {pair.destination: pair for pair in pairs}
        self._spent = dict.fromkeys(self._pairs, 0.0)
        self._refused = {destination: set() for destination in self._pairs}
        self._move()

    def _move(self) -> None:
        for number in range(self._setting.max_migrations):
            for destination in list(self._pairs):
                if self._busy[destination] <= number:
                    self._move_one(destination)

    def _move_one(self, destination: str) -> None:
        pair = self._pairs.get(destination)
        if pair is None:
            return
        most = self._setting.max_migrations if pair.why == "prompt" else 1
        if self._busy[destination] >= most or (most > 1 and len(self.leaving) >= most):
            return
        victim = next_victim(
            request_states(self.engine),
            pair,
            self._spent[destination],
            self._refused[destination].union(self.leaving) if most > 1 else self.leaving,
            self._arrived,
            self._events.now,
            self._rule,
        )
        if victim is None:
            return
        self._spent[destination] += victim.weight_blocks
        self._busy[destination] += 1
        migration = self._begin(self, self.here[victim.request_id], pair)
        self.leaving[victim.request_id] = migration
        migration.start()

    def migration_ended(self, request: SimRequest, destination: str, outcome: Outcome) -> None:
        """One out of here is over."""
        del self.leaving[request.request_id]
        self._busy[destination] -= 1
        if outcome.state == "committed":
            self._forget(request)
        elif outcome.reason != "finished":
            pair = self._pairs.get(destination)
            if pair is not None and pair.why == "prompt":
                self._refused[destination].add(request.request_id)
                self._events.after(0.0, self._move)
            return  # the pair doesn't work now; the next round decides anew
        # Not here: the engine may be in the middle of a step's end.
        self._events.after(0.0, partial(self._move_one, destination))
