"""`python -m bench.load.serve ADDRESS MODEL ...`: kvmig.serve, whose instances are stubs.

Launcher, scheduler and front ends are kvmig's own; the instances live in the process that
listens at ADDRESS (`bench.load.host`).
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Sequence

import uvloop

from bench.load.orders import Orders, Start, Started
from kvmig.engines.registry import kind_of
from kvmig.launcher import flags as kvmig_flags
from kvmig.launcher.cluster import InstanceManager
from kvmig.launcher.front_ends import FrontLaunch
from kvmig.launcher.launch import LlumletLaunch, PlannedInstance
from kvmig.launcher.shapes import InstanceShapes, shapes_of
from kvmig.process.child import leave, quiet
from kvmig.process.supervisor import STOP_S, ProcessHandle
from kvmig.serve import ClusterServer, listening


class StubHandle:
    """An instance in the stubs' process, which the benchmark ends."""

    pid = 0

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    async def ready(self, timeout_s: float) -> str:
        return self._endpoint

    async def ended(self) -> str:
        await asyncio.Event().wait()
        return "never"

    async def stop(self, timeout_s: float = STOP_S) -> None:
        """The benchmark does."""


class StubLauncher:
    """Implements `Launcher`."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders

    async def open(self) -> None:
        """Nothing to check."""

    async def llumlet(self, launch: LlumletLaunch, workers: int) -> ProcessHandle:
        started = self._orders.give(Start(launch))
        assert isinstance(started, Started)
        return StubHandle(started.endpoint)

    def check_room(self, instances: Sequence[PlannedInstance], gpus: Sequence[str]) -> None:
        """Takes any."""

    def renew(self, tree: str) -> None:
        """See `Launcher`."""

    async def renewed(self) -> None:
        """At once."""

    async def close(self) -> None:
        self._orders.close()


def main(argv: list[str]) -> int:
    address, *rest = argv
    quiet("kvmig")
    config, rest, _ = kvmig_flags.parse(rest)
    kind = kind_of(config.engine)
    kind.prepare()
    args = kind.parse(rest)
    planned = shapes_of(args, rest, {}, config.instances, kind.parse)
    shapes = InstanceShapes(rest, {}, planned, 0, kind.parse)
    with listening(config.http.uds, args) as sock:
        launcher = StubLauncher(Orders(address))
        name, secret = secrets.token_hex(4), secrets.token_bytes(32)
        cluster = InstanceManager(name, config, secret, shapes, launcher)
        front = FrontLaunch(
            name="front-0", launcher="", secret=secret, config=config, engine_argv=rest
        )
        return uvloop.run(ClusterServer(cluster, front, args, sock).run())


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
