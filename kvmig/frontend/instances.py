"""The instances of a front end: their connections, their health, where a new request goes."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from kvmig.asgi.errors import (
    InstanceLost,
    InstanceRemoved,
    NoDestination,
    UnknownInstance,
)
from kvmig.controlplane.carry_ahead import (
    CarryRates,
    PrefillRate,
    TurnCarriage,
    carry_ratio,
    plan_carriage,
)
from kvmig.controlplane.dispatch import NewRequest, allowed, here_first
from kvmig.controlplane.freeness import instance_freeness
from kvmig.controlplane.messages import ClusterMember, ClusterMessage, LoadReport, Welcome
from kvmig.controlplane.policy import policy_of
from kvmig.controlplane.prefix_index import PrefixIndex
from kvmig.controlplane.session_hints import SessionHints, SessionPlace
from kvmig.controlplane.view import ClusterView, InstanceView, ViewBuilder
from kvmig.core.api_records import InstanceRow
from kvmig.core.background import cancel_tasks
from kvmig.core.clock import TimeSource
from kvmig.core.config import ClusterConfig
from kvmig.core.errors import NoInstance, PeerError, TransportError
from kvmig.engines.base import Frames
from kvmig.frontend.dispatch_turns import QueueLengths
from kvmig.frontend.inventory import instance_row
from kvmig.frontend.ports import NOT_BEGUN, DispatchOrder, EngineArithmetic
from kvmig.rpc.messages import VERSION, RpcMessage
from kvmig.rpc.zmq_sockets import RpcClient

RETRY_S = 0.5
"""Pause between two attempts to connect."""
TICK_S = 0.2
"""Longest time between two looks for silent instances."""
AILMENTS = ("hung", "failed")
"""States of load reports under which an instance's requests had better run elsewhere."""
ELSEWHERE = "elsewhere"
"""The label of metrics for what instances of other servers do for this one's clients."""

log = logging.getLogger(__name__)


