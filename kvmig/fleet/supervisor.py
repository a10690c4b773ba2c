"""`kvmig up`: the supervisor, the process that all others of a fleet are children of.

It starts the server and the proxies, and again when they die or hang; it starts and ends
deployments as the server orders, and reports to every new server which of them run. It decides
nothing and imports next to nothing, so that it lives. Each of its children ends with the pipe that
is its stdin, so nothing outlives the supervisor; a deployment outlives the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from kvmig.core.background import cancel_tasks, keep_running
from kvmig.core.errors import ConfigError, StartupError
from kvmig.core.killed import await_killed
from kvmig.core.model_sizes import sizes_in
from kvmig.core.order_fence import OrderFence, OrderToken
from kvmig.fleet.orders import (
    CheckFlags,
    DeployedProgram,
    DeployedPrograms,
    DeploymentEnded,
    DeploymentStarted,
    FlagsChecked,
    LeaveLead,
    LoadEngine,
    News,
    Program,
    StartDeployment,
    StepDown,
    StopDeployment,
    encode,
    order_of,
)
from kvmig.fleet.process_logs import last_of, last_sentence, size_of, turn_log
from kvmig.fleet.settings import (
    FleetSettings,
    ServerLaunch,
    environment_of,
    host_and_port,
    make_folders,
)
from kvmig.launcher.fork_servers import ForkServers
from kvmig.mirror.settings import MirrorSettings
from kvmig.process.child import quiet, say
from kvmig.process.fork_server import (
    HANDED,
    NO_FORKS,
    CannotFork,
    ForkOrder,
    ForkServerClient,
)
from kvmig.process.hidden_words import start_of
from kvmig.process.kept_child import KeptChild
from kvmig.process.sockets import WAITING_CLIENTS, raise_open_files, take_port
from kvmig.process.supervisor import (
    ChildProcess,
    HeartbeatPipe,
    ProcessPort,
    first_of,
    hangs,
    how_it_ended,
)
from kvmig.process.watchdog import SOCKET as NOTIFY
from kvmig.process.watchdog import notify_manager
from kvmig.proxy.messages import ProxyLaunch
from kvmig.rpc.unix_packets import QueuedPackets

FORKS = "kvmig.fleet.fork_server"
SERVE, QUICK_CHECK = "kvmig.serve", "kvmig.launcher.quick_check"
SMALL: Mapping[Program, str] = {
    "unit": "kvmig.sharing.__main__", "command": "kvmig.command.__main__",
}  # fmt: skip
"""Modules of the programs that need no engine."""
BEATS = "--heartbeat-descriptor"
"""Flag of a deployment: the descriptor's number follows as the last word."""
WILDCARDS = ("0.0.0.0", "::")  # noqa: S104  compared with, not bound
"""Addresses of sockets that have all addresses of their host."""
SERVER, PROXY = "kvmig.fleet.server", "kvmig.proxy.__main__"
MIRROR, HUB_HOST = "kvmig.mirror.__main__", "127.0.0.1"
READY_S = 60.0
"""Timeout of the start of the server or a proxy."""
GRACE_S = 20.0
"""Time for a deployment to end, beyond the time that its requests get."""
CHECK_S = 60.0
"""Timeout of reading flags."""
HANG_S = 30.0
"""A deployment without a heartbeat for this time is ended. Its launcher may read an engine's flags
in its event loop, which takes seconds on a busy machine."""
LOG_LOOK_S = 5.0
STANDBY_S = 10 * 365 * 86400.0
"""Time that a standby's server waits for the lead."""
AGAIN_S = 2.0
"""Pause before a standby's server that has died starts again."""
STEPPED_DOWN = 3
"""Exit code where another host's server leads."""

log = logging.getLogger(__name__)


def up(settings: FleetSettings) -> int:
    """Serve a fleet until a signal; the exit code. Raises ConfigError."""
    quiet("init")
    raise_open_files()
    make_folders(settings)
    with only_one(settings):
        while True:
            status = _run_once(settings)
            if status != STEPPED_DOWN or not settings.standby:
                return status


