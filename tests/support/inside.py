"""What tests must see, or drive, inside of kvmig's objects: the one place that knows their private
names (`tests/house/test_private_names.py`)."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import zmq.asyncio

from kvmig.controlplane.dispatch import DispatchPolicy
from kvmig.controlplane.fronts import FrontendRegistry, OwnershipTable
from kvmig.controlplane.llumlet import Llumlet
from kvmig.controlplane.messages import LoadReport, PairedDestination
from kvmig.controlplane.migration_host import MigrationHost
from kvmig.controlplane.reporter import LoadReporter
from kvmig.engines.base import ServingEngine
from kvmig.fleet.orders import CheckFlags, DeployedPrograms, News, Order, StartDeployment, encode
from kvmig.fleet.settings import FleetSettings
from kvmig.fleet.supervisor import FleetSupervisor, running
from kvmig.frontend.launcher_link import LauncherLink
from kvmig.frontend.metrics import MetricsExposition
from kvmig.frontend.openai.generation import RequestQueues
from kvmig.frontend.requests import RequestTable
from kvmig.frontend.router import FrontendRouter
from kvmig.frontend.streams import RequestStreams
from kvmig.kernels import driver, select
from kvmig.kvtransfer.migrations import MigrationSessions
from kvmig.kvtransfer.source import SourceSession
from kvmig.launcher.cluster import InstanceManager
from kvmig.launcher.control import ControlServer
from kvmig.launcher.fork_servers import ForkServers
from kvmig.launcher.instance import ManagedInstance
from kvmig.launcher.local import LocalLlumlet
from kvmig.launcher.ray_launcher import LlumletActor
from kvmig.migrator import SyncMigrator
from kvmig.process.fork_server import ForkServerClient, ForkServerPool
from kvmig.process.kept_child import KeptChild
from kvmig.rpc.messages import RpcMessage
from kvmig.rpc.zmq_sockets import RpcClient, RpcServer
from kvmig.sharing.step_scheduler import StepScheduler


def socket_of(end: RpcClient | RpcServer) -> zmq.asyncio.Socket:
    """Its socket takes what no message is."""
    return end._socket


def spread_pauses(streams: RequestStreams) -> int:
    """Count the pauses that are being spread."""
    return len(streams._spreads)


def table_of(router: FrontendRouter) -> RequestTable:
    """The router's live requests."""
    return router._table


def streams_of(router: FrontendRouter) -> RequestStreams:
    return router._streams


def look_at_readers(router: FrontendRouter) -> None:
    """Do what the router does from time to time."""
    router._look()


def open_queues(queues: RequestQueues) -> list[asyncio.Queue[Any]]:
    """The queues of requests whose clients have not got all."""
    return list(queues._queues.values())


def dispatch_by(router: FrontendRouter, policy: DispatchPolicy) -> None:
    """Send new runs where this policy wants them from now on."""
    router.fleet._dispatch = policy


def instance_of(cluster: InstanceManager, name: str) -> ManagedInstance:
    """What the launcher knows of an instance."""
    return cluster._instances[name]


def report_of(instance: ManagedInstance) -> LoadReport | None:
    """The last report of an instance to its launcher; None: it isn't connected."""
    return None if instance._link is None else instance._link.report


def client_of(link: LauncherLink) -> RpcClient | None:
    """The socket of a front end's link to its launcher, while there is one."""
    return link._client


def tell_front_ends(control: ControlServer, message: RpcMessage) -> None:
    """Send a launcher's front ends a message, whichever it is."""
    control._tell(message)


def fork_servers_of(pool: ForkServerPool) -> list[ForkServerClient]:
    """The pool's fork servers, the newest last."""
    return pool._servers


def process_of(server: ForkServerClient) -> subprocess.Popen[bytes] | None:
    return server._process


def add_nursery(servers: ForkServers, engine: str, process: object) -> None:
    """Let `servers` own a process that is made up."""
    servers._processes[engine] = process  # type: ignore[assignment]


def forget_driver() -> None:
    """Let the next use of CUDA's driver look for it again."""
    driver._initialised.cache_clear()


def forget_kernels() -> None:
    """Let the next use of the kernels choose a backend again."""
    select._chosen.cache_clear()


def await_arrivals(core: Any) -> None:
    """Wait before a step as the engine does."""
    core._await_arrivals()


def undecided_strangers(server: RpcServer) -> tuple[int, int]:
    """Connections whose handshakes are not over: those that are young, and those that are counted
    later."""
    handshakes = server._handshakes._handshakes
    return len(handshakes._young), handshakes._undecided


