"""How soon a scheduler that starts decides: a part of `bench.faults`."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time

from kvmig.controlplane.messages import ClusterMember, ClusterMessage, LoadReport, Members, Pairs
from kvmig.controlplane.scheduler_process import SchedulerLaunch
from kvmig.core.config import ClusterConfig
from kvmig.core.errors import TransportError
from kvmig.engines.base import EngineLoad
from kvmig.process.supervisor import ChildProcess, running
from kvmig.rpc.zmq_sockets import RpcClient, RpcServer

INSTANCES = 16
REPORT_S = 0.05
CROWDED, ROOMY = EngineLoad(100, 97, 9, 0, 0, 0), EngineLoad(100, 10, 1, 0, 0, 0)
START_S = 60.0


async def seconds_to_first_pair() -> float:
    """From telling a scheduler of its members to the first source that is told to move."""
    secret = secrets.token_bytes(16)
    servers = [
        RpcServer(secret, "llumlet", f"i{number}", ClusterMessage) for number in range(INSTANCES)
    ]
    paired: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    playing = [
        asyncio.create_task(_play(f"i{number}", server, ROOMY if number % 2 else CROWDED, paired))
        for number, server in enumerate(servers)
    ]
    launch = SchedulerLaunch(secret, ClusterConfig(instances=INSTANCES))
    child = await ChildProcess.start("scheduler", running("kvmig.launcher.scheduler", {}), launch)
    try:
        endpoint = await child.ready(START_S)
        client = RpcClient(endpoint, secret, "launcher", "launcher", ClusterMessage)
        members = [
            ClusterMember(f"i{number}", server.endpoint, "serving")
            for number, server in enumerate(servers)
        ]
        began = time.monotonic()
        client.send(Members(members))
        seconds = await asyncio.wait_for(paired, START_S) - began
        client.close()
        return seconds
    finally:
        await child.stop()
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
        for server in servers:
            server.close()


async def _play(
    name: str, server: RpcServer, load: EngineLoad, paired: asyncio.Future[float]
) -> None:
    """A llumlet without an engine: reports to whoever says hello."""
    listener, hello = b"", asyncio.Event()

    async def hear() -> None:
        nonlocal listener
        while True:
            listener, message, _ = await server.recv()
            hello.set()
            if isinstance(message, Pairs) and message.pairs and not paired.done():
                paired.set_result(time.monotonic())

    hearing = asyncio.create_task(hear())
    try:
        await hello.wait()
        seq = 0
        while True:
            seq += 1
            with contextlib.suppress(TransportError):
                server.send(listener, LoadReport(name, seq, load, 0, 0))
            await asyncio.sleep(REPORT_S)
    finally:
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
