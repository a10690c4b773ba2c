"""`python -m kvmig.frontend.process_main [TITLE] ANNOUNCED [LISTENING HEARTBEAT]`: a front end.

For the launcher only. LISTENING and HEARTBEAT are descriptors, in place of those that the launch
document has: a fork has its own numbers for them.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Sequence

import msgspec
import uvloop

from kvmig.core.errors import StartupError
from kvmig.engines.registry import kind_of
from kvmig.frontend.server import FrontEnd
from kvmig.launcher.front_ends import FrontLaunch
from kvmig.process.child import (
    StartAnnouncement,
    StopSignals,
    announce,
    begin_loading,
    leave,
    quiet,
    send_heartbeats,
)
from kvmig.process.child_main import run_child


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
            announce(descriptor, StartAnnouncement(endpoint="shared"))
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


def main(words: Sequence[str]) -> int:
    """Launch document on stdin, readiness on the file descriptor ANNOUNCED."""
    form = "kvmig.frontend.process_main [TITLE] ANNOUNCED [LISTENING HEARTBEAT]"
    begin_loading()
    return run_child(words, form, FrontLaunch, _run, counts=(3, 1))


def _run(launch: FrontLaunch, announced: int, *own: int) -> None:
    if own:
        launch = msgspec.structs.replace(launch, listening=own[0], heartbeat=own[1])
    quiet(launch.name)
    kind_of(launch.config.engine).prepare()
    uvloop.run(run(launch, announced))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
