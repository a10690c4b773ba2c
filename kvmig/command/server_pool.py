"""The servers of one deployment: started, watched, started again, drained, and chosen for calls.

An instance is one server of the user's, a name that stays over its restarts. A server that dies or
hangs after it has served starts again under its name; one that was never ready has failed, and the
fleet takes it out.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from kvmig.asgi.errors import OrderFailed
from kvmig.command.call_turns import CallTurns
from kvmig.command.launch import CommandLaunch
from kvmig.command.server_environment import server_environment
from kvmig.command.server_process import ServerProcess
from kvmig.command.template import filled, uses
from kvmig.core.api_records import InstanceRow
from kvmig.core.background import cancel_tasks
from kvmig.core.clock import TimeSource, monotonic
from kvmig.core.config import instance_name
from kvmig.core.errors import StartupError
from kvmig.core.open_files import lacks_descriptor
from kvmig.process.child import say
from kvmig.process.port_owners import strangers_at
from kvmig.process.sockets import free_port
from kvmig.process.supervisor import deaths_in_a_row, first_of, restart_pause
from kvmig.process.unix_connections import connect_unix

LOOK_S = 0.2
"""Pause between two looks whether a server is ready."""
PROBE_S = 5.0
"""Pause between two looks whether it still is."""
ANSWER_S = 10.0
"""Timeout of an answer to such a look."""
CONNECT_S = 10.0
"""Timeout of a connection for a call."""
MOST_RESTARTS = 5
"""Restarts in a row of a server that dies soon after each; then it has failed."""
SOCKET_BYTES = 107
"""Longest path of a Unix socket."""
UNMOVABLE = "another engine's requests can't be moved: they end where they run"

log = logging.getLogger(__name__)


@dataclass(eq=False)
class ServerInstance:
    """One server, as calls and rows see it."""

    name: str
    gpus: tuple[str, ...] = ()
    unit: str = ""
    state: str = "starting"
    detail: str = ""
    address: str = ""
    """The path of its socket, or 127.0.0.1 and a port."""
    pid: int = 0
    running: int = 0
    """Calls that it works for."""
    sent: int = 0
    """Calls that it ever got."""
    heard_at: float = 0.0
    """When something last came from it."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it works for no call."""
    freed: Callable[[], None] = lambda: None
    """Called when one of its calls is over."""
    life: asyncio.Task[None] | None = None
    leaving: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.idle.set()

    def begin_call(self) -> None:
        """Count one more call of this server."""
        self.running += 1
        self.sent += 1
        self.idle.clear()

    def end_call(self) -> None:
        """Count that one of its calls is over."""
        self.running -= 1
        if not self.running:
            self.idle.set()
        self.freed()

    async def connect(self, protocol: Callable[[], asyncio.Protocol]) -> asyncio.Protocol | None:
        """A connection to it; None: it takes none."""
        try:
            if self.address.startswith("/"):
                return await connect_unix(protocol, self.address, CONNECT_S)
            host, _, port = self.address.rpartition(":")
            async with asyncio.timeout(CONNECT_S):
                _, made = await asyncio.get_running_loop().create_connection(
                    protocol, host, int(port)
                )
        except OSError:  # a TimeoutError, too
            return None
        return made


