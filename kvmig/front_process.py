"""`python -m kvmig.front_process [TITLE] DESCRIPTOR`: a front end, for the launcher only."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Sequence

import uvloop

from kvmig.cli.processes import Announcement, begin_loading, leave, quiet, say, send_heartbeats
from kvmig.controlplane.child import StopSignals, announce, read_launch
from kvmig.engines.kind import kind_of
from kvmig.front_end import FrontEnd, FrontLaunch
from kvmig.ground.errors import KvmigError, StartupError


async def run(launch: FrontLaunch, descriptor: int) -> None:
    """Serve until the launcher wants an end, or has ended. Raises StartupError."""
    signals = StopSignals()
    signals.listen()
    args = kind_of(launch.config.engine).parse(launch.engine_argv)
    front = FrontEnd(launch, args, socket.socket(fileno=launch.listening), signals.listen)
    stopped = asyncio.create_task(signals.stop.wait())
    try:
        starting = asyncio.create_task(front.start())
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
            return
        await starting
        beating = asyncio.create_task(send_heartbeats(launch.heartbeat), name="heartbeats")
        try:
            announce(descriptor, Announcement(endpoint="shared"))
        except StartupError:  # the launcher is ending, or gone: nobody waits for it
            signals.stop.set()
            signals.at_once.set()
        ended = asyncio.create_task(front.ended())
        await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not stopped.done():
            raise StartupError("its HTTP server has stopped")
        await front.drain(signals.at_once)
        beating.cancel()
    finally:
        stopped.cancel()
        await front.close()


def main(argv: Sequence[str]) -> int:
    """Launch document on stdin, readiness on the file descriptor that is the last word."""
    if not 2 <= len(argv) <= 3 or not argv[-1].isdecimal():
        print("usage: python -m kvmig.front_process [TITLE] DESCRIPTOR", file=sys.stderr)
        return 2
    descriptor = int(argv[-1])
    begin_loading()
    try:
        launch = read_launch(FrontLaunch)
        quiet(launch.name)
        kind_of(launch.config.engine).prepare()
        uvloop.run(run(launch, descriptor))
    except KvmigError as error:
        try:
            announce(descriptor, Announcement(failed=str(error)))
        except StartupError:  # announced before: it ran, then failed
            say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    leave(main(sys.argv))
