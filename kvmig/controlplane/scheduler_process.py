"""The scheduler as a process: load reports in, pairs and scaling out, a round every `interval_ms`.

Every llumlet has a connection and a task of its own and nothing is ever waited for in
a round, so one that hangs or is gone delays none.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
import zmq

from kvmig.controlplane.joined_servers import JoinedServers
from kvmig.controlplane.messages import (
    ClusterMember,
    ClusterMessage,
    EvacuateInstance,
    LoadReport,
    Members,
    MessagesRefused,
    ScaleInstances,
)
from kvmig.controlplane.policy import policy_of
from kvmig.controlplane.scaling import InstanceScaler, ScaleIn, ScaleOut
from kvmig.controlplane.scheduler import RoundScheduler
from kvmig.controlplane.view import ClusterView, ViewBuilder
from kvmig.core.clock import monotonic
from kvmig.core.config import ClusterConfig
from kvmig.core.errors import PeerError, StartupError, TransportError
from kvmig.core.secret import SecretStruct
from kvmig.process.child import announce, until_stopped
from kvmig.rpc.messages import Hello
from kvmig.rpc.zmq_sockets import RpcClient, RpcServer

log = logging.getLogger(__name__)

NAME = "scheduler"
RETRY_S = 0.5
"""Pause before a lost llumlet is connected to again."""
TELL_S = 1.0
"""Pause between two reports of refusals, and of the members to servers that have joined."""
GATHER_S = 2.0
"""Time from the start until joined servers learn of each other: in it all come back that lost an
earlier scheduler, and none takes another one for gone."""


class SchedulerLaunch(SecretStruct, frozen=True):
    """The launcher's document for the scheduler's stdin (JSON; the secret in base64)."""

    secret: bytes
    config: ClusterConfig
    heartbeat: int = -1
    """Descriptor for `kvmig.process.child.send_heartbeats`; -1: none is wanted."""
    listen: str = ""
    """Endpoint for the servers that join; empty: any port of the config's control host."""


class SchedulerReady(msgspec.Struct, frozen=True):
    """The scheduler's announcement: where it takes Members."""

    endpoint: str


