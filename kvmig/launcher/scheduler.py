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
    ScaleInstances,
)
from kvmig.controlplane.scheduler_process import SchedulerLaunch, serve
from kvmig.core.background import cancel_tasks
from kvmig.core.config import ClusterConfig
from kvmig.core.errors import PeerError, TransportError
from kvmig.process.child import say, send_heartbeats
from kvmig.process.child_main import run_child
from kvmig.process.kept_child import KeptChild
from kvmig.process.shown_logs import log_to_stderr
from kvmig.process.supervisor import STOP_S, ChildProcess, running
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
        kept = KeptChild(
            "the scheduler",
            self._begin,
            SCHEDULER_TIMEOUT_S,
            follow=self._follow,
            again="serving goes on without migrations until it starts again",
        )
        try:
            await kept.keep()
        finally:
            await kept.stop(STOP_S)

    async def _begin(self, heartbeat: int) -> ChildProcess:
        """Start a scheduler's process. Raises StartupError."""
        launch = SchedulerLaunch(self._secret, self._config, heartbeat)
        title = f"of {self._cluster.whose}" if self._cluster.whose else ""
        spawn = running("kvmig.launcher.scheduler", os.environ, [heartbeat], title)
        return await ChildProcess.start("scheduler", spawn, launch)

    async def _follow(self, endpoint: str) -> str:
        """Do what the scheduler decides; how its connection ended.

        A scheduler that lives without a connection knows no new instance: another one is better.
        """
        link = self._link = RpcClient(
            endpoint,
            self._secret,
            "launcher",
            "launcher",
            ClusterMessage,
            refusals=self._cluster.refusals,
        )
        self._tell(self._cluster.members())
        try:
            async for message, _ in link.messages("the scheduler"):
                match message:
                    case ScaleInstances():
                        self._cluster.scale(message)
                    case MessagesRefused():
                        self._cluster.scheduler_refusals = message.counts
        except TransportError as error:
            await asyncio.sleep(GRACE_S)
            return str(error)
        finally:
            link.close()
            self._link = None
            self._cluster.scheduler_refusals = {}
        raise AssertionError("a connection ends with an error")

    def _tell(self, members: Sequence[ClusterMember]) -> None:
        if self._link is None:
            return
        try:
            self._link.send(Members([one for one in members if one.state != "failed"]))
        except (TransportError, PeerError) as error:
            log.warning("the scheduler did not receive the instances: %s", error)


async def run(launch: SchedulerLaunch, descriptor: int) -> None:
    """Schedule until the launcher wants an end, with signs of life. Raises KvmigError."""
    if launch.heartbeat < 0:
        return await serve(launch, descriptor)
    beating = asyncio.create_task(send_heartbeats(launch.heartbeat), name="heartbeats")
    try:
        await serve(launch, descriptor)
    finally:
        await cancel_tasks(beating)


def main(argv: Sequence[str]) -> int:
    """Launch document on stdin, readiness on the file descriptor that is the last word."""
    log_to_stderr("%(asctime)s scheduler %(levelname)s %(message)s")
    form = "kvmig.launcher.scheduler [TITLE] DESCRIPTOR"
    return run_child(argv[1:], form, SchedulerLaunch, _run, report=_say_failure)


def _run(launch: SchedulerLaunch, announced: int) -> None:
    asyncio.run(run(launch, announced))


def _say_failure(_: int, error: Exception) -> None:
    say(str(error), "kvmig scheduler")


if __name__ == "__main__":
    sys.exit(main(sys.argv))
