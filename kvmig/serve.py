"""`python -m kvmig.serve MODEL ...`: wires everything; no module imports it.

The launcher reads its flags, starts the instances and the front ends, keeps the scheduler running,
and stops them all at a signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import uvloop

from kvmig.asgi.access import is_loopback
from kvmig.controlplane.messages import ClusterMember
from kvmig.core.background import cancel_tasks
from kvmig.core.config import ClusterConfig, UnitConfig, check, instance_name
from kvmig.core.devices import DeviceRecord
from kvmig.core.errors import ConfigError, KvmigError, TransportError
from kvmig.core.model_sizes import encode_sizes
from kvmig.core.secret import ADMIN_KEY
from kvmig.engines.kind import ALLOW_UNTESTED, EnginePlugin
from kvmig.engines.registry import kind_of
from kvmig.frontend.server import FrontEnd
from kvmig.launcher import flags as kvmig_flags
from kvmig.launcher.cluster import InstanceManager
from kvmig.launcher.control import ControlServer
from kvmig.launcher.environment import (
    available_memory,
    cluster_secret,
    cores,
    gpus,
    memory_flags,
    too_few_files,
    weights_of,
)
from kvmig.launcher.front_end_count import usual_front_ends
from kvmig.launcher.front_ends import FrontEnds, FrontLaunch
from kvmig.launcher.gpu_division import GpuNeed, divide, need_by_flags, no_gpu_for, sized
from kvmig.launcher.gpu_starts import EngineMemory, GpuStarts
from kvmig.launcher.instance_spans import InstanceSpans
from kvmig.launcher.join_link import JoinLink, address_towards, join_of
from kvmig.launcher.launch import LlumletLauncher
from kvmig.launcher.local import LocalHost
from kvmig.launcher.mps_daemon import own_daemon
from kvmig.launcher.ray_launcher import RayLauncher
from kvmig.launcher.scheduler import SchedulerKeeper
from kvmig.launcher.shapes import (
    EngineTrees,
    InstanceShape,
    InstanceShapes,
    own_flags,
    own_gpus,
    own_nodes,
    own_trees,
    own_units,
    shapes_of,
    unit_tokens,
)
from kvmig.launcher.unit_memory import InstanceUnits, UnitArena
from kvmig.process.child import begin_loading, call_at_stdin_end, leave, quiet, say, send_heartbeats
from kvmig.process.fork_server import HANDED, NO_FORKS, SharedForks
from kvmig.process.nvml import missing_devices
from kvmig.process.sockets import listening_at, raise_open_files, take_port
from kvmig.sharing.unit_state import fetch_unit
from kvmig.tracing.collector import check_packages, open_collector
from kvmig.tracing.settings import settings_of


def main(argv: Sequence[str]) -> int:
    """Exit code 0 after a shutdown, 2 for what is wrong before it serves, 1 for later."""
    quiet("kvmig")
    begin_loading()
    try:
        config, rest, help_wanted = kvmig_flags.parse(list(argv))
        kind = kind_of(config.engine)
        if help_wanted is not None:
            return show_help(help_wanted, kind)
        handed = os.environ.get(HANDED, "")
        shares = handed not in ("", NO_FORKS)
        forks = SharedForks(config.engine, handed) if shares else None
        config = with_join(config)
        secret = cluster_secret(os.environ)
        admin_key = os.environ.pop(ADMIN_KEY, "")
        check_packages(settings_of(os.environ))
        if config.allow_untested_vllm:
            os.environ[ALLOW_UNTESTED] = "1"  # all processes of the cluster inherit it
        kind.prepare()
        own = own_flags(config.instance_flags, config.instances)
        trees = own_trees(config.instance_vllm, config.instances, kind.check_tree)
        own_units(config.instance_unit, config.instances)  # refused at the door
        own_gpus(config.instance_gpus, config.instances)
        own_nodes(config.instance_node, config.instances)
        every = [word for words in (rest, *own.values()) for word in words]
        config = with_front_ends(config, kind.needs_one_front_end(every))
        allowed = raise_open_files()
        if few := too_few_files(allowed, config.http.max_waiting, config.lifecycle.front_ends):
            say(few)
        front = FrontLaunch(
            name=f"front-{secrets.token_hex(4)}",
            launcher="",
            secret=secret,
            admin_key=admin_key,
            config=config,
            engine_argv=[*rest, *kind.flags_for(every, config)],
        )
        if config.lifecycle.check:
            argv = front.engine_argv
            shapes_of(kind.parse(argv), argv, own, planned_instances(config), kind.parse)
            for words in [(), *own.values()]:
                kind.check_config(kind.parse([*argv, *words]))
            if config.lifecycle.sizes and (sizes := kind.sizes(kind.parse(argv))) is not None:
                print(encode_sizes(sizes), flush=True)
            return 0
        if config.ray is not None:
            if config.lifecycle.mps:
                raise ConfigError("--mps must be left out with --ray: start the nodes' own daemons")
            return serve(front, own, trees, kind, None)
        with (
            own_daemon(config.lifecycle.mps),
            LocalHost(config.engine, planned_instances(config)) as host,
        ):
            return serve(front, own, trees, kind, host, forks)
    except KvmigError as error:
        say(str(error))
        return 2


def with_join(config: ClusterConfig) -> ClusterConfig:
    """Join the scheduler that the environment names. Raises ConfigError.

    Where it is on another host, control sockets are bound to the address by which this host reaches
    it, unless --control-host names another one.
    """
    join = join_of(os.environ)
    if join is None:
        return config
    host = config.control_host
    if host == ClusterConfig().control_host:
        host = address_towards(join.scheduler)
    return check(msgspec.structs.replace(config, join=join, control_host=host))


def show_help(what: str, kind: EnginePlugin) -> int:
    """Print kvmig's flags; with `all`, the engine's behind them."""
    kvmig_flags.parser().print_help()
    if what == "all":
        kind.prepare()
        kind.print_help()
    return 0


def with_front_ends(config: ClusterConfig, kept: str) -> ClusterConfig:
    """Choose the number of front ends, where it is not given. kept: what the engine would keep in
    one of them alone."""
    if config.lifecycle.front_ends:
        return config
    count = 1 if config.ray is not None else usual_front_ends(cores(), len(gpus()))
    if kept and count > 1:
        say(f"one front end instead of {count}: {kept}")
        count = 1
    lifecycle = msgspec.structs.replace(config.lifecycle, front_ends=count)
    return msgspec.structs.replace(config, lifecycle=lifecycle)


def planned_instances(config: ClusterConfig) -> int:
    """How many instances this machine is shared among."""
    return config.instances if config.scaling is None else config.lifecycle.max_instances


def serve(
    front: FrontLaunch,
    own: Mapping[str, tuple[str, ...]],
    trees: EngineTrees,
    kind: EnginePlugin,
    host: LocalHost | None,
    forks: SharedForks | None = None,
) -> int:
    """Serve until a signal; returns the exit code. own: flags by instance; host: None with Ray.

    forks: what front ends are forked from that have processes of their own.

    Raises KvmigError.
    """
    config, argv = front.config, front.engine_argv
    check_gpu_memory(config, argv, kind, host)
    args = kind.parse(argv)
    if config.load and host is not None:
        choice = kind.choose_load(args, first_gpu(config, host))
        for line in choice.lines:
            say(line)
        argv = [*argv, *choice.words]
        args = kind.parse(argv)
    planned = shapes_of(args, argv, own, planned_instances(config), kind.parse)
    config = in_units(config, unit_tokens(planned, config.migration.mixed_shapes), kind)
    shared: InstanceUnits | None = None
    if config.unit is not None:
        config, shared = joining(config, config.unit, args)
        if host is not None and host.all_cores:
            say(
                "OMP_NUM_THREADS is not set: instances here take all cores, as those of the unit's"
                " other servers do, and wait for each other; give each server its part"
            )
    with listening(config.http.uds, args) as sock:
        if host is not None:
            kind.check_gpus(args, host.gpus)
        if host is not None and kind.shares_memory and not host.gpus:
            argv = [*argv, *parts_of_memory(argv, args, planned, host, shared)]
        gpus = None if host is None else divided(host, config, kind, args, argv, planned, shared)
        first = planned[: config.instances]
        units = config.migration.unit_tokens
        shapes = InstanceShapes(argv, own, first, units, kind.parse, trees, kind.check_tree)
        name, whose = secrets.token_hex(4), whose_server(args, sock)
        cluster = InstanceManager(
            name,
            config,
            front.secret,
            shapes,
            launcher_on(host, name, config, args, planned, gpus),
            lambda argv: kind.weights(kind.parse(argv)),
            own_units(config.instance_unit, config.instances),
            whose,
            own_gpus(config.instance_gpus, config.instances),
            own_nodes(config.instance_node, config.instances),
        )
        front = msgspec.structs.replace(front, config=config, engine_argv=argv, whose=whose)
        return uvloop.run(ClusterServer(cluster, front, args, sock, forks).run())


def check_gpu_memory(
    config: ClusterConfig, argv: Sequence[str], kind: EnginePlugin, host: LocalHost | None
) -> None:
    """Raise ConfigError where no instance can keep to bytes of its own. host: None with Ray."""
    each = config.lifecycle.instance_gpu_memory
    if not each:
        return
    if not kind.shares_memory:
        wrong = f"left out with --engine {config.engine}, which takes what it needs"
    elif config.unit is not None:
        wrong = "left out with --unit: the unit divides the memory"
    elif sized(argv):
        wrong = "left out with flags of the engine that set how much memory it takes"
    elif host is not None and not host.inventory.devices:
        raise ConfigError(no_gpu_for(each, host.inventory.node))
    else:
        return
    raise ConfigError(f"--instance-gpu-memory is {each}, must be {wrong}")


def first_gpu(config: ClusterConfig, host: LocalHost) -> DeviceRecord | None:
    """A GPU that an instance gets; None: they run on the CPU."""
    wanted = [
        one for ids in own_gpus(config.instance_gpus, config.instances).values() for one in ids
    ]
    devices = {one.id: one for one in host.inventory.devices}
    return next((devices[one] for one in (*wanted, *devices) if one in devices), None)


def parts_of_memory(
    argv: Sequence[str],
    args: Namespace,
    planned: Sequence[InstanceShape],
    host: LocalHost,
    shared: InstanceUnits | None,
) -> list[str]:
    """Flags that share the host's memory among the planned instances. Raises ConfigError.

    shared: the units whose KV cache they share; None: none.
    """
    return memory_flags(
        argv,
        args.kv_cache_memory_bytes,
        [shape.workers for shape in planned],
        len(host.gpus),
        available_memory() - (0 if shared is None else shared.kept),
        os.environ,
        counted_weights(args),
        0 if shared is None else shared.largest,
    )


def counted_weights(args: Namespace) -> int:
    """Bytes of the weights, as far as files on this host have them; prints where they don't."""
    found = weights_of(args.model, str(args.dtype), args.revision)
    if not found and not Path(args.model).is_dir():
        say(
            f"how much memory the weights of {args.model} take is not known: this host's Hugging"
            " Face cache has none of their files. None is counted for them, and a start may find"
            f" too little; `hf download {args.model}` fetches them first"
        )
    return found


