"""`python -m kvmig.scheduler`: the scheduler of several servers, which join it by KVMIG_JOIN."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence

from kvmig.controlplane.scheduler_process import SchedulerLaunch, SchedulerProcess
from kvmig.core.background import cancel_tasks
from kvmig.core.config import JOIN, POLICIES, ClusterConfig, SchedulerConfig, check
from kvmig.core.errors import ConfigError, KvmigError
from kvmig.core.secret import SECRET
from kvmig.launcher.environment import cluster_secret
from kvmig.launcher.join_link import FORM, endpoint_of
from kvmig.process.child import leave, say

PROGRAM = "kvmig scheduler"


def main(argv: Sequence[str]) -> int:
    """Exit code 0 after a signal, 2 for what is wrong before it schedules."""
    logging.basicConfig(format=f"{PROGRAM}: %(message)s", level=logging.INFO)
    try:
        launch = read_flags(argv)
        asyncio.run(schedule(launch))
    except KvmigError as error:
        say(str(error), PROGRAM)
        return 2
    return 0


def read_flags(argv: Sequence[str]) -> SchedulerLaunch:
    """What the flags and the environment ask for. Raises ConfigError."""
    usual = SchedulerConfig()
    parser = argparse.ArgumentParser(
        prog="python -m kvmig.scheduler",
        allow_abbrev=False,
        description="Move requests between servers that are started with"
        f" {JOIN}=ENDPOINT and the same {SECRET}.",
    )
    parser.add_argument(
        "--listen", default="tcp://127.0.0.1:8100", metavar="ENDPOINT", help=f"{FORM} to listen on"
    )
    parser.add_argument(
        "--policy", default=usual.policy, help=f"policy for migration: {', '.join(POLICIES)}"
    )
    parser.add_argument(
        "--scheduler-interval-ms",
        type=float,
        default=usual.interval_ms,
        metavar="MS",
        help="pause between two rounds",
    )
    flags = parser.parse_args(list(argv))
    if not os.environ.get(SECRET, ""):
        raise ConfigError(f"{SECRET} is not set: servers that have it may join, no others")
    secret = cluster_secret(os.environ)
    scheduler = SchedulerConfig(policy=flags.policy, interval_ms=flags.scheduler_interval_ms)
    config = check(ClusterConfig(scheduler=scheduler))
    listen = endpoint_of("--listen", flags.listen)
    return SchedulerLaunch(secret=secret, config=config, listen=listen)


async def schedule(launch: SchedulerLaunch) -> None:
    """Run until SIGTERM or SIGINT. Raises StartupError if it can't listen."""
    stop = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    scheduler = SchedulerProcess(launch)
    running = asyncio.create_task(scheduler.run(), name="scheduler")
    stopped = asyncio.create_task(stop.wait(), name="signals")
    try:
        say(f"servers join at {scheduler.endpoint} (Ctrl-C stops)", PROGRAM)
        await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()  # raises what ended it
    finally:
        await cancel_tasks(running, stopped)
        scheduler.close()


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
