"""A child process that its parent keeps: started again, ever later, whenever it dies or hangs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvmig.core.background import cancel_tasks
from kvmig.core.errors import ConfigError, StartupError
from kvmig.process.child import say
from kvmig.process.supervisor import (
    HEARTBEAT_TIMEOUT_S,
    ChildProcess,
    HeartbeatPipe,
    deaths_in_a_row,
    first_of,
    hangs,
    restart_pause,
)

log = logging.getLogger(__name__)


def _ignore(_: ChildProcess) -> None:
    """Do nothing for a child that has ended."""


class KeptChild:
    """`start` or `keep` it inside a running event loop; `stop` it in any case."""

    def __init__(
        self,
        name: str,
        begin: Callable[[int], Awaitable[ChildProcess]],
        ready_s: float,
        *,
        follow: Callable[[str], Awaitable[str]] | None = None,
        ended: Callable[[ChildProcess], None] = _ignore,
        unready_s: float = 0.0,
        again: str = "again",
    ) -> None:
        """begin: starts it; takes the descriptor for its heartbeats. ready_s: for it to be ready.

        follow: uses the endpoint of each that is ready, and returns why it is of no use any more.
        ended: is called after the end of each. unready_s: for one that isn't ready in time to end
        by itself. again: printed in the line about its next start.
        """
        self._name = name
        self._begin = begin
        self._ready_s = ready_s
        self._follow = follow
        self._ended = ended
        self._unready_s = unready_s
        self._again = again
        self._child: ChildProcess | None = None
        self._endpoint = ""
        self._heartbeats: HeartbeatPipe | None = None
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return once it is ready. Raises StartupError; `stop` it then, too."""
        await self._start()
        self._keeping = asyncio.create_task(self.keep(), name=f"keep {self._name}")

    async def drain(self) -> None:
        """Ask the process to end, and wait until it has; it isn't started again."""
        if self._keeping is not None:
            self._keeping.cancel()
        if self._child is not None:
            self._child.terminate()
            await self._child.ended()

    async def stop(self, timeout_s: float) -> None:
        """End the process."""
        await cancel_tasks(self._keeping)
        await self._end(timeout_s)

    async def _start(self) -> None:
        self._heartbeats = HeartbeatPipe()
        self._child = await self._begin(self._heartbeats.descriptor)
        self._endpoint = await self._child.ready(self._ready_s)

    async def _end(self, timeout_s: float) -> None:
        if self._child is not None:
            await self._child.stop(timeout_s)
            self._ended(self._child)
            self._child = None
        if self._heartbeats is not None:
            self._heartbeats.close()
            self._heartbeats = None

    async def keep(self) -> None:
        """Keep the process running until cancelled, also after failed starts."""
        loop = asyncio.get_running_loop()
        deaths, began = 0, loop.time()
        while True:
            try:
                if self._child is None:
                    began = loop.time()
                    await self._start()
                    if deaths:
                        say(f"{self._name} is ready")
                how = await self._watch()
                await self._end(0.0)
            except (ConfigError, StartupError) as error:
                how = str(error)
                await self._end(self._unready_s)
            except Exception as error:  # else nobody would start it again
                log.exception("%s", self._name)
                how = f"its keeper failed: {error!r}"
                await self._end(0.0)
            deaths = deaths_in_a_row(deaths, loop.time() - began)
            pause_s = restart_pause(deaths)
            say(f"{self._name} is gone ({how}), {self._again} in {pause_s:g} s")
            await asyncio.sleep(pause_s)

    async def _watch(self) -> str:
        """Wait until this one dies, hangs or is of no use; returns which of them."""
        assert self._child is not None
        assert self._heartbeats is not None
        waits: list[Awaitable[str]] = [
            self._child.ended(),
            hangs(self._heartbeats, self._child.pid, HEARTBEAT_TIMEOUT_S),
        ]
        if self._follow is not None:
            waits.append(self._follow(self._endpoint))
        return await first_of(*waits)