def divided(
    host: LocalHost,
    config: ClusterConfig,
    kind: EnginePlugin,
    args: Namespace,
    argv: Sequence[str],
    planned: Sequence[InstanceShape],
    shared: InstanceUnits | None,
) -> GpuStarts:
    """The host's GPUs, divided among the planned instances; prints how. Raises NoRoom."""
    if missing := missing_devices(host.inventory):
        say(missing)
    shapes = {instance_name(number): shape for number, shape in enumerate(planned)}
    division = divide(
        host.inventory.devices,
        {name: shape.workers for name, shape in shapes.items()},
        config.lifecycle.gpu_memory,
        own_gpus(config.instance_gpus, config.instances),
        config.lifecycle.instance_gpu_memory,
    )
    weights = kind.weight_bytes(args) if host.gpus else 0
    if host.gpus and kind.shares_memory:
        counted_weights(args)
    memory = EngineMemory(kind.shares_memory, weights, shared)
    units = own_units(config.instance_unit, config.instances)
    starts = GpuStarts(division, memory, host.inventory.node, at=units)
    needs: dict[str, GpuNeed] = {}
    for name, shape in shapes.items() if host.gpus and kind.shares_memory else ():
        words = [*argv, *shape.own]
        own = kind.parse(words) if shape.own else args
        share, kv_bytes = own.gpu_memory_utilization, own.kv_cache_memory_bytes
        needs[name] = need_by_flags(words, share, kv_bytes, starts.need(shape.workers, words))
    starts.check(needs)
    for line in division.lines():
        say(line)
    return starts