class ServerPool:
    """The servers of a command; make it inside a running event loop.

    Call `start`, `first_ready`, and at the end `close`.
    """

    def __init__(self, launch: CommandLaunch, clock: TimeSource = monotonic) -> None:
        self._launch = launch
        self._clock = clock
        self._instances: dict[str, ServerInstance] = {}
        self._next = 0
        self.turns = CallTurns(lambda: list(self._instances.values()), launch.parallel)
        self._changed = asyncio.Event()
        """Set at each change of an instance's state; who waits for it clears it."""

    # -- what there is

    def rows(self) -> list[InstanceRow]:
        """Rows of all instances, as the admin API has them."""
        return [
            InstanceRow(
                id=one.name,
                state=one.state,
                detail=one.detail,
                model=self._launch.model,
                endpoint=one.address,
                running=one.running,
                unmovable=UNMOVABLE,
                unit=one.unit,
                pid=one.pid,
                host=socket.gethostname(),
                gpus=one.gpus,
            )
            for one in self._instances.values()
        ]

    @property
    def vacant(self) -> bool:
        """Whether no instance takes calls."""
        return not any(one.state == "serving" for one in self._instances.values())

    # -- orders

    def start(self) -> None:
        """Begin with the first instances."""
        for name in self._launch.pass_environment:
            if name not in os.environ:
                say(f"pass_environment has {name}, which `kvmig up` doesn't have")
        for at in range(self._launch.instances):
            self._begin(self._launch.gpus.get(instance_name(at), ()))

    async def first_ready(self) -> None:
        """Return once an instance serves. Raises StartupError when all have failed."""
        while self.vacant:
            self._changed.clear()
            if why := self._why_given_up():
                raise StartupError(why)
            await self._changed.wait()

    async def given_up(self) -> str:
        """Return once all instances have failed for good; why the first one has."""
        while not (why := self._why_given_up()):
            self._changed.clear()
            await self._changed.wait()
        return why

    def _why_given_up(self) -> str:
        every = self._instances.values()
        return next(
            (one.detail for one in every if all(each.state == "failed" for each in every)), ""
        )

    def add(self, count: int, gpus: Sequence[str] = (), unit: str = "") -> list[str]:
        """Start more; their names. Raises OrderFailed for more than there may be."""
        most = self._launch.most
        if len(self._instances) + count > most:
            raise OrderFailed(
                "conflict",
                f"count is {count}, must be at most {most - len(self._instances)}: there are"
                f" {len(self._instances)} instances of {most} (instances.max)",
            )
        return [self._begin(tuple(gpus), unit).name for _ in range(count)]

    def drain(self, name: str, *, last: bool = False) -> ServerInstance:
        """Send a server no more calls. Raises OrderFailed if there is no such server, and for the
        last one that serves, unless `last` is set."""
        instance = self._found(name)
        others = any(
            one.state == "serving" for one in self._instances.values() if one is not instance
        )
        if instance.state == "serving" and not others and not last:
            raise OrderFailed("conflict", f"{name} is the only instance that serves, and stays")
        if instance.state != "failed":
            self._set(instance, "draining", "its calls end where they run")
        return instance

    def stop_drain(self, name: str) -> ServerInstance:
        """Send a server calls again. Raises OrderFailed."""
        instance = self._found(name)
        if instance.state != "draining" or instance.leaving is not None or not instance.pid:
            raise OrderFailed("conflict", f"{name} is {instance.state}, and does not only drain")
        self._set(instance, "serving")
        return instance

    def remove(
        self, name: str, *, now: bool = False, last: bool = False, deadline_s: float | None = None
    ) -> ServerInstance:
        """End a server once its calls have ended, or after deadline_s; now: at once. Raises
        OrderFailed."""
        instance = self.drain(name, last=last or now)
        if instance.leaving is not None and now:
            instance.leaving.cancel()
            instance.leaving = None
        if instance.leaving is None:
            work = self._leave(instance, 0.0 if now else deadline_s)
            instance.leaving = asyncio.create_task(work, name=f"end of {name}")
        return instance

    async def close(self) -> None:
        """End all, at once."""
        leaving = [one.leaving for one in self._instances.values()]
        await cancel_tasks(*leaving, *(one.life for one in self._instances.values()))

    # -- one instance

    def _found(self, name: str) -> ServerInstance:
        if (found := self._instances.get(name)) is None:
            raise OrderFailed("unknown", f"there is no instance {name!r:.100}")
        return found

    def _set(self, instance: ServerInstance, state: str, detail: str = "") -> None:
        instance.state, instance.detail = state, detail
        self._tell_change()

    def _tell_change(self) -> None:
        self._changed.set()
        self.turns.grant()

    def _begin(self, gpus: tuple[str, ...], unit: str = "") -> ServerInstance:
        instance = ServerInstance(instance_name(self._next), gpus, unit, freed=self.turns.grant)
        self._next += 1
        self._instances[instance.name] = instance
        instance.life = asyncio.create_task(self._live(instance), name=instance.name)
        self._tell_change()
        return instance

    async def _leave(self, instance: ServerInstance, deadline_s: float | None) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                await instance.idle.wait()
        except TimeoutError:
            pass  # its calls had their time
        await cancel_tasks(instance.life)
        del self._instances[instance.name]
        self._tell_change()

    async def _live(self, instance: ServerInstance) -> None:
        """Keep a server running, until the task is cancelled or the server fails for good."""
        try:
            await self._keep_running(instance)
        except Exception as error:  # the others go on
            log.exception("instance %s", instance.name)
            self._set(instance, "failed", f"instance {instance.name}: {error!r}")

    async def _keep_running(self, instance: ServerInstance) -> None:
        deaths = 0
        while True:
            ready_at: list[float] = []
            try:
                how = await self._run(instance, ready_at)
            except StartupError as error:
                how = str(error)
            how = f"instance {instance.name}: {how}; its log says more"
            say(how)
            served_s = self._clock() - ready_at[0] if ready_at else 0.0
            deaths = deaths_in_a_row(deaths, served_s)
            if (not ready_at and deaths == 1) or deaths > MOST_RESTARTS:
                self._set(instance, "failed", how)
                return
            if instance.state != "draining":
                self._set(instance, "starting", how)
            await asyncio.sleep(restart_pause(deaths))

    async def _run(self, instance: ServerInstance, ready_at: list[float]) -> str:
        """One server, from its start to its end; how it ended. ready_at: gets the time at which it
        was ready. Raises StartupError."""
        launch = self._launch
        instance.address = self._new_address(instance)
        words = filled(launch.command, self._values(instance))
        environment = server_environment(os.environ, launch.pass_environment, instance.gpus)
        process = await ServerProcess.start(words, environment)
        try:
            instance.pid = process.pid
            client = client_of(instance.address)
            async with client:
                try:
                    async with asyncio.timeout(launch.start_timeout_s):
                        how = await first_of(process.ended(), self._ready(client))
                except TimeoutError as error:
                    late = f"{launch.health} was not answered with 200"
                    raise StartupError(f"{late} within {launch.start_timeout_s:g} s") from error
                if how:
                    raise StartupError(f"{words[0]} ended before it was ready ({how})")
                await _check_owner(instance)
                ready_at.append(self._clock())
                instance.heard_at = self._clock()
                if instance.state != "draining":
                    self._set(instance, "serving")
                return await first_of(process.ended(), self._hangs(instance, client))
        finally:
            instance.pid = 0
            await process.stop()
            remove_socket(instance.address)

    async def _ready(self, client: httpx.AsyncClient) -> str:
        while True:
            if await answers(client, self._launch.health):
                return ""
            await asyncio.sleep(LOOK_S)

    async def _hangs(self, instance: ServerInstance, client: httpx.AsyncClient) -> str:
        """Return once nothing comes from it any more."""
        most_s = self._launch.hang_timeout_s
        while self._clock() - instance.heard_at < most_s:
            await asyncio.sleep(min(PROBE_S, most_s / 4))
            if await answers(client, self._launch.health) is not False:
                instance.heard_at = self._clock()
        return f"nothing came from it for {most_s:g} s: it was ended"

    def _values(self, instance: ServerInstance) -> Mapping[str, str]:
        launch = self._launch
        return {
            "model": launch.source,
            "name": launch.model,
            "port": instance.address.rpartition(":")[2],
            "socket": instance.address,
            "device": ",".join(instance.gpus) or "cpu",
            "memory": str(launch.memory),
            "gpu_memory": str(launch.gpu_memory),
        }

    def _new_address(self, instance: ServerInstance) -> str:
        """The address of its next server. Raises StartupError."""
        if not uses(self._launch.command, "socket"):
            return f"127.0.0.1:{free_port()}"
        path = f"{self._launch.uds.removesuffix('.sock')}-{instance.name}"
        if len(os.fsencode(path)) > SOCKET_BYTES:
            raise StartupError(f"{path} is longer than the {SOCKET_BYTES} bytes of a Unix socket")
        remove_socket(path)
        return path


async def _check_owner(instance: ServerInstance) -> None:
    """Raises StartupError where another user's process has taken the port before the server."""
    if instance.address.startswith("/"):
        return
    port = instance.address.rpartition(":")[2]
    if others := await asyncio.to_thread(strangers_at, int(port), instance.pid, os.getuid()):
        users = ", ".join(map(str, sorted(others)))
        raise StartupError(f"port {port} belongs to a process of another user ({users})")


def remove_socket(address: str) -> None:
    """Remove the socket that a server has left, if it had one."""
    if address.startswith("/"):
        Path(address).unlink(missing_ok=True)


def client_of(address: str) -> httpx.AsyncClient:
    """A client of a server there."""
    uds = address if address.startswith("/") else None
    return httpx.AsyncClient(
        base_url="http://server" if uds else f"http://{address}",
        transport=httpx.AsyncHTTPTransport(uds=uds, verify=False),
        timeout=ANSWER_S,
    )


async def answers(client: httpx.AsyncClient, path: str) -> bool | None:
    """Whether the server answers the path with success; None: it was not asked, since this process
    has no file descriptor free."""
    try:
        return (await client.get(path)).is_success
    except httpx.HTTPError as error:
        return None if lacks_descriptor(error) else False
