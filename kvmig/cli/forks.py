"""Llumlets forked from a process that has their engine's libraries loaded already.

Importing vLLM takes seconds of a core, for every instance again. The fork server does it once,
while the launcher itself reads its flags; an instance is then a fork of it, also one that comes
later or comes back. `Forks` is the launcher's side; the fork server itself is
`python -m kvmig.cli.forks DESCRIPTOR ENGINE`, for the launcher only.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import setproctitle

from kvmig.cli.environment import with_tree
from kvmig.cli.processes import UNSEEN, begin_loading, end_loading, leave, quiet, say
from kvmig.controlplane.child import lead_group
from kvmig.engines.kind import kind_of
from kvmig.ground.errors import StartupError

MAY_DIFFER = frozenset(("CUDA_VISIBLE_DEVICES",))
"""Variables that libraries read only when their engine is made."""
LOAD_S = 120.0
FORK_S = 5.0
TITLE = "kvmig.cli.llumlet"
MESSAGE_BYTES = 4096


class ForkOrder(msgspec.Struct, frozen=True):
    """Fork once. With it come the child's stdin and the descriptor it announces on."""

    environment: dict[str, str]
    """What differs from the fork server's own."""


class ForkNews(msgspec.Struct, frozen=True):
    """From the fork server: loaded (no pid), forked (no code) or ended."""

    pid: int = 0
    code: int | None = None
    """Negative: the signal that killed it."""


# -- the launcher's side


class Forks:
    """All that is forked on this host: the launcher's way to its fork server, and the next one."""

    def __init__(self, engine: str, environment: Mapping[str, str]) -> None:
        """Start a fork server at once. engine: see `kind_of`. Raises StartupError."""
        self._engine = engine
        self._base = dict(environment)
        self._environment = self._base
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

    def renew(self, tree: str) -> None:
        """Fork from what is on disk now: kvmig, libraries; the engine in `tree`, if one is given.

        Raises StartupError.
        """
        self._environment = with_tree(self._base, tree)
        self._servers[-1].retire()
        self._begin()

    def _begin(self) -> None:
        self._servers = [one for one in self._servers if not one.gone]
        self._servers.append(ForkServer(self._engine, self._environment))


class ForkServer:
    """The launcher's end of one process. It may die: what it has forked goes on."""

    def __init__(self, engine: str, environment: Mapping[str, str]) -> None:
        """Start it at once. engine: see `kind_of`. Raises StartupError."""
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        words = ["-m", "kvmig.cli.forks", str(theirs.fileno()), engine]
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
                    rights = array.array("i", (stdin, announced))
                    self._sock.sendmsg(
                        [msgspec.msgpack.encode(ForkOrder(environment))],
                        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)],
                    )
                    return await self._asked
            except OSError as error:  # a TimeoutError too
                self._give_up()
                raise StartupError(
                    f"the fork server is gone: {str(error) or 'too slow'}"
                ) from error

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
            message = self._sock.recv(MESSAGE_BYTES)
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


class Fork:
    """A `processes.Process` whose parent is the fork server, which tells how it ends."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    def end(self, code: int) -> None:
        """Note how it ended."""
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


# -- the fork server


def main(argv: Sequence[str]) -> int:
    """Load, then fork as often as the launcher wants, until it is gone."""
    lead_group()
    quiet("fork server")
    begin_loading()
    from kvmig.cli import llumlet  # before the first fork; the launcher doesn't need it

    kind = kind_of(argv[2])
    kind.prepare()
    kind.load()
    if why := unsafe():
        say(f"instances start without a fork server: {why}")
        return 1
    end_loading()
    with socket.socket(fileno=int(argv[1])) as sock:
        forked = serve(sock)
    if forked is None:
        return 0
    order, (stdin, announced) = forked
    become_llumlet(order, stdin)
    return llumlet.main([TITLE, str(announced)])


def unsafe() -> str:
    """Say why this process can't be forked any more; nothing if it can."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        return f"loading has started {threads - 1} threads"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "loading has initialized CUDA"
    return ""


def serve(sock: socket.socket) -> tuple[ForkOrder, list[int]] | None:
    """Take orders and tell of ends, until the launcher's end of the socket is closed.

    Returns in each fork, too, with what it shall be: whatever it raises later is its own.
    """
    hears, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        tell(sock, ForkNews())
        while True:
            readable, _, _ = select.select([sock.fileno(), hears], [], [])
            if hears in readable:
                os.read(hears, 4096)
                for news in ended():
                    tell(sock, news)
            if sock.fileno() in readable:
                message, descriptors, _, _ = socket.recv_fds(sock, MESSAGE_BYTES, 2)
                if not message:
                    break
                order = msgspec.msgpack.decode(message, type=ForkOrder)
                pid = os.fork()
                if pid == 0:
                    return order, descriptors
                for one in descriptors:
                    os.close(one)
                tell(sock, ForkNews(pid))
    return None


def become_llumlet(order: ForkOrder, stdin: int) -> None:
    """Make this process as if started by `python -m kvmig.cli.llumlet`."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(stdin, 0)
    os.close(stdin)
    os.environ.update(order.environment)
    os.environ["SPT_NOENV"] = "1"  # setproctitle: leave what ps shows of our environment
    setproctitle.setproctitle(TITLE)
    logging.root.handlers.clear()  # lines get the llumlet's own name


def ended() -> list[ForkNews]:
    """Reap the children that have ended since."""
    news = []
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            news.append(ForkNews(child[0], os.waitstatus_to_exitcode(child[1])))
    return news


def tell(sock: socket.socket, news: ForkNews) -> None:
    """One message. Raises OSError if the launcher is gone."""
    sock.send(msgspec.msgpack.encode(news))


if __name__ == "__main__":
    leave(main(sys.argv))