def makes_text_for_all(exposition: MetricsExposition) -> bool:
    """Whether a text of the metrics is being made, and none is waited for behind it."""
    return exposition._making.locked() and exposition._next is None


def departures(migrations: MigrationSessions) -> dict[str, SourceSession]:
    """The migrations out of an instance, by their ids."""
    return migrations._departures


def running_steps(turns: StepScheduler) -> list[Any]:
    """The grants of steps that run now."""
    return list(turns._running.values())


def give_memory_back(engine: Any) -> None:
    """The step of parking vLLM's engine after which its KV memory is gone."""
    engine._parking._give_back()


@contextmanager
def other_weights(engine: Any) -> Iterator[None]:
    """For a while vLLM's engine says that it has others."""
    before, engine._weights = engine._weights, "others"
    try:
        yield
    finally:
        engine._weights = before


def media_loading() -> Any:
    """The state of vLLM's media in this process; its `room` may be replaced."""
    from kvmig.frontend.openai.vllm import media

    return media._loading


@dataclass(frozen=True)
class LlumletParts:
    """What a llumlet is made of."""

    engine: ServingEngine
    server: RpcServer
    fronts: FrontendRegistry
    tracking: OwnershipTable
    host: MigrationHost
    reporter: LoadReporter
    overrun: set[bytes]
    """Connections of front ends that have not read their messages in time."""


def parts_of(llumlet: Llumlet) -> LlumletParts:
    return LlumletParts(
        llumlet._engine, llumlet._server, llumlet._fronts, llumlet._tracking, llumlet._host,
        llumlet._reporter, llumlet._overrun,
    )  # fmt: skip


def hear_from(llumlet: Llumlet, identity: bytes, message: RpcMessage) -> None:
    """Take a message as from this connection, which there need not be."""
    llumlet._handle(identity, message, [])


async def carry_out_pairing(llumlet: Llumlet, request_id: str, pair: PairedDestination) -> None:
    """Move a request as the scheduler orders it."""
    await llumlet._migrate(request_id, pair)


def put_out_nothing(llumlet: Llumlet, client: int) -> None:
    """Take a step's outputs without a token."""
    llumlet._on_outputs(client, [], [])


def report_every(reporter: LoadReporter, seconds: float) -> None:
    """Have reports without news come that seldom."""
    reporter._report_s = seconds


class OwnSupervisor(FleetSupervisor):
    """A fleet's supervisor without its server, in whose place a test gives orders."""

    def __init__(self, settings: FleetSettings, sock: socket.socket) -> None:
        super().__init__(settings, sock)
        self.news: list[News] = []
        """What the server would get."""

    def _tell(self, news: News) -> None:
        self.news.append(news)

    def lead(self) -> None:
        """Be as after the server's start."""
        self._serves = True

    def carry_out(self, order: Order) -> None:
        """Take it as from the server."""
        self._hear(encode(order))

    async def check(self, order: CheckFlags) -> None:
        """Read the flags of a deployment; the answer is in `news`."""
        await self._check(order)

    async def deploy(self, start: StartDeployment) -> None:
        """Run a deployment from its start to its end."""
        await self._deploy(start)

    async def load_forks(self) -> None:
        """Have the fork server of the server and the proxies."""
        await self._own_forks().loaded()

    async def close_forks(self) -> None:
        """End all fork servers."""
        await self._engine_forks.close()
        self._own_forks().close()

    def never_forks(self, engine: str, why: str) -> None:
        """Do what the first order would, once the engine is loaded and can't be forked."""
        self._engine_forks._never[engine] = why

    def deployed(self) -> DeployedPrograms:
        """Return what the next server would get first."""
        return running(self._deployments.values())

    async def end(self) -> None:
        """End all that it has started; it has no server."""
        await self._end([], KeptChild("the server", self._begin_server, 0.0))


def loop_of(migrator: SyncMigrator) -> asyncio.AbstractEventLoop:
    """The event loop of a migrator's thread."""
    return migrator._loop


def end_loop(migrator: SyncMigrator) -> None:
    """End the migrator's thread, once its migrations are over."""
    migrator._end_loop()


def fork_server_process(servers: ForkServers, engine: str) -> asyncio.subprocess.Process:
    """The process that has loaded an engine, or failed to."""
    return servers._processes[engine]


def child_of(actor: LlumletActor) -> LocalLlumlet:
    """Return what the actor has started."""
    return actor._started()