def launcher_on(
    host: LocalHost | None,
    cluster: str,
    config: ClusterConfig,
    args: Namespace,
    planned: Sequence[InstanceShape],
    gpus: GpuStarts | None,
) -> LlumletLauncher:
    """Starts instances on the host, or by Ray. cluster: names its shared memory."""
    workers = [shape.workers for shape in planned]
    if host is not None and gpus is not None:
        return host.launcher(cluster, workers, gpus)
    assert config.ray is not None
    first = workers[: config.instances]
    return RayLauncher(
        config.ray,
        first,
        args.model,
        args.kv_cache_memory_bytes,
        units=config.unit is not None,
        gpus=own_gpus(config.instance_gpus, config.instances),
    )


def whose_server(args: Namespace, sock: socket.socket) -> str:
    """Model and address, by which people know it in `ps` among others on the host."""
    model = (args.served_model_name or [args.model])[0]
    return f"{model} at {address_of(sock)}"


def address_of(sock: socket.socket) -> str:
    """The address that clients connect to."""
    bound = sock.getsockname()
    if isinstance(bound, str):
        return f"unix:{bound}"
    host, port = bound[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def listening(uds: str, args: Namespace) -> Iterator[socket.socket]:
    """The socket that clients connect to: the port's, or that of the path `uds`.

    Raises ConfigError naming it.
    """
    if not uds:
        with take_port(args.host, args.port) as sock:
            yield sock
        return
    with listening_at(str(Path(uds).absolute()), f"--uds {uds}") as sock:
        yield sock


def in_units(config: ClusterConfig, tokens: int, kind: EnginePlugin) -> ClusterConfig:
    """Let instances exchange units of tokens; 0: blocks. Raises ConfigError."""
    if tokens and not kind.takes_units:
        flag = "--mixed-shapes" if config.migration.mixed_shapes else "--instance-flags"
        raise ConfigError(
            f"{flag}: --block-size must be the same for all instances with --engine {config.engine}"
        )
    migration = msgspec.structs.replace(config.migration, unit_tokens=tokens)
    return msgspec.structs.replace(config, migration=migration)


def joining(
    config: ClusterConfig, unit: UnitConfig, args: Namespace
) -> tuple[ClusterConfig, InstanceUnits]:
    """The config with the model's name in the unit, and the units; with Ray each node knows its
    own. Raises ConfigError."""
    arenas: dict[str, UnitArena] = {}
    paths = dict.fromkeys((unit.path, *unit.paths.values()))
    for path in paths if config.ray is None else ():
        try:
            found = asyncio.run(fetch_unit(path))
        except TransportError as error:
            raise ConfigError(f"--unit is {path}, must be a unit's socket: {error}") from error
        leased = sum(one.lease for one in found.shares)
        arenas[path] = UnitArena(path, found.arena, leased)
        if unit.guarantee > found.arena:
            raise ConfigError(
                f"--unit-guarantee is {unit.guarantee / 2**20:g} MiB, must be at most the unit's"
                f" {found.arena / 2**20:g} MiB"
            )
    unit = msgspec.structs.replace(unit, model=(args.served_model_name or [args.model])[0])
    return msgspec.structs.replace(config, unit=unit), InstanceUnits(arenas, unit)


class ClusterServer:
    """One cluster with its front ends, from start to end."""

    def __init__(
        self,
        cluster: InstanceManager,
        launch: FrontLaunch,
        args: Namespace,
        sock: socket.socket,
        forks: SharedForks | None = None,
    ) -> None:
        """launch: of the front ends, without the launcher's endpoint. args: its flags, parsed.

        forks: what front ends are forked from that have processes of their own.
        """
        self._forks = forks
        self._cluster = cluster
        self._launch = launch
        self._config = launch.config
        self._args = args
        self._sock = sock
        self._control: ControlServer | None = None
        self._join: JoinLink | None = None
        self._front: FrontEnd | FrontEnds | None = None
        self._scheduler: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._at_once = asyncio.Event()
        self._exit_code = 0
        self._traces = open_collector(settings_of(os.environ), "launcher")
        if self._traces is not None:
            model = (args.served_model_name or [args.model])[0]
            cluster.on_change.append(InstanceSpans(self._traces.tracer, model).observe)

    async def run(self) -> int:
        """Serve until a signal; returns the exit code."""
        self._take_signals()
        starting = asyncio.create_task(self._start())
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        try:
            if not starting.done():  # a signal before it was ready
                starting.cancel()
                await asyncio.wait([starting])
                return 0
            await starting  # raises what went wrong
            await self._serve()
            return self._exit_code
        finally:
            stopping.cancel()
            await cancel_tasks(self._scheduler)
            if self._join is not None:
                await self._join.close()
            if self._front is not None:
                await self._front.close()
            if self._control is not None:
                await self._control.close()
            await self._cluster.stop()
            await cancel_tasks(self._beating)
            if self._traces is not None:
                await self._traces.close()

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, self._signalled)
        if self._config.lifecycle.end_with_stdin:
            call_at_stdin_end(self._stop.set)

    def _signalled(self) -> None:
        (self._at_once if self._stop.is_set() else self._stop).set()

    async def _start(self) -> None:
        """Start instances and front ends, then the scheduler. Raises KvmigError."""
        await self._cluster.open()  # nothing is started where that fails
        self._take_signals()  # Ray has put its own in place
        if (join := self._config.join) is not None:
            secret, whose = self._launch.secret, self._cluster.whose
            self._join = JoinLink(join, secret, whose, self._cluster)
            await self._join.check()
        self._control = ControlServer(self._cluster, self._launch.secret, self._config.control_host)
        both = [
            asyncio.create_task(self._start_instances(self._control)),
            asyncio.create_task(self._start_front(self._control.endpoint)),
        ]
        try:
            await asyncio.gather(*both)
        except BaseException:
            await cancel_tasks(*both)
            raise
        self._cluster.on_change.append(self._stop_without_instances)
        self._cluster.on_change.append(self._schedule)
        if self._join is not None:
            self._join.open()
        self._schedule(self._cluster.members())

    async def _start_instances(self, control: ControlServer) -> None:
        await self._cluster.start()
        control.open()

    async def _start_front(self, launcher: str) -> None:
        launch = msgspec.structs.replace(self._launch, launcher=launcher)
        lifecycle = self._config.lifecycle
        if lifecycle.front_ends == 1 and not lifecycle.front_apart:
            self._front = FrontEnd(launch, self._args, self._sock, self._take_signals)
        else:
            self._front = FrontEnds(launch, self._sock, self._forks)
        await self._front.start()

    async def _serve(self) -> None:
        """Wait for a signal, or for the end of the front ends; then drain them."""
        assert self._front is not None
        bound = self._sock.getsockname()
        if not isinstance(bound, str):
            host = bound[0]
            if not (is_loopback(host) or self._launch.admin_key or self._args.api_key):
                say(
                    f"all clients that reach {host} may use the API; the admin API is closed, see"
                    f" {ADMIN_KEY} in docs/security.md"
                )
        say(f"serving {self._args.model} on {address_of(self._sock)} (Ctrl-C stops)")
        if (descriptor := self._config.lifecycle.heartbeat_descriptor) >= 0:
            self._beating = asyncio.create_task(send_heartbeats(descriptor), name="heartbeats")
        ended = asyncio.create_task(self._front.ended())
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait((ended, stop), return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            until = time.monotonic() + self._config.shutdown_timeout_s
            await self._front.drain(self._at_once)
            await self._cluster.let_read(max(0.0, until - time.monotonic()), self._at_once)
        else:
            stop.cancel()
            self._exit_code = 1
        ended.cancel()

    def _schedule(self, members: Sequence[ClusterMember]) -> None:
        """Start the scheduler as soon as there is something to decide."""
        if self._scheduler is not None or self._stop.is_set() or self._join is not None:
            return
        config = self._config
        if config.scaling is not None or (config.scheduler.migration and len(members) > 1):
            keeper = SchedulerKeeper(config, self._launch.secret, self._cluster)
            self._scheduler = asyncio.create_task(keeper.run(), name="scheduler")

    def _stop_without_instances(self, members: Sequence[ClusterMember]) -> None:
        if not members:  # the last one left, as it was told
            return
        if all(one.state == "failed" for one in members) and not self._stop.is_set():
            say("no instance is left, stopping")
            self._exit_code = 1
            self._stop.set()


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
