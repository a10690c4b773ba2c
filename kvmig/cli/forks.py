"""Llumlets forked from a process that has their engine's libraries loaded already.

Importing vLLM takes seconds of a core, for every instance again. The fork server
(`kvmig.cli.fork_server`) does it once, while the launcher itself reads its flags; an instance is
then a fork of it, also one that comes later or comes back.
"""

from __future__ import annotations

import array
import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec

from kvmig.ground.errors import StartupError

MAY_DIFFER = frozenset(("CUDA_VISIBLE_DEVICES",))
"""Of an environment: what libraries read only when their engine is made."""
LOAD_S = 120.0
FORK_S = 5.0
UNSEEN = 1000
"""In place of an exit code: nobody is left who saw how it ended."""


class ForkOrder(msgspec.Struct, frozen=True):
    """Fork once. With it come the child's stdin and the descriptor it announces on."""

    environment: dict[str, str]
    """What differs from the fork server's own."""


class ForkNews(msgspec.Struct, frozen=True):
    """From the fork server: loaded (no pid), forked (no code) or ended."""

    pid: int = 0
    code: int | None = None
    """Negative: the signal that killed it."""


class Fork:
    """A `children.Process` whose parent is the fork server, which tells how it ends."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    def end(self, code: int) -> None:
        """It has ended."""
        if self.returncode is None:
            self.returncode = code
            self._ended.set()

    def watch(self) -> None:
        """Nobody will tell: see for ourselves."""
        try:
            watched = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self.end(UNSEEN)
            return
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(watched)
            os.close(watched)
            self.end(UNSEEN)

        loop.add_reader(watched, ended)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.returncode is None:  # or its id may be another's
            os.kill(self.pid, number)


class ForkServer:
    """The launcher's end of one process. It may die: what it has forked goes on."""

    def __init__(self, engine: str, environment: Mapping[str, str]) -> None:
        """Start it at once. engine: see `kind_of`. Raises StartupError."""
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        words = ["-m", "kvmig.cli.fork_server", str(theirs.fileno()), engine]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, *words],
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                )
            except OSError as error:
                self._sock.close()
                raise StartupError(f"the fork server can't be started: {error}") from error
        self.gone = self.worked = False
        self._retired = False
        self._turn = asyncio.Lock()
        self._forks: dict[int, Fork] = {}
        self._loaded: asyncio.Future[None] | None = None
        self._asked: asyncio.Future[Fork] | None = None

    def close(self) -> None:
        """End it; what it has forked doesn't mind."""
        self._sock.close()
        self._process.kill()
        self._process.wait()

    def retire(self) -> None:
        """End it when all that it has forked has ended."""
        self._retired = True
        if not self._forks:
            self._give_up()

    async def fork(self, environment: dict[str, str], stdin: int, announced: int) -> Fork:
        """One more llumlet; environment: what differs from its own. See `Forks.fork`."""
        async with self._turn:
            try:
                loaded = self._listen()
                async with asyncio.timeout(LOAD_S):
                    await asyncio.shield(loaded)
                async with asyncio.timeout(FORK_S):
                    self._asked = asyncio.get_running_loop().create_future()
                    self._order(ForkOrder(environment), [stdin, announced])
                    return await self._asked
            except OSError as error:  # a TimeoutError too
                self._give_up()
                raise StartupError(
                    f"the fork server is gone: {str(error) or 'too slow'}"
                ) from error

    def _order(self, order: ForkOrder, descriptors: Sequence[int]) -> None:
        rights = array.array("i", descriptors)
        self._sock.sendmsg(
            [msgspec.msgpack.encode(order)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        )

    def _listen(self) -> asyncio.Future[None]:
        if self.gone:
            raise BrokenPipeError("it ended")
        if self._loaded is None:
            loop = asyncio.get_running_loop()
            self._loaded = loop.create_future()
            loop.add_reader(self._sock, self._hear)
        return self._loaded

    def _hear(self) -> None:
        try:
            message = self._sock.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._give_up()
            return
        news = msgspec.msgpack.decode(message, type=ForkNews)
        if not news.pid:
            assert self._loaded is not None
            self._loaded.set_result(None)
            self.worked = True
        elif news.code is None:
            fork = self._forks[news.pid] = Fork(news.pid)
            if self._asked is not None and not self._asked.done():
                self._asked.set_result(fork)
        else:
            self._forks.pop(news.pid).end(news.code)
            if self._retired and not self._forks:
                self._give_up()

    def _give_up(self) -> None:
        """It is gone, or as good as."""
        if self.gone:
            return
        self.gone = True
        asyncio.get_running_loop().remove_reader(self._sock)
        self.close()
        for waiting in (self._loaded, self._asked):
            if waiting is not None and not waiting.done():
                waiting.set_exception(BrokenPipeError("it ended"))
        for fork in self._forks.values():
            fork.watch()
        self._forks.clear()


class Forks:
    """All that is forked on this host: the launcher's way to its fork server, and the next one."""

    def __init__(self, engine: str, environment: Mapping[str, str]) -> None:
        """Start a fork server at once. engine: see `kind_of`. Raises StartupError."""
        self._engine = engine
        self._environment = dict(environment)
        self._servers = [ForkServer(engine, environment)]

    def close(self) -> None:
        """End them; what was forked doesn't mind."""
        for server in self._servers:
            server.close()

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Whether a fork can live in that environment: libraries have read their part of ours."""
        names = {*self._environment, *environment} - MAY_DIFFER
        server = self._servers[-1]
        return (server.worked or not server.gone) and all(
            self._environment.get(name) == environment.get(name) for name in names
        )

    async def fork(self, environment: Mapping[str, str], stdin: int, announced: int) -> Fork:
        """One more llumlet; the descriptors are given to it as copies.

        Raises StartupError if the fork server is gone or too slow; the next call starts another,
        if this one had ever worked.
        """
        if self._servers[-1].gone:
            self._begin()
        differs = {name: environment[name] for name in MAY_DIFFER if name in environment}
        return await self._servers[-1].fork(differs, stdin, announced)

    def renew(self) -> None:
        """Fork from what is on disk now: kvmig, libraries. Raises StartupError."""
        self._servers[-1].retire()
        self._begin()

    def _begin(self) -> None:
        self._servers = [one for one in self._servers if not one.gone]
        self._servers.append(ForkServer(self._engine, self._environment))
