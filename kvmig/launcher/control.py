"""The launcher's socket: front ends learn from it which instances there are, and give orders."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence

import msgspec
import zmq

from kvmig.controlplane.front_messages import (
    AskFronts,
    CarrySessions,
    FindSession,
    FrontAnswer,
    FrontAnswers,
    FrontAsked,
    SessionsCarried,
    SessionsFound,
)
from kvmig.controlplane.messages import (
    AddInstances,
    ClusterMember,
    ClusterMessage,
    DrainInstance,
    Members,
    MessagesRefused,
    OrderDone,
    OrderRefused,
    RaiseFence,
    RestartInstances,
    StopDrain,
)
from kvmig.controlplane.session_carriage import add_reports, latest_fronts
from kvmig.core.background import BackgroundTasks
from kvmig.core.errors import PeerError, StartupError, TransportError
from kvmig.core.order_fence import OrderFence
from kvmig.launcher.cluster import InstanceManager
from kvmig.launcher.front_questions import FrontQuestions
from kvmig.rpc.messages import Hello, RpcMessage
from kvmig.rpc.zmq_sockets import RpcServer

Order = AddInstances | DrainInstance | StopDrain | RestartInstances | RaiseFence

LONGEST_QUESTION_S = 600.0
"""Longest wait for front ends' answers that one of them may ask for."""
LATE_S = 2.0
"""Time for front ends to answer beyond a drain's deadline, and to name their sessions."""
TELL_S = 1.0
"""Pause between two reports of refusals."""

log = logging.getLogger(__name__)


class ControlServer:
    """The launcher's socket for front ends; make it inside a running event loop, `close` it.

    Front ends get nothing before `open`: the first instances are ready then.
    """

    def __init__(self, cluster: InstanceManager, secret: bytes, host: str) -> None:
        """Binds a port of `host`. Raises StartupError."""
        self._cluster = cluster
        self._fronts: list[bytes] = []
        self._open = False
        self._questions = FrontQuestions(self._send)
        self._fence = OrderFence()
        """Here, as front ends end and start again."""
        try:
            self._server = RpcServer(
                secret,
                "launcher",
                "launcher",
                ClusterMessage,
                host=host,
                refusals=cluster.refusals,
            )
        except (zmq.ZMQError, ValueError) as error:
            raise StartupError(f"launcher on {host}: {error}") from error
        self._tasks = BackgroundTasks("launcher")
        self._tasks.start(self._receive(), "launcher's socket")
        self._tasks.start(self._tell_refusals(), "what was refused")
        cluster.on_change.append(self._members)
        cluster.on_evacuate.append(self._tell)
        cluster.on_carry = self.carry_sessions

    @property
    def endpoint(self) -> str:
        """The endpoint for front ends."""
        return self._server.endpoint

    def open(self) -> None:
        """Send the members from now on."""
        self._open = True
        self._members(self._cluster.members())

    async def close(self) -> None:
        """Unbind."""
        await self._tasks.close()
        self._server.close()

    async def _receive(self) -> None:
        async for sender, message, _ in self._server.messages():
            if isinstance(message, Hello):
                self._fronts = [*(one for one in self._fronts if one != sender), sender]
                self._members(self._cluster.members())
                for told in self._refused():
                    self._send(sender, told)
            elif isinstance(message, AskFronts):
                self._tasks.start(self._ask_others(sender, message))
            elif isinstance(message, FrontAnswer):
                self._questions.take_answer(sender, message)
            elif isinstance(message, Order):  # in the order in which they come, as far as
                self._tasks.start(self._answer(sender, message))  # nothing has to be read first
            else:
                name = type(message).__name__
                self._server.refusals.count(PeerError(f"{name} isn't for a launcher"))
                log.warning("a front end sent %s", name)

    async def _ask_others(self, sender: bytes, message: AskFronts) -> None:
        """Pass a front end's question on, and the answers back."""
        others = [one for one in self._fronts if one != sender]
        if message.front:
            others = [one for one in others if one == message.front.encode()]
        timeout_s = min(message.timeout_s, LONGEST_QUESTION_S)
        replies = await self._questions.ask_all(message.asked, others, timeout_s)
        self._send(sender, FrontAnswers(message.call_id, replies))

    async def carry_sessions(self, instance: str, within_s: float) -> SessionsCarried:
        """Let front ends move the idle sessions of an instance that drains; their report."""
        order = CarrySessions(instance, within_s)
        timeout_s = within_s + LATE_S
        orders: dict[bytes, FrontAsked] = dict.fromkeys(self._fronts, order)
        if len(orders) > 1:  # a session that several have served is the last one's
            replies = await self._questions.ask_all(FindSession(), self._fronts, LATE_S)
            owners: defaultdict[str, list[int]] = defaultdict(list)
            found = {name: one for name, one in replies.items() if isinstance(one, SessionsFound)}
            for owner, front in latest_fronts(found).items():
                owners[front].append(owner)
            orders = {
                front.encode(): msgspec.structs.replace(order, owners=tuple(its))
                for front, its in owners.items()
            }
        replies = await self._questions.ask_each(orders, timeout_s)
        return add_reports(one for one in replies.values() if isinstance(one, SessionsCarried))

    async def _tell_refusals(self) -> None:
        told = self._refused()
        while True:
            await asyncio.sleep(TELL_S)
            now = self._refused()
            for before, after in zip(told, now, strict=True):
                if after != before:
                    self._tell(after)
            told = now

    def _refused(self) -> list[MessagesRefused]:
        """What the launcher and the scheduler have refused: front ends show it."""
        return [
            MessagesRefused("launcher", self._cluster.refusals.counts()),
            MessagesRefused("scheduler", self._cluster.scheduler_refusals),
        ]

    async def _answer(self, sender: bytes, order: Order) -> None:
        try:
            coming = ""
            if isinstance(order, AddInstances | RestartInstances):
                coming = await self._cluster.look_at_files(order)
            names = self._carry_out(order, coming)
            done = OrderDone(order.call_id, self._cluster.public_names(names))
        except OrderRefused as refused:
            done = OrderDone(order.call_id, (), refused.refusal, str(refused))
        except Exception as error:  # the front end waits for an answer
            log.exception("%s failed", order)
            done = OrderDone(order.call_id, (), "failed", f"the launcher failed: {error!r}")
        self._send(sender, done)

    def _carry_out(self, order: Order, coming: str) -> tuple[str, ...]:
        if why := self._fence.refuse(order.token):
            raise OrderRefused("conflict", why)
        match order:
            case RaiseFence():
                return ()
            case AddInstances():
                return self._cluster.add(order)
            case DrainInstance():
                return self._cluster.drain(order)
            case StopDrain():
                return self._cluster.stop_drain(order)
            case RestartInstances():
                return self._cluster.restart(order, coming)

    def _members(self, members: Sequence[ClusterMember]) -> None:
        if self._open:
            every = [*members, *self._cluster.guests]
            self._tell(Members(every, self._cluster.preferred_weights, unlike=self._cluster.unlike))

    def _tell(self, message: RpcMessage) -> None:
        for sender in list(self._fronts):
            self._send(sender, message)

    def _send(self, sender: bytes, message: RpcMessage) -> bool:
        """Whether the front end is there."""
        try:
            self._server.send(sender, message)
        except TransportError as error:
            log.info("a front end is gone: %s", error)
            self._fronts = [one for one in self._fronts if one != sender]
            self._questions.lose_front(sender)
            return False
        return True
