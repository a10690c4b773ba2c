"""The fork servers of a host for a fleet: one per engine, with the engine's libraries loaded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping

from kvmig.core.errors import StartupError
from kvmig.core.killed import await_killed
from kvmig.process.fork_server import CannotFork, ForkServerClient, join
from kvmig.process.supervisor import ProcessPort, end_by_stdin, how_it_ended
from kvmig.rpc.unix_peer import credentials

LOADED_S = 120.0
"""Timeout of loading an engine's libraries."""
LOOK_S = 0.05
PROBE_S = 10.0
"""Pause between two probes of a fork server."""
MISSED = 2
"""Failed probes in a row after which a fork server is ended."""
END_S = 20.0
"""Time for a fork server to end in order."""

log = logging.getLogger(__name__)


class ForkServers:
    """The fork servers, one per engine. If one dies, the next fork starts it again, unless its
    engine can't be forked on this machine.
    """

    def __init__(
        self,
        address: Callable[[str], str],
        environment: Callable[[], Mapping[str, str]],
        *words: str,
    ) -> None:
        """address: the path of an engine's socket. environment: of each. words: more words of its
        command line, see `kvmig.launcher.shared_fork_server`."""
        self.address = address
        self._environment = environment
        self._words = words
        self._servers: dict[str, ForkServerClient] = {}
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._never: dict[str, str] = {}
        """Why an engine can't be forked, by its name."""

    async def server(self, engine: str) -> ForkServerClient:
        """A fork server that has loaded the engine. Raises StartupError, CannotFork."""
        async with self._turns.setdefault(engine, asyncio.Lock()):
            if why := self._never.get(engine):
                raise CannotFork(why)
            server = self._servers.get(engine)
            if server is None or server.gone:
                server = self._servers[engine] = await self._begin(engine)
            return server

    async def _begin(self, engine: str) -> ForkServerClient:
        address = self.address(engine)
        if (before := self._processes.pop(engine, None)) is not None:
            # It may hang, and hold the address.
            await end_now(before, f"the fork server of {engine}")
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "kvmig.launcher.shared_fork_server", engine, address,
                *self._words, env=dict(self._environment()), stdin=subprocess.PIPE,
            )  # fmt: skip
        except OSError as error:
            raise StartupError(f"the fork server of {engine} can't be started: {error}") from error
        self._processes[engine] = process
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOADED_S):
                while process.returncode is None:
                    try:
                        sock = await asyncio.to_thread(join, address, {})
                        if credentials(sock)[0] == process.pid:
                            return ForkServerClient(sock)
                        sock.close()  # another one's, that has the address still
                        await asyncio.sleep(LOOK_S)
                    except CannotFork as error:
                        self._never[engine] = str(error)
                        log.warning("%s; deployments start by themselves, here always", error)
                        raise
                    except StartupError:  # it loads
                        await asyncio.sleep(LOOK_S)
        code = process.returncode
        how = f"not ready in {LOADED_S:g} s" if code is None else how_it_ended(code)
        raise StartupError(f"the fork server of {engine} has failed ({how})")

    async def close(self) -> None:
        """End all fork servers at once; the processes that they have forked go on."""
        for server in self._servers.values():
            server.close()
        await asyncio.gather(
            *(
                end_by_stdin(process, END_S, f"the fork server of {engine}")
                for engine, process in self._processes.items()
            )
        )

    async def watch(self) -> None:
        """End fork servers that hang; the next order of a fork starts another one."""
        missed: Counter[str] = Counter()
        while True:
            await asyncio.sleep(PROBE_S)
            for engine, server in list(self._servers.items()):
                process = self._processes.get(engine)
                if server.gone or process is None or process.returncode is not None:
                    continue
                try:
                    (await asyncio.to_thread(join, self.address(engine), {})).close()
                    missed[engine] = 0
                except StartupError as error:
                    missed[engine] += 1
                    if missed[engine] == MISSED:
                        log.warning("the fork server of %s hangs, and is ended: %s", engine, error)
                        await end_now(process, f"the fork server of {engine}")


async def end_now(process: ProcessPort, name: str) -> None:
    """End a process at once, unless it has ended."""
    if process.returncode is None:
        process.kill()
    await await_killed(process, name)
