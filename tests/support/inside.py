"""What tests must see, or drive, inside of kvmig's objects: the one place that knows their private
names (`tests/house/test_private_names.py`)."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import zmq.asyncio

from kvmig.controlplane.fronts import FrontendRegistry, OwnershipTable
from kvmig.controlplane.llumlet import Llumlet
from kvmig.controlplane.migration_host import MigrationHost
from kvmig.controlplane.reporter import LoadReporter
from kvmig.engines.base import ServingEngine
from kvmig.fleet.orders import News, Order, Running, encode
from kvmig.fleet.settings import FleetSettings
from kvmig.fleet.supervisor import FleetSupervisor, running
from kvmig.frontend.requests import RequestTable
from kvmig.frontend.router import Router
from kvmig.frontend.streams import RequestStreams
from kvmig.kernels import driver
from kvmig.launcher.local import LocalLlumlet
from kvmig.launcher.ray_launcher import LlumletActor
from kvmig.process.fork_server import ForkServerClient, ForkServerPool
from kvmig.rpc.zmq_sockets import RpcClient, RpcServer
from kvmig.sharing.step_scheduler import StepScheduler


def socket_of(end: RpcClient | RpcServer) -> zmq.asyncio.Socket:
    """Its socket takes what no message is."""
    return end._socket


def spread_pauses(streams: RequestStreams) -> int:
    """Count the pauses that are being spread."""
    return len(streams._spreads)


def table_of(router: Router) -> RequestTable:
    """The router's live requests."""
    return router._table


def streams_of(router: Router) -> RequestStreams:
    return router._streams


def look_at_readers(router: Router) -> None:
    """Do what the router does from time to time."""
    router._look()


def fork_servers_of(pool: ForkServerPool) -> list[ForkServerClient]:
    """The pool's fork servers, the newest last."""
    return pool._servers


def forget_driver() -> None:
    """Let the next use of CUDA's driver look for it again."""
    driver._initialised.cache_clear()


def await_arrivals(core: Any) -> None:
    """Wait before a step as the engine does."""
    core._await_arrivals()


def undecided_strangers(server: RpcServer) -> tuple[int, int]:
    """Connections whose handshakes are not over: those that are young, and those that are counted
    later."""
    handshakes = server._handshakes._handshakes
    return len(handshakes._young), handshakes._undecided


def running_steps(turns: StepScheduler) -> list[Any]:
    """The grants of steps that run now."""
    return list(turns._running.values())


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


def parts_of(llumlet: Llumlet) -> LlumletParts:
    return LlumletParts(
        llumlet._engine, llumlet._server, llumlet._fronts, llumlet._tracking, llumlet._host,
        llumlet._reporter,
    )  # fmt: skip


class OwnSupervisor(FleetSupervisor):
    """A fleet's supervisor without its server, in whose place a test gives orders."""

    def __init__(self, settings: FleetSettings, sock: socket.socket) -> None:
        super().__init__(settings, sock)
        self.news: list[News] = []
        """What the server would get."""

    def _tell(self, news: News) -> None:
        self.news.append(news)

    def carry_out(self, order: Order) -> None:
        """Take it as from the server."""
        self._hear(encode(order))

    def deployed(self) -> Running:
        """Return what the next server would get first."""
        return running(self._deployments.values())

    async def end(self) -> None:
        """End all that it has started."""
        await self._end([])


def child_of(actor: LlumletActor) -> LocalLlumlet:
    """Return what the actor has started."""
    return actor._started()