def _run_once(settings: FleetSettings) -> int:
    """Serve until a signal, or until another host leads; the exit code. Raises ConfigError."""
    with contextlib.ExitStack() as held:
        sock = held.enter_context(take_port(settings.host, settings.port))
        hub = peers = None
        if settings.hub_port:
            listens = not settings.standby
            hub = take_port(HUB_HOST, settings.hub_port, "--hub-port", listens=listens)
            held.enter_context(hub)
        if settings.standby:
            peers = take_port(settings.host, settings.peer_port, "--peer-port", listens=False)
            held.enter_context(peers)
        return asyncio.run(FleetSupervisor(settings, sock, hub, peers).run())


@contextlib.contextmanager
def only_one(settings: FleetSettings) -> Iterator[None]:
    """Hold the folder. Raises ConfigError if another supervisor does, with its process id."""
    with settings.path("run", "init.pid").open("a+") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            held.seek(0)
            raise ConfigError(
                f"--data {settings.data} is in use by process {held.read().strip()}"
            ) from error
        held.truncate(0)
        held.write(f"{os.getpid()}\n")
        held.flush()
        yield


@dataclass(eq=False)
class RunningDeployment:
    """A deployment that runs, or is just being started."""

    start: StartDeployment
    lifeline: int = -1
    """Our end of its stdin."""
    process: ProcessPort | None = None
    ending: bool = False
    heartbeats: HeartbeatPipe | None = None
    log_from: int = 0
    """Position at which its log begins: earlier lines belong to others."""
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self) -> None:
        """Close the deployment's stdin, which ends it."""
        self.ending = True
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1

    def kill(self) -> None:
        """End the deployment now, with the processes that it has started."""
        self.ending = True
        kill_group(self.process)


def kill_group(process: ProcessPort | None) -> None:
    """End a process now, with those that it has started, unless it has ended."""
    if process is not None and process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def module_of(program: Program, settings: FleetSettings) -> str:
    """The module of a program that needs no engine. Raises StartupError for one that this fleet
    does not run."""
    if program == "command" and not settings.allow_commands:
        raise StartupError("this fleet runs no commands (kvmig up --allow-commands)")
    return SMALL[program]


def running(deployments: Iterable[RunningDeployment]) -> DeployedPrograms:
    """The report to the next server, with the deployment that is just being forked."""
    return DeployedPrograms(
        tuple(
            DeployedProgram(
                one.start.deployment,
                one.start.engine,
                one.start.note,
                0 if one.process is None else one.process.pid,
                one.start.program,
            )
            for one in deployments
        )
    )


async def by_itself(
    module: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    standard: tuple[int, int, int],
    *more: int,
) -> asyncio.subprocess.Process:
    """`python -m module words`, whose secrets `ps` doesn't show. more: descriptors, whose numbers
    follow the words. Raises OSError."""
    start = start_of(module, words, environment, *more)
    return await asyncio.create_subprocess_exec(
        *start.command,
        stdin=standard[0], stdout=standard[1], stderr=standard[2], env=dict(start.environment),
        pass_fds=more, process_group=0,
    )  # fmt: skip


