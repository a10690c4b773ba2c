"""Several front ends behind one port: processes that are kept running."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import tempfile

import msgspec

from kvmig.cli.children import Child, running
from kvmig.cli.instance import first_of
from kvmig.cli.process import end_loading, say
from kvmig.cli.pulse import SILENT_S, Pulse
from kvmig.controlplane.restarts import Restarts
from kvmig.front_end import FrontLaunch
from kvmig.ground.errors import StartupError

CLOSE_S = 5.0
"""For a front end to close, once nothing runs any more."""


class FrontEnds:
    """The same to its user as one `FrontEnd`, but that they live in processes of their own.

    All listen on one socket, so no connection waits for one that is gone. One that dies or hangs
    is started again; its streams are over, for their clients' connections were its own.
    """

    def __init__(self, launch: FrontLaunch, sock: socket.socket) -> None:
        """launch: of any of them, but for the name. sock: listening; the caller closes it."""
        self._launch = launch
        self._sock = sock
        self._children: dict[int, Child] = {}
        self._pulses: dict[int, Pulse] = {}
        self._keeping: list[asyncio.Task[None]] = []
        self._metrics = tempfile.TemporaryDirectory(prefix="kvmig-metrics-")
        self._environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": self._metrics.name}

    async def start(self) -> None:
        """Return once all take requests. Raises StartupError; `close` it then, too."""
        numbers = range(self._launch.config.lifecycle.front_ends)
        await asyncio.gather(*map(self._begin, numbers))
        for number in numbers:
            self._keeping.append(asyncio.create_task(self._keep(number)))
        end_loading()

    async def ended(self) -> None:
        """Never: they are started again."""
        await asyncio.Event().wait()

    async def drain(self, at_once: asyncio.Event) -> None:
        """They take nothing new; wait for what runs, for the time-out, or for `at_once`."""
        self._stop_keeping()
        for child in self._children.values():
            child.terminate()
        ends = [asyncio.create_task(child.ended()) for child in self._children.values()]
        everybody = asyncio.gather(*ends)
        hurry = asyncio.create_task(at_once.wait())
        timeout_s = self._launch.config.drain_timeout_s + CLOSE_S
        await asyncio.wait(
            (everybody, hurry), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        hurry.cancel()
        everybody.cancel()
        await asyncio.gather(*ends, return_exceptions=True)

    async def close(self) -> None:
        """End them all."""
        self._stop_keeping()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await asyncio.gather(*map(self._end, list(self._children)))
        self._metrics.cleanup()

    def _stop_keeping(self) -> None:
        for task in self._keeping:
            task.cancel()

    async def _begin(self, number: int) -> None:
        """Start it, and wait until it takes requests. Raises StartupError."""
        pulse = self._pulses[number] = Pulse()
        shared = [self._sock.fileno(), pulse.descriptor]
        launch = msgspec.structs.replace(
            self._launch,
            name=f"front-{secrets.token_hex(4)}",
            listening=shared[0],
            pulse=shared[1],
        )
        spawn = running("kvmig.front_process", self._environment, shared)
        child = await Child.start(f"front end {number}", spawn, launch)
        self._children[number] = child
        await child.ready(launch.config.start_timeout_s)

    async def _end(self, number: int, timeout_s: float = CLOSE_S) -> None:
        if (child := self._children.pop(number, None)) is not None:
            await child.stop(timeout_s)
        if (pulse := self._pulses.pop(number, None)) is not None:
            pulse.close()

    async def _keep(self, number: int) -> None:
        loop, restarts = asyncio.get_running_loop(), Restarts()
        began = loop.time()
        how = await self._dies(number)
        while True:
            pause_s = restarts.died(loop.time() - began)
            assert pause_s is not None, "it is never given up"
            say(f"front end {number} is gone ({how}), it starts again in {pause_s:g} s")
            await asyncio.sleep(pause_s)
            began = loop.time()
            try:
                await self._begin(number)
                say(f"front end {number} is ready")
                how = await self._dies(number)
            except StartupError as error:
                await self._end(number)  # it may be there still, but not ready
                how = str(error)

    async def _dies(self, number: int) -> str:
        """Wait until it ends or hangs, and end it; how."""
        how = await first_of(self._children[number].ended(), self._hangs(number))
        await self._end(number, 0.0)
        return how

    async def _hangs(self, number: int) -> str:
        await self._pulses[number].fails(SILENT_S)
        return f"no sign of life for {SILENT_S:g} s"
