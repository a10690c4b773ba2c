"""The scheduler's process, and its keeper in the launcher.

The process is `python -m kvmig.launcher.scheduler [TITLE] DESCRIPTOR`, for the launcher only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvmig.controlplane.messages import (
    ClusterMember,
    ClusterMessage,
    Members,
    MessagesRefused,
    Scale,
)
from kvmig.controlplane.scheduler_process import SchedulerLaunch, serve
from kvmig.core.config import ClusterConfig
from kvmig.core.errors import KvmigError, PeerError, StartupError, TransportError
from kvmig.process.child import say, send_heartbeats
from kvmig.process.child_main import run_child
from kvmig.process.supervisor import (
    HEARTBEAT_TIMEOUT_S,
    ChildProcess,
    HeartbeatPipe,
    deaths_in_a_row,
    first_of,
    hangs,
    restart_pause,
    running,
)
from kvmig.rpc.zmq_sockets import RpcClient

if TYPE_CHECKING:
    from kvmig.launcher.cluster import InstanceManager


SCHEDULER_TIMEOUT_S = 30.0
GRACE_S = 1.0
"""Time from the end of its connection to that of its process, if it has died."""

log = logging.getLogger(__name__)


class SchedulerKeeper:
    """Keeps the scheduler running: `run` it as a task until it is cancelled."""

    def __init__(self, config: ClusterConfig, secret: bytes, cluster: InstanceManager) -> None:
        self._config = config
        self._secret = secret
        self._cluster = cluster
        self._link: RpcClient | None = None

    async def run(self) -> None:
        """Start the scheduler again whenever it dies, and do what it decides."""
        self._cluster.on_change.append(self._tell)
        deaths = 0
        while True:
            began = asyncio.get_running_loop().time()
            try:
                await self._live()
            except KvmigError as error:
                log.warning("scheduler: %s; serving goes on without migrations", error)
            except Exception:
                log.exception("scheduler: serving goes on without migrations")
            deaths = deaths_in_a_row(deaths, asyncio.get_running_loop().time() - began)
            await asyncio.sleep(restart_pause(deaths))

    async def _live(self) -> None:
        """Run the scheduler until its death. Raises StartupError or TransportError with its end."""
        heartbeats = HeartbeatPipe()
        try:
            await self._live_with(heartbeats)
        finally:
            heartbeats.close()

    async def _live_with(self, heartbeats: HeartbeatPipe) -> None:
        launch = SchedulerLaunch(self._secret, self._config, heartbeats.descriptor)
        title = f"of {self._cluster.whose}" if self._cluster.whose else ""
        spawn = running("kvmig.launcher.scheduler", os.environ, [heartbeats.descriptor], title)
        child = await ChildProcess.start("scheduler", spawn, launch)
        hearing: asyncio.Task[str] | None = None
        try:
            endpoint = await child.ready(SCHEDULER_TIMEOUT_S)
            self._link = RpcClient(
                endpoint,
                self._secret,
                "launcher",
                "launcher",
                ClusterMessage,
                refusals=self._cluster.refusals,
            )
            hearing = asyncio.create_task(self._hear(self._link), name="scheduler's decisions")
            self._tell(self._cluster.members())
            # One that lives without a connection knows no new instance: rather another one.
            raise StartupError(await first_of(_ended(child), hearing, _hangs(heartbeats)))
        finally:
            if hearing is not None:
                hearing.cancel()
                await asyncio.gather(hearing, return_exceptions=True)
            if self._link is not None:
                self._link.close()
                self._link = None
            self._cluster.scheduler_refusals = {}
            await child.stop()

    async def _hear(self, link: RpcClient) -> str:
        """Do what it decides; how the connection ended."""
        try:
            async for message, _ in link.messages("the scheduler"):
                match message:
                    case Scale():
                        self._cluster.scale(message)
                    case MessagesRefused():
                        self._cluster.scheduler_refusals = message.counts
        except TransportError as error:
            await asyncio.sleep(GRACE_S)
            return str(error)
        raise AssertionError("a connection ends with an error")

    def _tell(self, members: Sequence[ClusterMember]) -> None:
        if self._link is None:
            return
        try:
            self._link.send(Members([one for one in members if one.state != "failed"]))
        except (TransportError, PeerError) as error:
            log.warning("the scheduler did not hear of the instances: %s", error)


async def _ended(child: ChildProcess) -> str:
    return f"it ended ({await child.ended()})"


async def _hangs(heartbeats: HeartbeatPipe) -> str:
    return f"it hangs ({await hangs(heartbeats, HEARTBEAT_TIMEOUT_S, from_first=True)})"


async def run(launch: SchedulerLaunch, descriptor: int) -> None:
    """Schedule until the launcher wants an end, with signs of life. Raises KvmigError."""
    if launch.heartbeat < 0:
        return await serve(launch, descriptor)
    beating = asyncio.create_task(send_heartbeats(launch.heartbeat), name="heartbeats")
    try:
        await serve(launch, descriptor)
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


def main(argv: Sequence[str]) -> int:
    """Launch document on stdin, readiness on the file descriptor that is the last word."""
    logging.basicConfig(format="%(asctime)s scheduler %(levelname)s %(message)s")
    form = "kvmig.launcher.scheduler [TITLE] DESCRIPTOR"
    return run_child(argv[1:], form, SchedulerLaunch, _run, report=_say_failure)


def _run(launch: SchedulerLaunch, announced: int) -> None:
    asyncio.run(run(launch, announced))


def _say_failure(_: int, error: Exception) -> None:
    say(str(error), "kvmig scheduler")


if __name__ == "__main__":
    sys.exit(main(sys.argv))