class FleetSupervisor:
    """The parent of all processes of a fleet; `run` it inside an event loop."""

    def __init__(
        self,
        settings: FleetSettings,
        sock: socket.socket,
        hub: socket.socket | None = None,
        peers: socket.socket | None = None,
    ) -> None:
        """sock: where clients connect to. hub: the same for the mirror, peers: for the relays of
        other hosts; None: there are none. A standby doesn't listen for the latter two yet; its
        clients' calls go to the host that leads."""
        self._settings = settings
        self._sock = sock
        self._hub = hub
        self._peers = peers
        self._engine_forks = ForkServers(settings.fork_server, partial(environment_of, settings))
        self._forks: ForkServerClient | None = None
        """Fork server of the server and the proxies."""
        self._deployments: dict[str, RunningDeployment] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: QueuedPackets | None = None
        """Our end of the socket to the server that lives now."""
        self._fence = OrderFence()
        """The fence of servers' orders. No file keeps it: servers and deployments end with init."""
        self._stop = asyncio.Event()
        self._at_once = asyncio.Event()
        self._serves = False
        """Whether this host's server has led since its start."""
        self._stepped_down = False
        """Whether another host's server leads."""

    async def run(self) -> int:
        """Run until a signal, or until another host leads."""
        loop = asyncio.get_running_loop()
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, self._signalled)
        standby = self._settings.standby
        ready_s = STANDBY_S if standby else READY_S
        server = KeptChild("the server", self._begin_server, ready_s)
        proxies = [
            KeptChild(f"proxy {number}", partial(self._begin_proxy, number), READY_S)
            for number in range(self._settings.proxies)
        ]
        relays = [
            KeptChild(f"relay {number}", partial(self._begin_relay, number), READY_S)
            for number in range(self._settings.proxies if standby else 0)
        ]
        if self._hub is not None:
            begin = partial(self._begin_mirror, self._hub)
            proxies.append(KeptChild("the mirror", begin, READY_S))
        self._task(keep_running(self._turn_logs, "logs"), "logs")
        self._task(keep_running(self._engine_forks.watch, "fork servers"), "fork servers")
        try:
            if standby:  # a standby is ready, too
                self._task(keep_running(notify_manager, "signs of life"), "signs of life")
            await asyncio.gather(*(relay.start() for relay in relays))
            if await self._leads(server):
                await self._serve(proxies)
                self._task(self._stop_all(relays), "end of relays")
                if not standby:
                    self._task(keep_running(notify_manager, "signs of life"), "signs of life")
                await self._stop.wait()
        except StartupError as error:
            say(str(error))
            return 1
        finally:
            say("stopping")
            await self._end([*relays, *proxies], server)
        return STEPPED_DOWN if self._stepped_down else 0

    async def _leads(self, server: KeptChild) -> bool:
        """Start the server, a standby's again and again until it leads; False: a signal came first.

        Raises StartupError.
        """
        while True:
            try:
                return await self._started_server(server)
            except StartupError as error:
                if not self._settings.standby:
                    raise
                say(f"{error}, again in {AGAIN_S:g} s")
            await server.stop(0.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S):
                    await self._stop.wait()
                    return False

    async def _started_server(self, server: KeptChild) -> bool:
        """Start the server once; False: a signal came first. Raises StartupError."""
        stop = asyncio.create_task(self._stop.wait())
        starting = asyncio.create_task(server.start())
        try:
            await asyncio.wait((stop, starting), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
            return starting.done()
        finally:
            await cancel_tasks(stop, starting)

    async def _serve(self, proxies: list[KeptChild]) -> None:
        """Let clients in. Raises StartupError."""
        self._serves = True
        for one in filter(None, (self._sock, self._hub, self._peers)):
            try:
                one.listen(WAITING_CLIENTS)
            except OSError as error:
                at = host_and_port(*one.getsockname()[:2])
                raise StartupError(f"{at} can't be used: {error}") from error
        await asyncio.gather(*(proxy.start() for proxy in proxies))
        say(f"serving on {self._settings.url}, files are in {self._settings.data}")
        if self._settings.hub_port:
            say(f"a mirror of the hub: HF_ENDPOINT=http://{HUB_HOST}:{self._settings.hub_port}")

    def _signalled(self) -> None:
        self._stepped_down = False  # it will not wait for the lead
        (self._at_once if self._stop.is_set() else self._stop).set()

    def _patience_s(self) -> float:
        """Time for a process to end in order."""
        return 0.0 if self._at_once.is_set() else self._settings.shutdown_timeout_s + GRACE_S

    async def _end(self, proxies: list[KeptChild], server: KeptChild) -> None:
        """End clients' streams, then the rest; nothing is left behind."""
        timeout_s = self._settings.shutdown_timeout_s
        for one in filter(None, (self._sock, self._hub, self._peers)):
            one.close()  # or clients that connect now would wait for nothing
        if self._settings.standby:
            self._tell(LeaveLead())  # it counts what calls use until all have ended
        await self._stop_all(proxies)
        if not self._settings.standby:
            await server.stop(self._patience_s())
        for deployment in self._deployments.values():
            deployment.end()
        waits = [one.done.wait() for one in self._deployments.values()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s + GRACE_S):
                await asyncio.gather(*waits)
        for deployment in self._deployments.values():
            deployment.kill()
        await server.stop(self._patience_s())
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._engine_forks.close()
        if self._forks is not None:
            self._forks.close()

    async def _stop_all(self, children: Iterable[KeptChild]) -> None:
        """Let proxies end, once their calls have."""
        await asyncio.gather(*(one.stop(self._patience_s()) for one in children))

    def _task(self, work: Awaitable[None], name: str) -> None:
        async def run() -> None:
            await work

        task = asyncio.create_task(run(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- the server and the proxies

    async def _begin_server(self, heartbeat: int) -> ChildProcess:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._forget_server()
        with theirs:
            spawn = partial(self._fork, SERVER, (theirs.fileno(), heartbeat))
            launch = ServerLaunch(self._settings, tuple(self._deployments), self._door())
            child = await ChildProcess.start("the server", spawn, launch)
        self._server = QueuedPackets(ours, self._hear, self._forget_server)
        self._server.listen()
        self._tell(running(self._deployments.values()))
        return child

    def _door(self) -> str:
        """HOST:PORT for the relays of other hosts; empty: there are none."""
        if self._peers is None:
            return ""
        host, port = self._peers.getsockname()[:2]
        return f":{port}" if host in WILDCARDS else host_and_port(host, port)

    async def _begin_relay(self, number: int, heartbeat: int) -> ChildProcess:
        launch = msgspec.structs.replace(self._proxy_launch(number), relays=True)
        spawn = partial(self._fork, PROXY, (self._sock.fileno(), heartbeat))
        return await ChildProcess.start("a relay", spawn, launch)

    async def _begin_proxy(self, number: int, heartbeat: int) -> ChildProcess:
        descriptors = [self._sock.fileno(), heartbeat]
        if self._peers is not None:
            descriptors.append(self._peers.fileno())
        spawn = partial(self._fork, PROXY, descriptors)
        return await ChildProcess.start("a proxy", spawn, self._proxy_launch(number))

    def _proxy_launch(self, number: int) -> ProxyLaunch:
        return ProxyLaunch(
            name=f"proxy-{secrets.token_hex(4)}",
            number=number,
            tallies=str(self._settings.path("run", "limits")),
            links=str(self._settings.links),
            api=str(self._settings.api),
            snapshot=str(self._settings.path("run", "snapshot")),
            pepper=str(self._settings.path("pepper")),
            shutdown_timeout_s=self._settings.shutdown_timeout_s,
            allowed_origins=self._settings.allowed_origins,
            certificate=self._settings.certificate,
        )

    async def _begin_mirror(self, hub: socket.socket, heartbeat: int) -> ChildProcess:
        launch = MirrorSettings(
            folder=str(self._settings.path("mirror")),
            host=HUB_HOST,
            port=self._settings.hub_port,
            most_bytes=self._settings.hub_bytes,
        )
        spawn = partial(self._fork, MIRROR, (hub.fileno(), heartbeat))
        return await ChildProcess.start("the mirror", spawn, launch)

    async def _fork(
        self, module: str, descriptors: Sequence[int], stdin: int, announced: int
    ) -> ProcessPort:
        """The server, or a proxy: a fork; a process of its own where that can't be had.

        Raises OSError.
        """
        descriptors = (announced, *descriptors)
        try:
            order = ForkOrder(module, (self._settings.data,), dict(os.environ))
            return await self._own_forks().carry_out(order, (stdin, 1, 2, *descriptors))
        except StartupError as error:
            log.warning("%s; %s starts by itself, which takes longer", error, module)
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, self._settings.data, *map(str, descriptors),
            stdin=stdin, pass_fds=descriptors,
        )  # fmt: skip

    def _own_forks(self) -> ForkServerClient:
        """What the server and the proxies are forked from. Raises StartupError."""
        if self._forks is None or self._forks.gone:
            self._forks = ForkServerClient.begin(FORKS, os.environ)
        return self._forks

    def _forget_server(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _hear(self, packet: bytes) -> None:
        order = order_of(packet)
        if why := self._fence.refuse(OrderToken(order.term)):
            log.warning("%s is not carried out: %s", type(order).__name__, why)
            return
        match order:
            case StartDeployment() as start:
                self._task(self._deploy(start), f"deployment {start.deployment}")
            case StopDeployment(deployment, kill):
                if (found := self._deployments.get(deployment)) is not None:
                    self._task(self._end_deployment(found, kill), f"end of {deployment}")
            case CheckFlags() as check:
                self._task(self._check(check), "check of flags")
            case StepDown(leader, leads) if self._serves:
                self._fence.refuse(OrderToken(leads))
                say(f"{leader} leads the fleet now: all ends here, and this host waits")
                self._stepped_down = True
                self._stop.set()
            case StepDown():
                pass  # a standby's, which waits
            case LoadEngine(engine):
                self._task(self._load(engine), f"fork server of {engine}")

    def _tell(self, news: News) -> None:
        """Send news to the server; a server that is gone asks again when it is back."""
        if self._server is not None:
            self._server.send(encode(news))

    # -- deployments

    async def _load(self, engine: str) -> None:
        try:
            await self._engine_forks.server(engine)
        except CannotFork:
            return
        except StartupError as error:
            log.warning("%s; deployments start by themselves, which takes longer", error)

    async def _deploy(self, start: StartDeployment) -> None:
        """Run a deployment from its start to its end."""
        deployment = self._deployments[start.deployment] = RunningDeployment(start)
        try:
            process = await self._spawn(deployment)
            self._tell(DeploymentStarted(start.deployment, process.pid))
            how = await lives(process, deployment.heartbeats, f"deployment {start.deployment}")
        except (OSError, StartupError) as error:
            how = f"it can't be started: {error}"
        except Exception as error:  # the server would wait for its end
            log.exception("deployment %s", start.deployment)
            how = f"it can't be started: {error!r}"
        finally:
            deployment.end()
            deployment.kill()
            if deployment.heartbeats is not None:
                deployment.heartbeats.close()
            deployment.done.set()
            del self._deployments[start.deployment]
            self._remove_socket(start.deployment)
        self._tell(
            DeploymentEnded(
                start.deployment, how, last_sentence(Path(start.log), deployment.log_from)
            )
        )

    def _remove_socket(self, deployment: str) -> None:
        """Remove what a deployment has left that was killed."""
        try:
            self._settings.deployment(deployment).unlink(missing_ok=True)
        except OSError as error:  # the server is told of the end all the same
            log.warning("the socket of deployment %s stays: %s", deployment, error)

    async def _spawn(self, deployment: RunningDeployment) -> ProcessPort:
        """A fork; a process of its own where none can be had.

        Raises OSError.
        """
        start = deployment.start
        with contextlib.ExitStack() as ours:
            stdin, deployment.lifeline = os.pipe()
            ours.callback(os.close, stdin)
            heartbeats = deployment.heartbeats = HeartbeatPipe()
            deployment.log_from = size_of(Path(start.log))
            out = os.open(start.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            ours.callback(os.close, out)
            words, standard = (*start.words, BEATS), (stdin, out, out)
            if start.program == "serve":
                begun = self._started(start.engine, words, standard, heartbeats.descriptor)
            else:
                begun = self._begin_small(start.program, words, standard, heartbeats.descriptor)
            deployment.process = await begun
        if deployment.ending:  # it was told so meanwhile
            deployment.kill()
        return deployment.process

    async def _started(
        self,
        engine: str,
        words: Sequence[str],
        standard: tuple[int, int, int],
        *more: int,
    ) -> ProcessPort:
        """A `kvmig.serve`, forked where that can be had. more: descriptors, whose numbers follow
        the words. Raises OSError."""
        environment: Mapping[str, str] = {
            **environment_of(self._settings), HANDED: self._engine_forks.address(engine)
        }  # fmt: skip
        try:
            return await self._forked(engine, words, environment, standard, *more)
        except CannotFork:
            environment = {**environment, HANDED: NO_FORKS}
        except StartupError as error:
            log.warning("%s; a deployment starts by itself, which takes longer", error)
        return await by_itself(SERVE, words, environment, standard, *more)

    async def _begin_small(
        self,
        program: Program,
        words: Sequence[str],
        standard: tuple[int, int, int],
        *more: int,
    ) -> ProcessPort:
        """What needs no engine, as `_started`. Raises OSError, StartupError."""
        module = module_of(program, self._settings)
        environment = environment_of(self._settings)
        environment.pop(NOTIFY, None)  # the supervisor says itself that it lives
        try:
            order = ForkOrder(module, words, environment)
            return await self._own_forks().carry_out(order, (*standard, *more))
        except StartupError as error:
            log.warning("%s; %s starts by itself, which takes longer", error, module)
        return await by_itself(module, words, environment, standard, *more)

    async def _forked(
        self,
        engine: str,
        words: Sequence[str],
        environment: Mapping[str, str],
        standard: tuple[int, int, int],
        *more: int,
    ) -> ProcessPort:
        """A `kvmig.serve` of its engine's fork server. Raises StartupError, CannotFork."""
        forks = await self._engine_forks.server(engine)
        order = ForkOrder(SERVE, words, environment)
        return await forks.carry_out(order, (*standard, *more))

    async def _checker(
        self, check: CheckFlags, environment: Mapping[str, str], standard: tuple[int, int, int]
    ) -> ProcessPort:
        """A process that reads flags: the engine's own parser, if that is loaded somewhere.

        Raises OSError, StartupError.
        """
        words = (*check.words, "--check", *(["--sizes"] if check.sizes else []))
        try:
            return await self._forked(check.engine, words, environment, standard)
        except CannotFork:
            order = ForkOrder(QUICK_CHECK, check.words, environment)
            return await self._own_forks().carry_out(order, standard)
        except StartupError as error:
            log.warning("%s; flags are checked by a process that takes longer", error)
        return await by_itself(SERVE, words, environment, standard)

    async def _check(self, check: CheckFlags) -> None:
        """Read a deployment's flags as it would, in a process like its own."""
        process: ProcessPort | None = None
        sizes = ""
        try:
            with tempfile.TemporaryFile() as said:
                standard = said.fileno(), said.fileno(), said.fileno()
                process = await self._checker(check, environment_of(self._settings), standard)
                async with asyncio.timeout(CHECK_S):
                    code = await process.wait()
                said.seek(0)
                lines = said.read().decode(errors="replace").splitlines()
        except (OSError, StartupError) as error:  # a TimeoutError too
            wrong = f"the flags can't be checked: {str(error) or 'it takes too long'}"
        except Exception as error:  # the server would wait for what was found
            log.exception("the flags of a model can't be checked")
            wrong = f"the flags can't be checked: {error!r}"
        else:
            wrong = (last_of(lines) or how_it_ended(code)) if code else ""
            sizes = "" if wrong else sizes_in(lines)
        finally:
            kill_group(process)  # its stdin is no pipe that ends
        self._tell(FlagsChecked(check.check, wrong, sizes))

    async def _end_deployment(self, deployment: RunningDeployment, kill: bool) -> None:
        deployment.end()
        if not kill:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.shutdown_timeout_s + GRACE_S):
                    await deployment.done.wait()
                    return
        deployment.kill()

    async def _turn_logs(self) -> None:
        while True:
            await asyncio.sleep(LOG_LOOK_S)
            for path in self._settings.path("logs").glob("*.log"):
                try:
                    await asyncio.to_thread(turn_log, path)
                except OSError as error:
                    log.warning("%s is not shortened: %s", path, error)


async def lives(process: ProcessPort, heartbeats: HeartbeatPipe | None, name: str) -> str:
    """Wait for the end of a deployment, and end it when it hangs; how it ended.

    Its heartbeats count from the first one: it sends them once it serves.
    """

    async def ends() -> str:
        return how_it_ended(await process.wait())

    if heartbeats is None:
        return await ends()
    how = await first_of(ends(), hangs(heartbeats, process.pid, HANG_S, from_first=True))
    kill_group(process)
    await await_killed(process, name)
    return how