class SchedulerProcess:
    """Make, run and close it inside one event loop."""

    def __init__(self, launch: SchedulerLaunch) -> None:
        """Binds the scheduler's socket. Raises StartupError if it can't."""
        config = launch.config
        self._secret = launch.secret
        self._round_s = config.scheduler.interval_ms / 1000
        policy = policy_of(config.scheduler)
        self._scheduler = RoundScheduler(policy.rounds)
        self._scaler = InstanceScaler(config.scaling) if config.scaling is not None else None
        self._servers = JoinedServers()
        self._gathered = monotonic() + GATHER_S
        self._builder = ViewBuilder(
            stale_after_s=max(1.0, 4 * config.heartbeat_interval_ms / 1000),
            headroom=policy.headroom,
        )
        self._clients: dict[str, RpcClient] = {}
        self._following: dict[ClusterMember, asyncio.Task[None]] = {}
        try:
            self._server = RpcServer(
                launch.secret,
                "scheduler",
                NAME,
                ClusterMessage,
                host=config.control_host,
                endpoint=launch.listen,
            )
        except (zmq.ZMQError, ValueError) as error:
            at = launch.listen or config.control_host
            raise StartupError(f"scheduler on {at}: {error}") from error

    @property
    def endpoint(self) -> str:
        """The endpoint for the launcher."""
        return self._server.endpoint

    def close(self) -> None:
        """Unbind; call after `run` has ended."""
        self._server.close()

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as group:
            if self._scheduler.rebalances or self._scaler is not None:
                group.create_task(self._rounds())
            group.create_task(self._tell_refusals())
            group.create_task(self._tell_members(group))
            async for sender, message, _ in self._server.messages():
                if isinstance(message, Members):
                    if self._servers.put(sender, message):
                        log.info("server %s has joined", message.server)
                    self._take(group)
                    self._tell_others()
                elif isinstance(message, EvacuateInstance):
                    self._forward(sender, message)
                elif not isinstance(message, Hello):
                    name = type(message).__name__
                    self._server.refusals.count(PeerError(f"{name} isn't for a scheduler"))
                    log.warning("%r sent %s", sender, name)

    def _take(self, group: asyncio.TaskGroup) -> None:
        members = self._servers.members()
        self._builder.members(members)
        # Those that start have no endpoint yet, but count as room that comes.
        wanted = {ClusterMember(one.instance, one.endpoint) for one in members if one.endpoint}
        for gone in self._following.keys() - wanted:
            self._following.pop(gone).cancel()
        for member in wanted - self._following.keys():
            self._following[member] = group.create_task(self._follow(member))

    async def _follow(self, member: ClusterMember) -> None:
        """Take one llumlet's reports in, connecting again whenever it is lost."""
        complain = log.warning
        while True:
            client = RpcClient(
                member.endpoint,
                self._secret,
                "scheduler",
                NAME,
                ClusterMessage,
                refusals=self._server.refusals,
            )
            self._clients[member.instance] = client
            try:
                async for message, _ in client.messages(client.endpoint):
                    if isinstance(message, LoadReport):
                        self._servers.learn(message)
                        self._builder.report(self._servers.told_apart(message), monotonic())
            except TransportError as error:
                complain("llumlet %s: %s", member.instance, error)
                complain = log.debug  # once is enough until the launcher removes it
                self._builder.join(member)  # what comes back may be a new start of it
            finally:
                if self._clients.get(member.instance) is client:
                    del self._clients[member.instance]
                client.close()
            await asyncio.sleep(RETRY_S)

    async def _rounds(self) -> None:
        while True:
            await asyncio.sleep(self._round_s)
            view = self._builder.view(monotonic())
            self._scale(view)
            for instance, pairs in self._scheduler.round(view):
                client = self._clients.get(instance)
                if client is None:
                    continue
                try:
                    client.send(pairs)
                except TransportError as error:
                    log.warning("no pairs for llumlet %s: %s", instance, error)

    async def _tell_refusals(self) -> None:
        told: dict[str, int] = {}
        while True:
            await asyncio.sleep(TELL_S)
            counts = self._server.refusals.counts()
            if counts == told or not self._servers.launchers:
                continue
            try:
                for launcher in self._servers.launchers:
                    self._server.send(launcher, MessagesRefused(NAME, counts))
                told = counts
            except TransportError as error:
                log.warning("the launcher did not receive the list of refused messages: %s", error)

    # -- servers that have joined

    async def _tell_members(self, group: asyncio.TaskGroup) -> None:
        while True:
            await asyncio.sleep(TELL_S)
            if self._tell_others():
                self._take(group)

    def _tell_others(self) -> bool:
        """Send each joined server the others' instances; whether one turned out to be gone."""
        if monotonic() < self._gathered:
            return False
        gone = [
            sender
            for sender in self._servers.joined
            if not self._reaches(sender, self._servers.others_of(sender))
        ]
        for sender in gone:
            if server := self._servers.drop(sender):
                log.info("server %s is gone", server)
        return bool(gone)

    def _forward(self, sender: bytes, order: EvacuateInstance) -> None:
        """A drain has taken too long: requests of the other servers' clients go on elsewhere, too.
        A server that is gone has none."""
        for other in self._servers.joined:
            if other != sender:
                self._reaches(other, order)

    def _reaches(self, sender: bytes, message: Members | EvacuateInstance) -> bool:
        """Send a message; returns whether the server is there."""
        try:
            self._server.send(sender, message)
        except TransportError as error:
            log.info("%s", error)
            return False
        return True

    def _scale(self, view: ClusterView) -> None:
        """Order more or fewer instances of the launcher."""
        if self._scaler is None or not view.instances:
            return
        match self._scaler.decide(view):
            case None:
                return
            case ScaleOut(count):
                order = ScaleInstances(add=count)
            case ScaleIn(instance):
                order = ScaleInstances(drain=instance)
        try:
            for launcher in self._servers.launchers:
                self._server.send(launcher, order)
        except TransportError as error:
            log.warning("the launcher did not receive %s: %s", order, error)


async def serve(launch: SchedulerLaunch, descriptor: int) -> None:
    """Run until SIGTERM or the launcher's end, announced on `descriptor`."""
    scheduler = SchedulerProcess(launch)
    running = asyncio.ensure_future(scheduler.run())
    stopped = asyncio.ensure_future(until_stopped())
    try:
        announce(descriptor, SchedulerReady(scheduler.endpoint))
        await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        running.cancel()
        outcomes = await asyncio.gather(running, stopped, return_exceptions=True)
        scheduler.close()
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
