"""Llumlets forked from a process that has their engine's libraries loaded already.

Importing vLLM takes seconds of a core, for every instance again. The fork server does it once,
while the launcher itself reads its flags; an instance is then a fork of it, also one that comes
later or comes back. `ForkServerPool` is the launcher's side; the fork server itself is
`python -m kvmig.process.fork_server DESCRIPTOR ENGINE`, for the launcher only. One for all
launchers of a host is `python -m kvmig.launcher.shared_fork_server`; a launcher is handed its
socket in `HANDED`.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import hashlib
import importlib
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import setproctitle

from kvmig.core.errors import StartupError
from kvmig.core.killed import kill_and_wait
from kvmig.core.open_files import NO_FILE_S, lacks_descriptor
from kvmig.core.secret import ADMIN_KEY, SECRET
from kvmig.core.shown_secrets import shown_words
from kvmig.engines.registry import kind_of, with_tree
from kvmig.process.child import lead_group, leave, say
from kvmig.process.forkable import make_forkable
from kvmig.process.sockets import take_long
from kvmig.process.supervisor import UNSEEN
from kvmig.rpc.unix_peer import is_own_user

log = logging.getLogger(__name__)

HANDED = "KVMIG_FORK_SERVER"
"""Environment variable: the socket of a fork server that a launcher shares with others."""
NO_FORKS = "none"
"""The socket's place holds it where a fork server has failed: a launcher's own would, too."""
HUB_TOKEN = "HF_TOKEN"
OF_SHELLS = frozenset(("PS1", "PS2", "PS4", "PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES"))
"""Variables that shells set, or unset, for each program (Ray starts its workers by one)."""
MAY_DIFFER = OF_SHELLS | {"CUDA_VISIBLE_DEVICES", HUB_TOKEN, SECRET, ADMIN_KEY, HANDED}
"""Variables that libraries read only when their engine is made, or never, and kvmig's own."""
LOAD_S = 120.0
FORK_S = 5.0
JOIN_S = 5.0
"""Time for a loaded fork server to send its fingerprint."""
TELL_S = 1.0
"""Time for a fork server to report how a process ended that is seen to have ended."""
ENGINE = "engine"
INSTANCES, SERVERS = "the environment of instances", "the environment of servers"
"""What a `ForkServerLoaded` names besides `likeness`; environments by their `digest`."""
LLUMLET = "kvmig.launcher.llumlet_main"
ENGINES = "kvmig.process.fork_server"
LOADED = "kvmig.process.loaded_files"
TITLE_ROOM = " " * 200
"""The last word of a fork server's command line: the titles of its forks take the line's place."""
MESSAGE_BYTES = 1 << 20
"""More than Linux lets through, with `take_long`."""


class CannotFork(StartupError):
    """The libraries that a fork server has loaded can't be forked here: another would fail, too."""


class ForkOrder(msgspec.Struct, frozen=True, tag=True):
    """Fork once, into what `python -m module words` would be.

    With it come its stdin, stdout and stderr, then descriptors whose numbers follow the words.
    """

    module: str
    words: Sequence[str]
    environment: Mapping[str, str]
    tied: bool = False
    """Whether the fork is asked to end when its client goes. An instance has its stdin for that."""


class ForkServerLoaded(msgspec.Struct, frozen=True, tag="Loaded"):
    """The fork server's first message. likeness: see `likeness`; empty for its own launcher."""

    likeness: Mapping[str, str]


class ForkDone(msgspec.Struct, frozen=True, tag="Forked"):
    """The order is carried out."""

    pid: int


class ForkRefused(msgspec.Struct, frozen=True, tag="Refused"):
    """The order isn't."""

    why: str


class ForkExited(msgspec.Struct, frozen=True, tag="Ended"):
    """How a fork ended. code: negative: the signal that killed it."""

    pid: int
    code: int


ForkNews = ForkServerLoaded | ForkDone | ForkRefused | ForkExited


