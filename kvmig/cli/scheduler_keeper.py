"""The scheduler's process: started again whenever it dies, told of members, heard."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence

from kvmig.cli.children import Child, running
from kvmig.cli.cluster import Cluster
from kvmig.cli.instance import first_of
from kvmig.controlplane.child import Restarts
from kvmig.controlplane.messages import ClusterMessage, Member, Members, MessagesRefused, Scale
from kvmig.controlplane.scheduler_process import SchedulerLaunch
from kvmig.ground.config import ClusterConfig
from kvmig.ground.errors import KvmigError, PeerError, StartupError, TransportError
from kvmig.kvtransfer.link import Client

SCHEDULER_TIMEOUT_S = 30.0
GRACE_S = 1.0
"""From the end of its connection to that of its process, if it has died."""

log = logging.getLogger(__name__)


class SchedulerKeeper:
    """`run` it as a task until it is cancelled."""

    def __init__(self, config: ClusterConfig, secret: bytes, cluster: Cluster) -> None:
        self._config = config
        self._secret = secret
        self._cluster = cluster
        self._link: Client | None = None

    async def run(self) -> None:
        """Keep it running, and do what it decides."""
        self._cluster.on_change.append(self._tell)
        restarts = Restarts()
        while True:
            began = asyncio.get_running_loop().time()
            try:
                await self._live()
            except KvmigError as error:
                log.warning("scheduler: %s; serving goes on without migrations", error)
            except Exception:
                log.exception("scheduler: serving goes on without migrations")
            pause_s = restarts.died(asyncio.get_running_loop().time() - began)
            assert pause_s is not None, "it is never given up"
            await asyncio.sleep(pause_s)

    async def _live(self) -> None:
        """From start to death. Raises StartupError or TransportError saying how it ended."""
        launch = SchedulerLaunch(self._secret, self._config)
        child = await Child.start("scheduler", running("kvmig.cli.scheduler", os.environ), launch)
        hearing: asyncio.Task[str] | None = None
        try:
            endpoint = await child.ready(SCHEDULER_TIMEOUT_S)
            self._cluster.refusals.scheduler = {}
            self._link = Client(
                endpoint,
                self._secret,
                "launcher",
                "launcher",
                ClusterMessage,
                refusals=self._cluster.refusals.own,
            )
            hearing = asyncio.create_task(self._hear(self._link), name="scheduler's decisions")
            self._tell(self._cluster.members())
            # One that lives without a connection knows no new instance: rather another one.
            raise StartupError(await first_of(_ended(child), hearing))
        finally:
            if hearing is not None:
                hearing.cancel()
                await asyncio.gather(hearing, return_exceptions=True)
            if self._link is not None:
                self._link.close()
                self._link = None
            await child.stop()

    async def _hear(self, link: Client) -> str:
        """Do what it decides; how the connection ended."""
        while True:
            try:
                message, _ = await link.recv()
            except PeerError as error:
                log.warning("ignored from the scheduler: %s", error)
                continue
            except TransportError as error:
                await asyncio.sleep(GRACE_S)
                return str(error)
            match message:
                case Scale():
                    self._cluster.scale(message)
                case MessagesRefused():
                    self._cluster.refusals.scheduler = message.counts

    def _tell(self, members: Sequence[Member]) -> None:
        if self._link is None:
            return
        try:
            self._link.send(Members([one for one in members if one.state != "failed"]))
        except (TransportError, PeerError) as error:
            log.warning("the scheduler did not hear of the instances: %s", error)


async def _ended(child: Child) -> str:
    return f"it ended ({await child.ended()})"
