"""The launcher of a Ray cluster: each llumlet on a node that has the resources it takes.

Ray chooses the node of a llumlet whose order names none, and reports when an actor is gone. Ray
restarts no actor: `kvmig.launcher.cluster` starts the instance again, and Ray may then choose
another node, unless the order names one.

The actor, a `LlumletActor`, starts the llumlet as its child. The engine runs in that child, as with
a local launcher, and not in Ray's worker: so a crash of the engine ends the child and not the
actor. The actor holds the child's stdin. When the actor ends, with its node, with the job or by
`ray.kill`, the child sees the end of the pipe and stops. Each node imports this module, so kvmig
must be installed there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from kvmig.core.config import ClusterConfig, RayConfig, instance_name
from kvmig.core.errors import ConfigError, KvmigError, StartupError, TransportError
from kvmig.engines.registry import kind_of, with_tree
from kvmig.kvtransfer.transports.shm import sweep
from kvmig.launcher import ray_cluster
from kvmig.launcher.environment import llumlet_environment, memory_flags, part_of_memory, weights_of
from kvmig.launcher.gpu_division import divide, no_gpu_for, sized
from kvmig.launcher.gpu_starts import EngineMemory, GpuStarts
from kvmig.launcher.launch import LlumletLaunch, PlannedInstance
from kvmig.launcher.local import LocalLlumlet
from kvmig.launcher.node_files import FILES_VARIABLE, copy_link, folder_on_node
from kvmig.launcher.node_forks import forked_or
from kvmig.launcher.node_units import gpu_of_unit, state_of, unit_address, unit_word
from kvmig.launcher.ray_cluster import (
    RayNode,
    actor_options,
    check_room,
    check_sizes,
    last_line,
    share_of,
)
from kvmig.launcher.ray_environment import base_environment, forwarded
from kvmig.launcher.ray_gpus import use_gpu
from kvmig.launcher.ray_resources import Resources, amounts, needs_of
from kvmig.launcher.unit_memory import InstanceUnits, UnitArena
from kvmig.process.nvml import read_devices
from kvmig.process.supervisor import STOP_S, ProcessHandle, running

if TYPE_CHECKING:
    from ray.actor import ActorHandle


T = TypeVar("T")

log = logging.getLogger(__name__)

ROOM_WAIT_S = 5.0
"""Wait for room at the start: what an earlier job held is free only a moment after its end."""
ASK_S = 30.0
"""Longest wait for an actor that is alive, beyond what it waits for itself."""
RETRY_S = 1.0
PLACE_S = 60.0
"""Timeout of placing the first instances, for which there was room. Later ones wait for a node
with room without a limit, and log that at this interval."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
NO_GPUS: Mapping[str, tuple[str, ...]] = MappingProxyType({})
LET_CHILDREN_END = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Otherwise Ray kills a llumlet with its worker, and the memory that it shares is not freed. A
llumlet ends by itself, with its stdin. (Ray's documentation: Lifetimes of a User-Spawn Process.)"""


class RayLauncher:
    """Implements `Launcher` with actors of a Ray cluster."""

    def __init__(
        self,
        config: RayConfig,
        workers: Sequence[int],
        model: str,
        kv_bytes: int | None,
        *,
        units: bool = False,
        gpus: Mapping[str, tuple[str, ...]] = NO_GPUS,
    ) -> None:
        """workers: of each instance that is started first, for which there must be room.

        kv_bytes: --kv-cache-memory-bytes, if the user gave it. units: whether instances are in
        units, whose GPUs the nodes' agents take from Ray. gpus: those of the first instances that
        have such GPUs by name.
        """
        self._units = units
        self._gpus = gpus
        self._config = config
        self._workers = list(workers)
        self._model = model
        self._kv_bytes = kv_bytes
        self._connected = False
        self._unplaced = len(self._workers)

    async def open(self) -> None:
        """Join the Ray cluster and see whether it has room for all."""
        checked = bool(self._config.files)  # by the fleet, when it started
        join = partial(ray_cluster.connect, self._config.address, checked=checked)
        await asyncio.to_thread(join)
        self._connected = True
        try:
            names = map(instance_name, range(len(self._workers)))
            first = [self._gpus.get(one, ()) for one in names]
            needs = map(self._needs, self._workers, first)
            await self._find_room(list(needs))
        except BaseException:
            await self.close()
            raise

    async def llumlet(self, launch: LlumletLaunch, workers: int) -> ProcessHandle:
        """Start a llumlet once a node has room; Ray's autoscaler may add one."""
        import ray

        needs = self._needs(workers, launch.gpus)
        name = f"instance {launch.instance}"
        actor = (
            ray.remote(LlumletActor)
            .options(
                max_restarts=0,
                scheduling_strategy=ray_cluster.strategy_of(launch.node),
                runtime_env={"env_vars": LET_CHILDREN_END},
                **actor_options(needs),
            )
            .remote()
        )
        handle = RayHandle(name, actor)
        try:
            node = await self._place(name, needs, actor)
            order = RayOrder(
                launch=launch,
                node=node.node_id,
                workers=workers,
                threads=max(1, int(needs.get("CPU", node.total.get("CPU", 1))) // workers),
                share=share_of(needs, node.total),
                gpu=needs.get("GPU", 0.0),
                model=self._model,
                files=self._config.files,
                fleet=self._config.fleet,
                kv_bytes=self._kv_bytes,
                environment=forwarded(os.environ),
            )
            turn_s = launch.config.start_timeout_s  # others on its GPU may start first
            await handle.await_answer(actor.start.remote(order, node.address), turn_s + ASK_S)
        except BaseException:
            await handle.kill()
            raise
        return handle

    def check_room(self, instances: Sequence[PlannedInstance], gpus: Sequence[str]) -> None:
        """See `Launcher`."""
        if gpus and not self._config.files:
            raise ConfigError(f"gpus has {gpus[0]}, must be left out with --ray: Ray chooses")

    def renew(self, tree: str) -> None:
        """Do nothing: each llumlet loads all by itself."""

    async def renewed(self) -> None:
        """Return at once."""

    async def close(self) -> None:
        """Leave the Ray cluster."""
        if self._connected:
            self._connected = False
            await asyncio.to_thread(ray_cluster.disconnect)

    def _needs(self, workers: int, gpus: Sequence[str]) -> dict[str, float]:
        """What an instance takes of Ray. gpus: its own by name, which its node has taken."""
        needs, taken = needs_of(self._config.resources, workers), self._units or bool(gpus)
        return {name: it for name, it in needs.items() if not (taken and name == "GPU")}

    async def _find_room(self, needs: list[dict[str, float]]) -> None:
        check_sizes(await asyncio.to_thread(ray_cluster.nodes), needs)
        deadline = asyncio.get_running_loop().time() + ROOM_WAIT_S
        while True:
            try:
                check_room(await asyncio.to_thread(ray_cluster.nodes), needs)
            except ConfigError:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(0.5)
            else:
                return

    async def _place(self, name: str, needs: Resources, actor: ActorHandle) -> RayNode:
        """The node that Ray put the actor on, once it has. Raises StartupError."""
        placed: Awaitable[str] = actor.node.remote()
        answer = asyncio.ensure_future(_answer(name, placed))
        try:
            while not (await asyncio.wait([answer], timeout=PLACE_S))[0]:
                if self._unplaced > 0:
                    raise StartupError(f"{name} found no Ray node with {amounts(needs)} free")
                log.warning("%s waits for a Ray node with %s", name, amounts(needs))
        finally:
            answer.cancel()
        self._unplaced -= 1
        node_id = answer.result()
        for node in await asyncio.to_thread(ray_cluster.nodes):
            if node.node_id == node_id:
                return node
        raise StartupError(f"{name}: the Ray node {node_id} has left the cluster")


class RayHandle:
    """A `ProcessHandle`: one llumlet under its supervisor."""

    def __init__(self, name: str, actor: ActorHandle) -> None:
        self._name = name
        self._actor = actor

    @property
    def pid(self) -> int:
        """See `ProcessHandle`."""
        return 0

    async def ready(self, timeout_s: float) -> str:
        """The llumlet's endpoint."""
        answer: Awaitable[str] = self._actor.ready.remote(timeout_s)
        return await self.await_answer(answer, timeout_s + ASK_S)

    async def ended(self) -> str:
        """How the llumlet ended; an actor that Ray can't reach for a moment is asked again."""
        from ray.exceptions import ActorUnavailableError, RayError

        while True:
            try:
                how: str = await self._actor.ended.remote()
            except ActorUnavailableError:
                await asyncio.sleep(RETRY_S)
            except RayError as error:
                return f"its Ray node or actor is gone: {last_line(error)}"
            else:
                return how

    async def stop(self, timeout_s: float = STOP_S) -> None:
        """End the llumlet, then its actor."""
        try:
            await self.await_answer(self._actor.stop.remote(timeout_s), timeout_s + STOP_S)
        except StartupError as error:
            log.info("%s", error)  # it is gone already, and what it had with it
        await self.kill()

    async def kill(self) -> None:
        """End the actor, placed or not; its child goes with it."""
        import ray

        await asyncio.to_thread(ray.kill, self._actor)

    async def await_answer(self, answer: Awaitable[T], timeout_s: float) -> T:
        """The actor's answer. Raises StartupError if there is none."""
        try:
            async with asyncio.timeout(timeout_s):
                return await _answer(self._name, answer)
        except TimeoutError as error:
            raise StartupError(f"{self._name}: its Ray actor did not answer") from error


async def _answer(name: str, answer: Awaitable[T]) -> T:
    """What the actor says, or its KvmigError. Raises StartupError if it is gone."""
    from ray.exceptions import RayError, RayTaskError

    try:
        return await answer
    except RayTaskError as error:
        if isinstance(error.cause, KvmigError):
            raise error.cause from error
        raise StartupError(f"{name}: its Ray actor failed: {error.cause!r}") from error
    except RayError as error:
        raise StartupError(f"{name}: its Ray node or actor is gone: {last_line(error)}") from error


# -- on a node


class RayOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor starts, and with which part of its node."""

    launch: LlumletLaunch
    node: str
    """Ray's id of the actor's node."""
    workers: int
    threads: int
    """OpenMP threads of each worker on a CPU."""
    share: float
    """The instance's part of the node's memory."""
    gpu: float
    """GPUs that it takes; less than one: it shares it with others of its kind; 0: none, or those
    of its unit."""
    model: str
    files: str = ""
    """The fleet's folder of models' files; empty: the model has the same path on each node."""
    fleet: str = ""
    """The word of the fleet; empty: it is no fleet's."""
    kv_bytes: int | None
    """--kv-cache-memory-bytes, if the user gave it: a worker's."""
    environment: dict[str, str]
    """The user's variables: `forwarded`."""


class LlumletActor:
    """The actor's class: one llumlet from start to end. Methods run in the actor's event loop."""

    def __init__(self) -> None:
        self._child: LocalLlumlet | None = None

    async def node(self) -> str:
        """Id of the node that it was placed on."""
        import ray

        found: str = ray.get_runtime_context().get_node_id()
        return found

    async def start(self, order: RayOrder, address: str) -> None:
        """Start the llumlet; it binds to `address`. Raises ConfigError or StartupError."""
        sweep()  # of instances that were killed on this host
        order = in_unit(on_node(order, os.environ))
        unit = await asyncio.to_thread(unit_on_node, order)
        held = order.launch.gpus or (() if unit is None else unit.gpus)
        for uuid in held:
            use_gpu(order.node, uuid)
        environment = node_environment(order, with_gpus(held, os.environ))
        config = bound_to(order.launch.config, address)
        launch = msgspec.structs.replace(order.launch, config=config, gpus=())
        starts = gpus_of_node(order, environment, unit)
        start = await starts.begin(launch, order.workers) if starts.ids else None
        try:
            if start is None:
                arena = 0 if unit is None else unit.arena.size
                added, where = _memory_flags(order, environment, arena), ""
            else:
                added, where = start.flags, f"GPU {','.join(start.place.gpus)} of {starts.node}"
            launch = msgspec.structs.replace(
                launch, engine_argv=[*added, *launch.engine_argv], where=where
            )
            name = f"instance {launch.instance}"
            spawn = running("kvmig.launcher.llumlet_main", environment, title=launch.title)
            if order.fleet:
                spawn = forked_or(spawn, order.node, order.fleet, launch, environment)
            self._child = await LocalLlumlet.start(name, spawn, launch)
        except BaseException:
            if start is not None:
                start.end()
            raise
        self._child.gpu_start = start

    async def ready(self, timeout_s: float) -> str:
        """See `ProcessHandle`."""
        return await self._started().ready(timeout_s)

    async def ended(self) -> str:
        """See `ProcessHandle`."""
        return await self._started().ended()

    async def stop(self, timeout_s: float) -> None:
        """See `ProcessHandle`."""
        if self._child is not None:
            await self._child.stop(timeout_s)

    def _started(self) -> LocalLlumlet:
        if self._child is None:
            raise RuntimeError("nothing was started")
        return self._child


def node_environment(order: RayOrder, own: Mapping[str, str]) -> dict[str, str]:
    """The child's environment, from that of Ray's worker.

    Ray, or the instance's unit, has set CUDA_VISIBLE_DEVICES to its GPUs.
    """
    engine = order.launch.config.engine
    base = with_tree(engine, base_environment(order.environment, own), order.launch.engine_tree)
    kind_of(engine).set_environment(base)  # as the fork server has it, and each engine sets it
    return llumlet_environment(engine, _gpus(base), order.threads, base)


def gpus_of_node(
    order: RayOrder, environment: Mapping[str, str], unit: UnitOnNode | None = None
) -> GpuStarts:
    """The GPUs that Ray has given the instance or its unit, as NVML has them on this node; none on
    a CPU, and where NVML isn't there. unit: None: it is in none. Raises ConfigError or NoRoom.

    Of a GPU that it shares with others it may have its part. How much of it they need is measured
    here, one after the other. An instance in a unit has what the unit's KV cache leaves free.
    """
    devices = read_devices(environment).devices if _gpus(environment) else ()
    least = min((one.total for one in devices), default=0)
    most = int(least * order.gpu) if order.gpu < 1 else 0
    each = order.launch.config.lifecycle.instance_gpu_memory
    if each and not devices:
        raise ConfigError(no_gpu_for(each, platform.node()))
    workers = {order.launch.instance: order.workers} if devices else {}
    division = divide(devices, workers, most, each=each)
    divides = kind_of(order.launch.config.engine).shares_memory
    config, units = order.launch.config.unit, None
    if unit is not None and config is not None:
        units = InstanceUnits({unit.arena.path: unit.arena}, config)
    memory = EngineMemory(divides, weights_of(order.model), units)
    starts = GpuStarts(division, memory, platform.node(), partial(read_devices, environment))
    if devices and (units is not None or not sized(order.launch.engine_argv)):
        starts.check({order.launch.instance: starts.need(order.workers)})
    return starts


def on_node(order: RayOrder, environment: Mapping[str, str]) -> RayOrder:
    """The same with the model's path on this node. environment: the node's own."""
    own = environment.get(FILES_VARIABLE, "")
    model = folder_on_node(order.model, order.files, own)
    if order.files and not Path(model).exists():  # a folder of the user's that is not here itself
        copy = copy_link(own or order.files, order.model)
        model = str(copy.resolve()) if copy.exists() else model
    argv = [model if one == order.model else one for one in order.launch.engine_argv]
    launch = msgspec.structs.replace(order.launch, engine_argv=argv)
    return msgspec.structs.replace(order, model=model, launch=launch)


def in_unit(order: RayOrder) -> RayOrder:
    """The same with the path of the unit's socket on its node."""
    config = order.launch.config
    if config.unit is None:
        return order
    path = unit_address(order.node, unit_word(order.fleet, config.unit.path))
    config = msgspec.structs.replace(config, unit=msgspec.structs.replace(config.unit, path=path))
    return msgspec.structs.replace(
        order, launch=msgspec.structs.replace(order.launch, config=config)
    )


class UnitOnNode(NamedTuple):
    """An instance's unit, on the instance's node."""

    arena: UnitArena
    gpus: tuple[str, ...]
    """UUIDs of the unit's GPU; empty: its instances run on CPUs."""


def unit_on_node(order: RayOrder) -> UnitOnNode | None:
    """The unit of an instance, as its agent on this node reports it; None: it is in none. Raises
    StartupError."""
    unit = order.launch.config.unit
    if unit is None:
        return None
    try:
        found = state_of(unit.path)
    except (TransportError, ConfigError) as error:
        raise StartupError(f"the unit's agent on this node does not answer: {error}") from error
    uuid = gpu_of_unit(unit.path)
    leased = sum(one.lease for one in found.shares)
    return UnitOnNode(UnitArena(unit.path, found.arena, leased), (uuid,) if uuid else ())


def with_gpus(uuids: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of the node, in which Ray hides the GPUs of others, with these GPUs of a unit
    in CUDA_VISIBLE_DEVICES; none: as it is. Raises StartupError."""
    own = dict(environment)
    if uuids:
        own.pop(VISIBLE, None)
        there = read_devices(own)
        try:
            own[VISIBLE] = ",".join(there.device(uuid).id for uuid in uuids)
        except KeyError as missing:
            raise StartupError(
                f"GPU {missing.args[0]} of the unit is not there: NVML does not show it on"
                f" {platform.node()}"
            ) from None
    return own


def bound_to(config: ClusterConfig, address: str) -> ClusterConfig:
    """`config` for a node that others reach at `address`."""
    return msgspec.structs.replace(config, control_host=address)


def _gpus(environment: Mapping[str, str]) -> list[str]:
    return [gpu for gpu in environment.get(VISIBLE, "").split(",") if gpu]


def _memory_flags(order: RayOrder, environment: Mapping[str, str], arena: int) -> list[str]:
    """Flags for its share of the node's memory, where its engine has them. arena: bytes of KV cache
    of its unit; 0: it is in none. Raises ConfigError if that is too little."""
    if not kind_of(order.launch.config.engine).shares_memory:
        return []
    on_one_gpu = int(1 / order.gpu) if 0 < order.gpu < 1 else 1
    return memory_flags(
        order.launch.engine_argv,
        order.kv_bytes,
        [order.workers] * on_one_gpu,
        len(_gpus(environment)),
        part_of_memory(order.share),
        environment,
        weights_of(order.model),
        arena,
    )