def send_order(sock: socket.socket, order: ForkOrder, descriptors: Sequence[int]) -> None:
    """Order a fork, which gets copies of the descriptors. Raises OSError."""
    take_long(sock)
    rights = array.array("i", descriptors)
    sock.sendmsg([msgspec.msgpack.encode(order)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def receive_news(sock: socket.socket) -> ForkNews | None:
    """The next message of a fork server; None if it is gone.

    Raises BlockingIOError or TimeoutError if there is nothing.
    """
    try:
        message = sock.recv(MESSAGE_BYTES)
    except (BlockingIOError, TimeoutError):
        raise
    except OSError:
        return None
    return msgspec.msgpack.decode(message, type=ForkNews) if message else None


# -- what must be alike for a fork to be as good as a process that is started


def digest(environment: Mapping[str, str]) -> str:
    """A digest of what libraries read of an environment when they are loaded."""
    fixed = sorted((name, text) for name, text in environment.items() if name not in MAY_DIFFER)
    return hashlib.blake2b(repr(fixed).encode(), digest_size=16).hexdigest()


def likeness() -> dict[str, str]:
    """What a fork has from its fork server and can't change, by name, without the times of loading.

    Files: when kvmig's were written, and when a package was installed last.
    """
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    limits: dict[str, tuple[int, ...]] = {
        name: resource.getrlimit(getattr(resource, name)) for name in names
    }
    limits["RLIMIT_NOFILE"] = limits["RLIMIT_NOFILE"][1:]  # every launcher raises the first
    status = Path("/proc/self/status").read_text().splitlines()
    rights = ("Umask", "Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp:", "Cpus_allowed:")
    ours = Path(__file__).parent.parent.rglob("*.py")
    files = [max(file.stat().st_mtime_ns for file in ours)]
    files.append(Path(sysconfig.get_path("purelib")).stat().st_mtime_ns)
    return {
        "interpreter": sys.executable,
        "installed files": repr(files),
        "working directory": str(Path.cwd()),
        "user and rights": "\n".join(line for line in status if line.startswith(rights)),
        "limits": repr(limits),
        "priority": f"{os.getpriority(os.PRIO_PROCESS, 0)}",
        "session": f"{os.getsid(0)}",
        "control group": Path("/proc/self/cgroup").read_text(),
        "namespaces": repr(sorted(map(str, map(Path.readlink, Path("/proc/self/ns").iterdir())))),
    }


def join(address: str, wanted: Mapping[str, str]) -> socket.socket:
    """Connect to a fork server for several, which must be like that. Raises StartupError.

    CannotFork: the libraries that it has loaded can't be forked.
    """
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        try:
            sock.settimeout(JOIN_S)
            sock.connect(address)
            if not is_own_user(sock):
                raise StartupError(f"the fork server at {address} is another user's")
            news = receive_news(sock)
        except (OSError, msgspec.DecodeError) as error:
            raise StartupError(f"no fork server at {address}: {error}") from error
        if isinstance(news, ForkRefused):
            raise CannotFork(news.why)
        if not isinstance(news, ForkServerLoaded):
            raise StartupError(f"the fork server at {address} has ended")
        found = news.likeness
        differ = [name for name, value in wanted.items() if found.get(name) != value]
        if differ:
            raise StartupError(f"the fork server at {address} differs in {', '.join(differ)}")
        undo.pop_all()
    return sock


# -- the launcher's side


class ForkServerPool:
    """The launcher's fork servers on this host: the one that forks now, and the one after it."""

    def __init__(self, engine: str, environment: Mapping[str, str], handed: str = "") -> None:
        """Start a fork server at once, where the one behind the socket `handed` doesn't suit.

        engine: see `kind_of`. handed: or NO_FORKS. Raises StartupError.
        """
        self._engine = engine
        self._base = dict(environment)
        self._environment = self._base
        self._servers: list[ForkServerClient] = []
        self._renewing: asyncio.Task[None] | None = None
        self._stale = False
        """Whether the last one has loaded what isn't on disk any more."""
        if handed == NO_FORKS:
            return
        if handed:
            try:
                wanted = {**likeness(), ENGINE: engine, INSTANCES: digest(environment)}
                self._servers.append(ForkServerClient(join(handed, wanted)))
            except StartupError as error:
                say(f"{error}; this server starts its own")
        if not self._servers:
            self._begin()

    def close(self) -> None:
        """End our own; what was forked doesn't mind."""
        for server in self._servers:
            server.close()

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Whether a fork can live in that environment: libraries have read their part of ours."""
        if not self._servers:
            return False
        names = {*self._environment, *environment} - MAY_DIFFER
        server = self._servers[-1]
        return (server.worked or not server.gone) and all(
            self._environment.get(name) == environment.get(name) for name in names
        )

    async def fork(
        self, environment: Mapping[str, str], stdin: int, announced: int, title: str = ""
    ) -> ForkedProcess:
        """One more llumlet; the descriptors are given to it as copies. title: what `ps` shows.

        Raises StartupError if the fork server is gone or too slow; the next call starts another,
        if this one had ever worked.
        """
        if self._renewing is not None:
            await asyncio.shield(self._renewing)
        if self._servers[-1].gone or self._stale:
            self._begin()
        return await self._servers[-1].fork(environment, stdin, announced, title)

    def renew(self, tree: str) -> None:
        """Fork from what is on disk now: kvmig, libraries; the engine in `tree`, if one is given.

        The fork server stays if it has loaded just that. Raises StartupError.
        """
        if not self._servers:
            return
        environment = with_tree(self._engine, self._base, tree)
        if environment == self._environment:
            self._renewing = asyncio.create_task(self._renew(), name="renewal of the fork server")
            return
        self._environment = environment
        self._servers[-1].retire()
        self._begin()

    async def loaded(self) -> None:
        """Wait until the next fork needs not wait, or can't be had."""
        if self._renewing is not None:
            await asyncio.shield(self._renewing)
        if self._servers:
            await self._servers[-1].loaded()

    async def _renew(self) -> None:
        server = self._servers[-1]
        if await server.is_current(self._environment) or server is not self._servers[-1]:
            return
        server.retire()
        self._stale = True
        try:
            self._begin()
        except StartupError as error:  # the next fork tries again
            log.warning("%s", error)

    def _begin(self) -> None:
        self._servers = [one for one in self._servers if not one.gone]
        self._servers.append(ForkServerClient.begin(ENGINES, self._environment, self._engine))
        self._stale = False


class ForkServerClient:
    """The launcher's end of one process. It may die: what it has forked goes on."""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        """sock: closed with this. process: our own; None: shared with others, and loaded."""
        self._sock = sock
        self._sock.setblocking(False)
        self._process = process
        self.gone = False
        self.worked = process is None
        self._retired = False
        self._turn = asyncio.Lock()
        self._forks: dict[int, ForkedProcess] = {}
        self._loaded: asyncio.Future[None] | None = None
        self._asked: asyncio.Future[ForkedProcess] | None = None

    @classmethod
    def begin(cls, module: str, environment: Mapping[str, str], *words: str) -> ForkServerClient:
        """Start `python -m module DESCRIPTOR words`, our own, at once. Raises StartupError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = ("-m", module, str(theirs.fileno()), *words, TITLE_ROOM)
        with theirs:
            try:
                process = subprocess.Popen(
                    [sys.executable, *words],
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                )
            except OSError as error:
                ours.close()
                raise StartupError(f"the fork server can't be started: {error}") from error
        return cls(ours, process)

    def close(self) -> None:
        """Disconnect, and end the server if it is our own; the processes it forked go on."""
        self._sock.close()
        if self._process is not None:
            kill_and_wait(self._process, "the fork server")

    def retire(self) -> None:
        """Close when all that it has forked, and was ordered to fork, has ended."""
        self._retired = True
        self._rest()

    def _rest(self) -> None:
        if self._retired and not self._forks and not self._turn.locked():
            self._give_up()

    async def fork(
        self, environment: Mapping[str, str], stdin: int, announced: int, title: str = ""
    ) -> ForkedProcess:
        """One more llumlet. See `ForkServerPool.fork`."""
        order = ForkOrder(LLUMLET, (title,) if title else (), environment)
        return await self.carry_out(order, (stdin, 1, 2, announced))

    async def loaded(self) -> None:
        """Wait until it has loaded, or is gone, or is too slow; `carry_out` raises for the last
        two."""
        with contextlib.suppress(OSError):  # a TimeoutError too
            async with asyncio.timeout(LOAD_S):
                await asyncio.shield(self._listen())

    async def is_current(self, environment: Mapping[str, str]) -> bool:
        """Whether what it has loaded is on disk still, as far as that can be seen."""
        try:
            stdin = os.open(os.devnull, os.O_RDONLY)
            try:
                order = ForkOrder(LOADED, (), environment)
                fork = await self.carry_out(order, (stdin, 1, 2))
            finally:
                os.close(stdin)
            try:
                async with asyncio.timeout(FORK_S):
                    return await fork.wait() == 0
            finally:
                fork.kill()  # if it hangs
        except (StartupError, OSError) as error:
            log.warning("the files that the fork server has loaded can't be compared: %s", error)
            return False

    async def carry_out(self, order: ForkOrder, descriptors: Sequence[int]) -> ForkedProcess:
        """Fork as ordered. Raises StartupError; the fork server is given up then."""
        try:
            async with self._turn:
                loaded = self._listen()
                async with asyncio.timeout(LOAD_S):
                    await asyncio.shield(loaded)
                async with asyncio.timeout(FORK_S):
                    self._asked = asyncio.get_running_loop().create_future()
                    send_order(self._sock, order, descriptors)
                    return await self._asked
        except OSError as error:  # a TimeoutError too
            self._give_up()
            raise StartupError(f"the fork server is gone: {str(error) or 'too slow'}") from error
        finally:
            self._rest()

    def _listen(self) -> asyncio.Future[None]:
        if self.gone:
            raise BrokenPipeError("it ended")
        if self._loaded is None:
            loop = asyncio.get_running_loop()
            self._loaded = loop.create_future()
            if self.worked:
                self._loaded.set_result(None)
            loop.add_reader(self._sock, self._hear)
        return self._loaded

    def _hear(self) -> None:
        try:
            news = receive_news(self._sock)
        except BlockingIOError:
            return
        match news:
            case None:
                self._give_up()
            case ForkServerLoaded():
                assert self._loaded is not None
                self._loaded.set_result(None)
                self.worked = True
            case ForkDone(pid):
                fork = self._forks[pid] = ForkedProcess(pid)
                if self._asked is not None and not self._asked.done():
                    self._asked.set_result(fork)
            case ForkRefused(why):
                if self._asked is not None and not self._asked.done():
                    self._asked.set_exception(StartupError(f"the fork server can't fork: {why}"))
            case ForkExited(pid, code):
                self._forks.pop(pid).end(code)
                self._rest()

    def _give_up(self) -> None:
        """Give the fork server up."""
        if self.gone:
            return
        self.gone = True
        asyncio.get_running_loop().remove_reader(self._sock)
        self.close()
        for waiting in (self._loaded, self._asked):
            if waiting is not None and not waiting.done():
                waiting.set_exception(BrokenPipeError("it ended"))
        self._forks.clear()


class SharedForks:
    """What a server forks of the fork server that it was handed, besides its instances.

    Make it before an engine's libraries are loaded, which change the environment.
    """

    def __init__(self, engine: str, address: str) -> None:
        """address: of the fork server's socket."""
        self._address = address
        self._wanted = {ENGINE: engine, SERVERS: digest(os.environ)}
        self._server: ForkServerClient | None = None

    async def fork(
        self,
        module: str,
        environment: Mapping[str, str],
        descriptors: Sequence[int],
        title: str = "",
    ) -> ForkedProcess:
        """What `python -m module [TITLE]` would be, with copies of the descriptors: stdin, stdout,
        stderr, then those whose numbers are its last words. Raises StartupError."""
        if self._server is None or self._server.gone:
            self._server = ForkServerClient(await asyncio.to_thread(self._join))
        order = ForkOrder(module, (title,) if title else (), environment)
        return await self._server.carry_out(order, descriptors)

    def close(self) -> None:
        """Disconnect from the server; the processes that it has forked go on."""
        if self._server is not None and not self._server.gone:
            self._server.close()

    def _join(self) -> socket.socket:
        return join(self._address, {**likeness(), **self._wanted})


class ForkedProcess:
    """A `supervisor.Process` whose parent is the fork server, which reports how it ends.

    That it ended is seen here, too: a fork server may die, or hang.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._watch()

    def _watch(self) -> None:
        if self.returncode is not None:
            return
        try:
            watched = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self._loop.call_later(TELL_S, self.end, UNSEEN)
        except OSError as error:
            if not lacks_descriptor(error):
                raise
            self._loop.call_later(NO_FILE_S, self._watch)
        else:
            self._loop.add_reader(watched, self._seen, watched)

    def end(self, code: int) -> None:
        """Note how it ended."""
        if self.returncode is None:
            self.returncode = code
            self._ended.set()

    def _seen(self, watched: int) -> None:
        self._loop.remove_reader(watched)
        os.close(watched)
        self._loop.call_later(TELL_S, self.end, UNSEEN)

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
    if why := load(argv[2]):
        say(f"instances start without a fork server: {why}")
        return 1
    launcher = socket.socket(fileno=int(argv[1]))
    send_news(launcher, ForkServerLoaded({}))
    return serve([launcher])


def load(engine: str, more: Sequence[str] = ()) -> str:
    """Make this process one to be forked; why it can't be, or nothing.

    more: modules to be loaded besides those of an instance.
    """
    kind = kind_of(engine)
    imports = [partial(importlib.import_module, module) for module in (LLUMLET, *more)]
    return make_forkable(kind.prepare, kind.load, *imports)


class ForkListener(msgspec.Struct):
    """The socket at which a fork server takes clients, as long as `lifeline` is open.

    It serves clients that have come by then until they go, unless it ends `at_once`.
    """

    sock: socket.socket
    lifeline: int
    first: ForkServerLoaded
    """The first message to each client."""
    at_once: bool = False


def serve(clients: list[socket.socket], listening: ForkListener | None = None) -> int:
    """Fork for clients until none can come any more; each fork returns its own status."""
    forks = _Forking(clients, listening)
    while (forked := forks.serve_next()) is None:
        if not (forks.clients or forks.listening):
            forks.close()
            return 0
    forks.close()
    return become(*forked)


def _ready(watched: Sequence[socket.socket | int]) -> list[socket.socket | int]:
    """Wait until some can be read. Not by select(), which knows files up to number 1,023 only."""
    poll = select.poll()
    numbers = {one if isinstance(one, int) else one.fileno(): one for one in watched}
    for number in numbers:
        poll.register(number, select.POLLIN)
    return [numbers[number] for number, _ in poll.poll()]


class _Forking:
    """The fork server's sockets, and whose each fork is."""

    def __init__(self, clients: list[socket.socket], listening: ForkListener | None) -> None:
        self.clients = clients
        self.listening = listening
        self._whose: dict[int, socket.socket] = {}
        self._tied: set[int] = set()
        self._hears, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes)
        self._wakes = wakes
        for one in clients:
            one.setblocking(False)

    def close(self) -> None:
        """Close all sockets. Also in a fork, which has copies of them."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._hears)
        os.close(self._wakes)
        for one in self.clients:
            one.close()
        if self.listening is not None:
            self.listening.sock.close()

    def serve_next(self) -> tuple[ForkOrder, list[int]] | None:
        """Wait for what comes, and do it; in a fork: what it shall be, with what descriptors."""
        watched: list[socket.socket | int] = [self._hears, *self.clients]
        if self.listening is not None:
            watched += self.listening.sock, self.listening.lifeline
        ready = _ready(watched)
        if self._hears in ready:
            os.read(self._hears, 4096)
            for news in ended():
                self._tied.discard(news.pid)
                self._tell(self._whose.pop(news.pid, None), news)
        if self.listening is not None:
            if self.listening.lifeline in ready and not os.read(self.listening.lifeline, 4096):
                self.listening.sock.close()
                if self.listening.at_once:
                    while self.clients:
                        self.clients.pop().close()
                self.listening = None
            elif self.listening.sock in ready:
                self._take(self.listening)
        for client in [one for one in self.clients if one in ready]:
            if forked := self._fork_for(client):
                return forked
        return None

    def _take(self, listening: ForkListener) -> None:
        try:
            client, _ = listening.sock.accept()
        except OSError as error:  # whoever came has gone again; or no file is left for anybody
            if lacks_descriptor(error):
                time.sleep(NO_FILE_S)  # who waits would be asked for again at once
            return
        with contextlib.suppress(OSError):
            client.setblocking(False)
            if not is_own_user(client):
                client.close()
                return
            self.clients.append(client)
            self._tell(client, listening.first)

    def _fork_for(self, client: socket.socket) -> tuple[ForkOrder, list[int]] | None:
        descriptors: list[int] = []
        try:
            flags = socket.MSG_CMSG_CLOEXEC
            message, descriptors, came, _ = socket.recv_fds(client, MESSAGE_BYTES, 8, flags)
            if came & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            order = msgspec.msgpack.decode(message, type=ForkOrder)
            if (pid := os.fork()) == 0:
                return order, descriptors
            self._whose[pid] = client
            if order.tied:
                self._tied.add(pid)
            self._tell(client, ForkDone(pid))
        except msgspec.DecodeError:  # it has gone, or speaks otherwise
            self._drop(client)
        except OSError as error:
            self._tell(client, ForkRefused(str(error)))
        for one in descriptors:
            os.close(one)
        return None

    def _tell(self, client: socket.socket | None, news: ForkNews) -> None:
        if client is not None and client in self.clients:
            try:
                send_news(client, news)
            except OSError:  # gone, or it doesn't listen
                self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        self.clients.remove(client)
        client.close()
        for pid in self._tied:
            if self._whose[pid] is client:  # not reaped yet, so its id is its own
                os.kill(pid, signal.SIGTERM)


def become(order: ForkOrder, descriptors: Sequence[int]) -> int:
    """Make this process as if started by `python -m`; its exit status."""
    standard, rest = descriptors[:3], descriptors[3:]
    for number, one in enumerate(standard):
        os.dup2(one, number)
        os.close(one)
    lead_group()
    os.environ["SPT_NOENV"] = "1"  # setproctitle: leave what ps shows of our environment
    setproctitle.setproctitle(" ".join((order.module, *shown_words(order.words))))
    os.environ.clear()
    os.environ.update(order.environment)
    logging.root.handlers.clear()  # lines get the process's own name
    words = [*order.words, *map(str, rest)]
    sys.argv = [order.module, *words]
    status: int = importlib.import_module(order.module).main(words)
    return status


def ended() -> list[ForkExited]:
    """Reap the children that have ended since."""
    news = []
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            news.append(ForkExited(child[0], os.waitstatus_to_exitcode(child[1])))
    return news


def send_news(sock: socket.socket, news: ForkNews) -> None:
    """One message. Raises OSError if the client is gone."""
    sock.send(msgspec.msgpack.encode(news))


if __name__ == "__main__":
    leave(main(sys.argv))