class InstanceConnection:
    """One instance: its connection, made again whenever it is lost, and its health.

    welcome: the instance's answer to our Hello, while the connection lives. health: None until the
    instance has reported over the present connection; only those with health are dispatched to.
    """

    def __init__(
        self,
        name: str,
        index: int,
        endpoint: str,
        secret: bytes,
        front: str,
        listener: InstanceListener,
        *,
        guest: bool = False,
    ) -> None:
        """front: this front end's name. guest: the instance is another server's."""
        self.name = name
        self.guest = guest
        self.index = index
        self.endpoint = endpoint
        self.welcome: Welcome | None = None
        self.health: InstanceHealth | None = None
        self.was_met = False
        """Whether it has welcomed us over any connection."""
        self._secret = secret
        self._front = front
        self._listener = listener
        self._client: RpcClient | None = None
        self._serving: asyncio.Task[None] | None = None
        self._closed = False
        self._up = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"link to {name}")

    @property
    def alive(self) -> bool:
        """Whether the instance is connected: it welcomed us over the present connection."""
        return self.welcome is not None

    @property
    def arithmetic(self) -> EngineArithmetic:
        """Weights and numerics of the instance, as last reported."""
        if self.health is not None and self.health.arithmetic is not None:
            return self.health.arithmetic
        return EngineArithmetic("" if self.welcome is None else self.welcome.weights)

    async def connected(self, timeout_s: float) -> Welcome:
        """Wait for the instance's Welcome. Raises InstanceLost."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        except TimeoutError as error:
            message = f"instance {self.name} at {self.endpoint} did not answer Hello"
            raise InstanceLost(f"{message} within {timeout_s:g} s") from error
        assert self.welcome is not None
        return self.welcome

    def send(self, message: RpcMessage, payload: Frames = ()) -> None:
        """Queue a message. Raises InstanceLost if it isn't connected or can't take more."""
        if self._client is None or self.welcome is None:
            raise InstanceLost(f"instance {self.name} is not connected")
        try:
            self._client.send(message, payload)
        except TransportError as error:
            raise InstanceLost(f"instance {self.name}: {error}") from error

    def drop(self, reason: str) -> None:
        """Give this connection up and inform the listener; a new one is tried."""
        self._lose(reason)
        if self._serving is not None:
            self._serving.cancel()

    async def close(self) -> None:
        """Disconnect for good; the listener is not informed."""
        self._closed = True
        self.welcome = self._client = None
        await cancel_tasks(self._task)

    async def _run(self) -> None:
        while True:
            self._serving = asyncio.create_task(self._serve())
            try:
                await self._serving
            except asyncio.CancelledError:
                if self._closed:
                    raise
            except (TransportError, PeerError) as error:
                self._lose(str(error))
            except Exception as error:
                log.exception("instance %s: handling its messages failed", self.name)
                self._lose(f"internal error: {error!r}")
            await asyncio.sleep(RETRY_S)

    def _lose(self, reason: str) -> None:
        welcomed = self.welcome
        self.welcome = self._client = None
        self._up.clear()
        if welcomed is not None:
            self._listener.on_lost(self, reason)

    async def _serve(self) -> None:
        """Hand all that comes over one connection to the listener.

        A message that can't be taken costs the connection: its content is lost, like tokens.
        """
        role = "guest" if self.guest else "gateway"
        client = RpcClient(self.endpoint, self._secret, role, self._front, ClusterMessage)
        try:
            self._client = client
            async for message, payload in client.messages(f"instance {self.name}", self._refuse):
                if isinstance(message, Welcome):
                    self._greet(message)
                    continue
                if self.welcome is None:
                    continue
                try:
                    self._listener.on_message(self, message, payload)
                except PeerError as error:
                    self._listener.refused(error)
                    raise
                except msgspec.MsgspecError as error:
                    name = type(message).__name__
                    refused = PeerError(f"{name} can't be used: {error}", "unusable")
                    self._listener.refused(refused)
                    raise refused from error
        finally:
            client.close()

    def _refuse(self, error: PeerError) -> None:
        """Raise the error if it came before the Welcome: then this is no instance of ours."""
        self._listener.refused(error)
        if self.welcome is None:
            raise error

    def _greet(self, welcome: Welcome) -> None:
        if not VERSION.understands(welcome.version) or welcome.instance != self.name:
            raise PeerError(
                f"{self.endpoint} is {welcome.instance} with protocol {welcome.version}, "
                f"not {self.name} with {VERSION}"
            )
        self.welcome = welcome
        self.was_met = True
        self._up.set()


class InstanceListener(Protocol):
    """The router, to which instances hand what comes over their connections."""

    def on_message(
        self, instance: InstanceConnection, message: RpcMessage, payload: list[memoryview]
    ) -> None:
        """A message came after the instance's Welcome."""
        ...

    def refused(self, error: PeerError) -> None:
        """A message came that can't be read, or taken."""
        ...

    def on_lost(self, instance: InstanceConnection, reason: str) -> None:
        """The connection is gone, and what was on its way with it. Called once a connection."""
        ...


class InstanceHealth:
    """State of a connected instance, from its Welcome or first report on. Pure."""

    def __init__(self, listening: ListeningClock) -> None:
        self.state = ""
        """State in the last load report; empty before."""
        self.arithmetic: EngineArithmetic | None = None
        """Arithmetic in the last load report; None before."""
        self.parked = False
        """Whether its KV cache's memory is given back, by the last load report."""
        self._listening = listening
        self.record_message()

    def record_message(self) -> None:
        """The instance said something."""
        self._heard_s = self._listening.total_s

    @property
    def silence_s(self) -> float:
        """Seconds of silence, up to a period more than the instance was silent."""
        return self._listening.total_s - self._heard_s

    def find_ailment(self, heartbeat_timeout_s: float) -> str:
        """silent, hung or failed; empty for an instance that can be relied on."""
        if self.silence_s > heartbeat_timeout_s:
            return "silent"
        return self.state if self.state in AILMENTS else ""


class ListeningClock:
    """A clock of the time during which this process listened, to measure silence by. Pure.

    While this process itself stood still no instance was silent: its messages are still unread.
    """

    def __init__(self, period_s: float, now: float) -> None:
        """period_s: time between two ticks; now: in any clock, as for `tick`."""
        self.total_s = 0.0
        self._period_s = period_s
        self._ticked = now

    def tick(self, now: float) -> None:
        """Count the time since the last tick, two periods at most: after longer, we slept."""
        self.total_s += min(now - self._ticked, 2 * self._period_s)
        self._ticked = now


