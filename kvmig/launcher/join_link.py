"""A server that joins others: its launcher's connection to the scheduler that they have in common.

The launcher names its instances to the scheduler, and the scheduler names to it those of other
servers that can take its requests. When the scheduler is gone, what it named last still holds: the
server serves on, and joins again once the scheduler is back.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvmig.controlplane.messages import (
    ClusterMember,
    ClusterMessage,
    EvacuateInstance,
    Members,
    MessagesRefused,
)
from kvmig.core.background import cancel_tasks, keep_running
from kvmig.core.config import JOIN, JoinConfig
from kvmig.core.errors import ConfigError, PeerError, StartupError, TransportError
from kvmig.core.secret import SECRET
from kvmig.process.child import say
from kvmig.rpc.messages import RpcMessage
from kvmig.rpc.zmq_sockets import RpcClient

if TYPE_CHECKING:
    from kvmig.launcher.cluster import InstanceManager

FORM = "tcp://HOST:PORT or unix:PATH"
RETRY_S = 0.5
"""Pause between two attempts to connect."""
ANSWER_S = 5.0
"""Time for the scheduler's first answer: longer than it gathers servers after its start."""

log = logging.getLogger(__name__)


def endpoint_of(where: str, text: str) -> str:
    """The endpoint of "tcp://HOST:PORT" or "unix:PATH", as sockets take it. Raises ConfigError.

    where: the variable or flag that has it.
    """
    if text.startswith("unix:") and len(text) > len("unix:"):
        return f"ipc://{Path(text.removeprefix('unix:')).absolute()}"
    try:
        parts = urlsplit(text)
        if parts.scheme == "tcp" and parts.hostname and parts.port and not parts.path:
            return text
    except ValueError:
        pass  # such as of a port that is no number
    raise ConfigError(f"{where} is {text!r:.200}, must be {FORM}")


def join_of(environment: Mapping[str, str]) -> JoinConfig | None:
    """The scheduler that the environment names; None: it names none. Raises ConfigError."""
    if not (text := environment.get(JOIN, "")):
        return None
    endpoint = endpoint_of(JOIN, text)
    if not environment.get(SECRET, ""):
        raise ConfigError(
            f"{JOIN} is {text!r:.200}, and {SECRET} is not set: servers that join one scheduler"
            " have one secret"
        )
    return JoinConfig(scheduler=endpoint, server=secrets.token_hex(4))


def address_towards(endpoint: str) -> str:
    """The address of this host at which others reach it that are reached as the endpoint is.

    Raises ConfigError where the endpoint's host isn't known.
    """
    host, port = urlsplit(endpoint).hostname, urlsplit(endpoint).port
    if not endpoint.startswith("tcp://"):
        return "127.0.0.1"
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            own: str = probe.getsockname()[0]
            return own
    except OSError as error:
        raise ConfigError(
            f"{JOIN} is {endpoint!r:.200}, whose host can't be used: {error}"
        ) from error


class JoinLink:
    """The connection to the scheduler of several servers: `check`, then `open`, then `close` it.

    Make it inside a running event loop.

    whose: model and address of this server, by which people know it at the others.
    """

    def __init__(
        self, join: JoinConfig, secret: bytes, whose: str, cluster: InstanceManager
    ) -> None:
        self._join = join
        self._secret = secret
        self._whose = whose
        self._cluster = cluster
        self._client: RpcClient | None = None
        self._unlike: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    async def check(self) -> None:
        """Ask the scheduler whether it lets this server in. Raises StartupError if it doesn't.

        One that can't be reached is no reason not to serve.
        """
        client = self._connect()
        try:
            client.send(Members([], server=self._whose))
            async with asyncio.timeout(ANSWER_S):
                await client.recv()
        except PeerError as error:
            raise StartupError(f"{JOIN}: {error}") from error
        except (TransportError, TimeoutError) as error:
            if not client.reached or isinstance(error, TimeoutError):
                say(
                    f"the scheduler at {client.endpoint} does not answer: this server serves, and"
                    " joins once it does"
                )
                return
            raise StartupError(
                f"the scheduler at {client.endpoint} ({JOIN}) does not let this server in: its"
                f" {SECRET} is another one"
            ) from error
        finally:
            client.close()

    def open(self) -> None:
        """Join: the instances are ready."""
        self._cluster.on_change.append(self._tell)
        self._cluster.on_evacuate.append(self._forward)
        running = keep_running(self._run, "link to the common scheduler", RETRY_S)
        self._task = asyncio.create_task(running, name="link to the common scheduler")

    async def close(self) -> None:
        """Disconnect."""
        await cancel_tasks(self._task)

    def _connect(self) -> RpcClient:
        return RpcClient(
            self._join.scheduler,
            self._secret,
            "launcher",
            self._join.server,
            ClusterMessage,
            refusals=self._cluster.refusals,
        )

    async def _run(self) -> None:
        missed = False
        while True:
            client = self._client = self._connect()
            joined = False
            try:
                self._tell(self._cluster.members())
                async for message, _ in client.messages("the common scheduler"):
                    if not joined:
                        say(f"joined the scheduler at {client.endpoint}")
                    joined = True
                    self._take(message)
            except TransportError as error:
                if joined or not missed:  # once is enough until it is back
                    say(f"the common scheduler is lost, serving goes on: {error}")
                missed = True
            finally:
                self._client = None
                client.close()
            await asyncio.sleep(RETRY_S)

    def _take(self, message: RpcMessage) -> None:
        match message:
            case Members():
                for server, why in message.unlike.items():
                    if self._unlike.get(server) != why:
                        say(f"requests don't move between here and {server}: {why}")
                self._unlike = message.unlike
                self._cluster.set_guests(message.members, message.unlike)
            case EvacuateInstance():
                self._cluster.tell_evacuation(message)
            case MessagesRefused():
                self._cluster.scheduler_refusals = message.counts
            case _:
                log.warning("the common scheduler sent %s", type(message).__name__)

    def _tell(self, members: Sequence[ClusterMember]) -> None:
        self._send(Members([one for one in members if one.state != "failed"], server=self._whose))

    def _forward(self, order: EvacuateInstance) -> None:
        if any(one.instance == order.instance for one in self._cluster.members()):
            self._send(order)

    def _send(self, message: Members | EvacuateInstance) -> None:
        if self._client is None:
            return
        try:
            self._client.send(message)
        except (TransportError, PeerError) as error:
            log.warning("the common scheduler did not get %s: %s", type(message).__name__, error)