class InstancePool:
    """Instances by name, in the order in which they were added; each keeps its engine index.

    An instance is alive while it is connected. Only those that report are dispatched to; one that
    was lost comes back with its next report. An instance is fit while it also says enough, and
    nothing bad (`InstanceHealth`).

    Instances of other servers that this one has joined are guests: requests can be moved to them,
    but new ones go there only while none of this server serves. Their own server counts them.
    """

    def __init__(
        self,
        name: str,
        secret: bytes,
        config: ClusterConfig,
        clock: TimeSource,
        lost_after_s: float,
        listener: InstanceListener,
    ) -> None:
        """name: this front end's. Call `tick` every `tick_s`."""
        self.block_tokens = 16
        """Tokens per KV block, as load reports count; set by the front end once an engine reports
        it."""
        self.parking = asyncio.Event()
        """Wakes who waits for an instance to be parked, or to wake."""
        self.preferred = ""
        """Weights under which new requests had better begin; empty: no matter which."""
        self.unlike: Mapping[str, str] = {}
        """Servers that can't take requests of this one's, and why."""
        self._name = name
        self._secret = secret
        self._clock = clock
        self._silent_after_s = config.faults.heartbeat_timeout_s
        self._lost_after_s = lost_after_s
        self._listener = listener
        policy = policy_of(config.scheduler)
        self._dispatch = policy.dispatcher()
        self._view = ViewBuilder(headroom=policy.headroom)
        self._by_prefixes = config.scheduler.prefix_dispatch
        self._prefixes = PrefixIndex()
        self._sessions = SessionHints()
        self._prefill_rate = PrefillRate()
        self._instances: dict[str, InstanceConnection] = {}
        self._most_here = config.lifecycle.max_instances
        self._guests: frozenset[str] = frozenset()
        self._weights_here = ""
        """Weights of an instance of this server, as last reported; empty: none has."""
        self._indexes: dict[str, int] = {}
        """Engine indexes of all instances that ever were."""
        self.tick_s = min(TICK_S, self._silent_after_s / 4)
        self._listening = ListeningClock(self.tick_s, clock())

    async def add(
        self,
        name: str,
        endpoint: str,
        timeout_s: float,
        index: int | None = None,
        *,
        guest: bool = False,
    ) -> bytes:
        """Connect; see `FrontendRouter.add_instance`."""
        if name in self._instances:
            raise ValueError(f"instance {name} was added before")
        if index is None:
            index = len(self._indexes) + (self._most_here if guest else 0)
        index = self._indexes.setdefault(name, index)
        made = InstanceConnection(
            name, index, endpoint, self._secret, self._name, self._listener, guest=guest
        )
        self._instances[name] = made
        self._note_guests()
        try:
            welcome = await made.connected(timeout_s)
        except BaseException:
            await self.remove(name)
            raise
        if made.health is None:
            self._join(made)
        return welcome.engine

    async def remove(self, name: str) -> bool:
        """Disconnect; whether there was one."""
        instance = self._instances.pop(name, None)
        if instance is None:
            return False
        self._note_guests()
        self.forget(instance)
        await instance.close()
        return True

    def _note_guests(self) -> None:
        self._guests = frozenset(name for name, one in self._instances.items() if one.guest)

    async def close(self) -> None:
        """Disconnect from all."""
        await asyncio.gather(*(one.close() for one in self._instances.values()))

    # -- what is known of them

    @property
    def alive(self) -> list[str]:
        """Connected instances."""
        return [name for name, one in self._instances.items() if one.alive]

    @property
    def alive_here(self) -> list[str]:
        """Connected instances of this server."""
        return [name for name in self.alive if name not in self._guests]

    @property
    def parked(self) -> bool:
        """Whether some instance's KV cache is given back: until it isn't, requests had better
        wait."""
        known = (self._instances[name].health for name in self.alive_here)
        return any(one is not None and one.parked for one in known)

    def vacant(self) -> bool:
        """Whether no instance is connected and has reported: new requests can't be taken."""
        return not any(one.alive and one.health is not None for one in self._instances.values())

    def is_healthy(self, name: str) -> bool:
        """Whether the instance can be relied on."""
        one = self._instances.get(name)
        known = one is not None and one.alive and one.health is not None
        return known and not self._ailment(name)

    def any_healthy(self) -> bool:
        """Whether some instance can be relied on."""
        return any(self.is_healthy(name) for name in self._instances)

    def others_serve(self, instance: str, begun: EngineArithmetic = NOT_BEGUN) -> bool:
        """Whether another fit instance takes requests, also those that have begun so."""
        return any(
            one.health is not None
            and one.health.state == "serving"
            and begun.can_continue_on(one.arithmetic)
            for name, one in self._instances.items()
            if name != instance and self.is_healthy(name)
        )

    def roomiest(self, source: str, inexact: bool = False) -> str:
        """The instance with the most room for a request of this one. Raises NoDestination.

        inexact: where nothing rounds alike, also where its tokens may differ.
        """
        exact = self.arithmetic(source)
        others = [
            one
            for one in self._view.view(self._clock()).instances
            if one.instance != source and self.is_healthy(one.instance) and one.state == "serving"
        ]
        for begun in (exact, exact._replace(numerics="")) if inexact else (exact,):
            able = [one for one in others if begun.can_continue_on(self.arithmetic(one.instance))]
            if able:
                return max(able, key=instance_freeness).instance
        raise NoDestination(
            f"no instance serves besides {source} that its requests could be moved to"
        )

    def unhealthy_instances(self) -> dict[str, str]:
        """Connected instances that aren't fit: silent, hung or failed."""
        return {name: ill for name in self.alive if (ill := self._ailment(name))}

    def _ailment(self, name: str) -> str:
        health = self._instances[name].health
        return "" if health is None else health.find_ailment(self._silent_after_s)

    def arithmetic(self, instance: str) -> EngineArithmetic:
        """Weights and numerics of the instance, as last reported."""
        one = self._instances.get(instance)
        return EngineArithmetic("") if one is None else one.arithmetic

    def index(self, instance: str) -> int:
        """The engine index of the instance, also after it was removed."""
        return self._indexes[instance]

    def engine_indexes(self) -> dict[int, str]:
        """Instance by engine index, those that are gone included; all guests are one."""
        most = self._most_here
        found = {index: name for name, index in self._indexes.items() if index < most}
        return found if len(found) == len(self._indexes) else {**found, most: ELSEWHERE}

    def endpoint(self, instance: str) -> str:
        """The instance's endpoint. Raises UnknownInstance."""
        if instance not in self._instances:
            known = ", ".join(self._instances)
            others = "".join(
                f"; no requests move to {server}: {why}" for server, why in self.unlike.items()
            )
            raise UnknownInstance(f"there is no instance {instance}, only {known}{others}")
        return self._instances[instance].endpoint

    def waiting(self, priority: int) -> int:
        """Requests in instances' queues, of any front end, that aren't after this priority."""
        loads = (one.load for one in self._views_here())
        return sum(
            sum(one.waiting for one in load.classes if one.priority <= priority)
            if load.classes
            else load.waiting * (priority >= 0)
            for load in loads
            if load.waiting
        )

    def queues(self) -> QueueLengths:
        """How many wait in the queues of instances that may get more."""
        serving = [one for one in self._views_here() if self.is_healthy(one.instance)]
        return QueueLengths(len(serving), sum(one.load.waiting for one in serving))

    def rows(self) -> list[InstanceRow]:
        """Rows of all instances as last reported."""
        return [
            instance_row(
                min(one.index, self._most_here) if one.guest else one.index,
                view,
                self._state_word(one),
                one.welcome,
            )
            for one, view in zip(self._instances.values(), self.views(), strict=True)
        ]

    def rows_here(self) -> list[InstanceRow]:
        """Rows of the instances of this server."""
        return [row for row in self.rows() if row.id not in self._guests]

    def views_here(self) -> list[InstanceView]:
        """Views of the instances of this server, as `views`."""
        return [view for view in self.views() if view.instance not in self._guests]

    def _views_here(self) -> Iterable[InstanceView]:
        views = self._view.view(self._clock()).instances
        if not self._guests:
            return views
        return (one for one in views if one.instance not in self._guests)

    def _state_word(self, one: InstanceConnection) -> str:
        """What its row says in place of what it reports; empty: that counts."""
        if one.alive:
            return self._ailment(one.name)
        return "lost" if one.was_met else "starting"  # we may be asked before we are connected

    def views(self) -> list[InstanceView]:
        """Views of all instances as they last reported, in the same order."""
        known = {one.instance: one for one in self._view.view(self._clock()).instances}
        return [
            known.get(name) or InstanceView(instance=name, endpoint=one.endpoint)
            for name, one in self._instances.items()
        ]

    # -- what is sent to them

    def send(self, instance: str, message: RpcMessage, payload: Frames = ()) -> None:
        """Queue a message, at once. Raises InstanceLost."""
        one = self._instances.get(instance)
        if one is None:
            raise InstanceRemoved(f"instance {instance} was removed")
        one.send(message, payload)

    def dispatch(self, order: DispatchOrder) -> str:
        """Send a run where the policy wants it; returns the instance. Raises NoInstance."""
        now, marks = self._clock(), self._marks_of(order)
        request = self._make_request(order, marks, now)
        while True:
            try:
                instance = self._pick_instance(order, request, now)
                self._instances[instance].send(order.submit, order.payload)
            except NoInstance:
                raise NoInstance("no instance is connected that could take the request") from None
            except InstanceLost as lost:
                log.warning("a request goes elsewhere: %s", lost)
                self.forget(self._instances[instance])
                continue
            demand_blocks = request.demand_blocks
            self._view.dispatched(instance, demand_blocks, now)
            self._prefixes.expect(instance, marks, now)
            if order.session is not None and self._by_prefixes:
                place = SessionPlace(instance, demand_blocks, order.payer)
                self._sessions.remember_place(order.session, place)
            return instance

    def find_carriage(self, order: DispatchOrder, source: str) -> TurnCarriage | None:
        """The instance where a session's turn had better run after `source` has copied there what
        it holds; None: it runs where dispatch sends it, and what is lacking is computed.

        No request waits for the copy: neither end moves any then.
        """
        now, marks = self._clock(), self._marks_of(order)
        view = self._view.view(now)
        row = view.row_of(source)
        if row is None or not marks or not self._prefixes.has_report_of(source):
            return None
        here = view.instances[row]
        rates = CarryRates(here.bandwidth, self._prefill_rate.tokens_s / self.block_tokens)
        if here.state != "serving" or here.migrations_out or not rates.copy:
            return None
        request = self._make_request(order, marks, now)
        ratio = carry_ratio(request.held_blocks.get(source, 0.0), rates)
        if ratio >= 1:
            return None
        try:
            chosen = self._pick_instance(
                order, msgspec.structs.replace(request, carry_ratio=ratio), now
            )
        except NoInstance:
            return None
        found = plan_carriage(request.held_blocks, chosen, source, rates)
        if found is None or found.blocks > self.rooms_beside(source).get(chosen, 0):
            return None
        there = next(one for one in view.instances if one.instance == chosen)
        return None if there.migrations_in else found

    def expect_beginning(self, instance: str, order: DispatchOrder) -> None:
        """The instance holds the beginning of this turn's prompt from now on."""
        self._prefixes.expect(instance, self._marks_of(order), self._clock())

    def note_prompt(self, tokens: int, seconds: float) -> None:
        """Note the time from a prompt's start to its first token. tokens: those that were
        computed."""
        self._prefill_rate.note_prompt(tokens, seconds)

    def _make_request(self, order: DispatchOrder, marks: Sequence[int], now: float) -> NewRequest:
        """The run as policies see it."""
        demand_blocks = math.ceil((order.tokens + 1) / self.block_tokens)
        held = self._prefixes.find_blocks(marks, now, self.block_tokens)
        last = None if order.session is None else self._sessions.find(order.session)
        if last is not None and not (marks and self._prefixes.has_report_of(last.instance)):
            held.setdefault(last.instance, last.presumed_blocks(demand_blocks))
        return NewRequest(
            demand_blocks,
            order.priority,
            *order.begun,
            preferred=self.preferred,
            held_blocks=held,
        )

    def _pick_instance(self, order: DispatchOrder, request: NewRequest, now: float) -> str:
        """The instance that the policy chooses. Raises NoInstance."""
        view = self._view.view(now)
        if order.fit:
            well = [one for one in view.instances if self.is_healthy(one.instance)]
            view = ClusterView(now, well, view.stale_after_s)
        able = allowed(view, request)
        if self._guests:
            able = here_first(able, request, self._guests, self._weights_here)
        return self._dispatch.pick(able, request).instance

    def note_session_move(self, session: int, source: str, destination: str) -> None:
        """The session's blocks are elsewhere: the next request had better go there, too."""
        place = self._sessions.find(session)
        if place is not None and place.instance == source:
            self._sessions.remember_place(session, place._replace(instance=destination))

    def held_elsewhere(self, marks: Sequence[int], source: str) -> tuple[int, dict[str, int]]:
        """Tokens of a prompt with these marks that `source` holds, by its reports, and that others
        do."""
        held = self._prefixes.find_tokens(marks, self._clock())
        return held.pop(source, 0), held

    def rooms_beside(self, source: str) -> dict[str, int]:
        """Free KV blocks of the instances that serve and that can go on where `source` has begun:
        weights and numerics are equal."""
        exact = self.arithmetic(source)
        return {
            one.instance: int(one.load.total_blocks - one.virtual_blocks - one.pending_blocks)
            for one in self._view.view(self._clock()).instances
            if one.instance != source
            and one.state == "serving"
            and self.is_healthy(one.instance)
            and exact.can_continue_on(self.arithmetic(one.instance))
        }

    def state_of(self, instance: str) -> str:
        """The state that it has reported; empty: it isn't connected, or has reported nothing."""
        one = self._instances.get(instance)
        return "" if one is None or one.health is None else one.health.state

    def block_bytes(self, instance: str) -> int:
        """Bytes of a block of its KV cache; 1 where it doesn't say."""
        one = self._instances.get(instance)
        return 1 if one is None or one.welcome is None else max(1, one.welcome.block_bytes)

    def forget_session(self, session: int) -> None:
        """Let only what instances report count for the session's next request: its place is not
        known any more."""
        self._sessions.forget_session(session)

    def _marks_of(self, order: DispatchOrder) -> Sequence[int]:
        """The marks of its prompt, where they can decide anything."""
        wanted = order.marks is not None and self._by_prefixes and len(self._instances) > 1
        return order.marks() if wanted and order.marks is not None else ()

    # -- what they tell

    def report(self, report: LoadReport) -> None:
        """Take an instance's load report."""
        instance = self._instances.get(report.instance)
        if instance is None:
            return
        health = instance.health or self._join(instance)
        health.arithmetic = EngineArithmetic(report.weights, report.numerics)
        health.state = report.state
        if not instance.guest:
            self._weights_here = report.weights
        if health.parked != report.parked:
            health.parked = report.parked
            self.parking.set()
            self.parking.clear()
        self._view.report(report, self._clock())
        if report.prefixes is not None and self._by_prefixes:
            self._prefixes.learn(report.instance, report.prefixes)

    def _join(self, instance: InstanceConnection) -> InstanceHealth:
        self._view.join(ClusterMember(instance.name, instance.endpoint))
        instance.health = health = InstanceHealth(self._listening)
        return health

    def forget(self, instance: InstanceConnection) -> None:
        """Dispatch nothing to the instance until its next report."""
        instance.health = None
        self._view.leave(instance.name)
        self._prefixes.forget(instance.name)
        self._sessions.forget(instance.name)

    def tick(self) -> None:
        """Let time pass; give up connections over which nothing has come for long."""
        self._listening.tick(self._clock())
        for instance in self._instances.values():
            silence_s = 0.0 if instance.health is None else instance.health.silence_s
            if silence_s > self._lost_after_s:
                self.forget(instance)
                instance.drop(f"no message came for {silence_s:.1f} s")
