"""What runs on a Ray node: an actor that starts one llumlet as its child, and ends it.

The engine is not in Ray's worker but in the very process that a local launcher starts, so that
its crash is a child's end and not the actor's. The actor holds the child's stdin: however it
goes, with its node, with the job or by `ray.kill`, the child sees the end of the pipe and stops.

On a node this module is imported, so kvmig must be installed there; Ray isn't imported here, it
imports this.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from kvmig.cli.children import Child, running
from kvmig.cli.environment import instance_environment, memory_flags, part_of_memory, weights_of
from kvmig.cli.launch import LlumletLaunch
from kvmig.engines.vllm.kind import preloaded
from kvmig.ground.config import ClusterConfig
from kvmig.kvtransfer.transports.shm import sweep

FORWARDED = ("VLLM_", "HF_", "TRANSFORMERS_", "TORCH_", "NCCL_", "GLOO_", "UCX_", "OMP_")
"""Variables of the user's that instances get on every node, by what their names start with."""
NOT_FORWARDED = (
    "VLLM_API_KEY",
    "VLLM_HOST_IP",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "UCX_NET_DEVICES",
)
RAYS_OWN = "RAY_"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to start, and its part of the node."""

    launch: LlumletLaunch
    workers: int
    threads: int
    """OpenMP threads of each worker on a CPU."""
    share: float
    """Of the node's memory."""
    gpu: float
    """GPUs that it takes; less than one: it shares it with others of its kind."""
    model: str
    kv_bytes: int | None
    """--kv-cache-memory-bytes, if the user gave it: a worker's."""
    environment: dict[str, str]
    """Of the user: `forwarded`."""


class Supervisor:
    """The actor's class: one llumlet from start to end. Methods run in the actor's event loop."""

    def __init__(self) -> None:
        self._child: Child | None = None

    async def node(self) -> str:
        """Id of the node that it was placed on."""
        import ray

        found: str = ray.get_runtime_context().get_node_id()
        return found

    async def start(self, order: Order, address: str) -> None:
        """Start the llumlet; it binds to `address`. Raises ConfigError or StartupError."""
        sweep()  # of instances that were killed on this host
        environment = node_environment(order, os.environ)
        launch = msgspec.structs.replace(
            order.launch,
            config=bound_to(order.launch.config, address),
            engine_argv=[*_memory_flags(order, environment), *order.launch.engine_argv],
        )
        name = f"instance {launch.instance}"
        self._child = await Child.start(name, running("kvmig.cli.llumlet", environment), launch)

    async def ready(self, timeout_s: float) -> str:
        """See `Handle`."""
        return await self._started().ready(timeout_s)

    async def ended(self) -> str:
        """See `Handle`."""
        return await self._started().ended()

    async def stop(self, timeout_s: float) -> None:
        """See `Handle`."""
        if self._child is not None:
            await self._child.stop(timeout_s)
            sweep()

    def _started(self) -> Child:
        if self._child is None:
            raise RuntimeError("nothing was started")
        return self._child


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of the launcher's environment that holds on every node."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(FORWARDED) and name not in NOT_FORWARDED
    }


def node_environment(order: Order, own: Mapping[str, str]) -> dict[str, str]:
    """The child's environment, from that of Ray's worker.

    Ray has set CUDA_VISIBLE_DEVICES to the instance's GPUs. Its other variables would make
    libraries in the child think that they run in the worker.
    """
    base = {name: value for name, value in own.items() if not name.startswith(RAYS_OWN)}
    # Ray's, of the CPUs that the actor takes; the user's own are among the forwarded ones.
    base.pop("OMP_NUM_THREADS", None)
    base |= order.environment
    environment = instance_environment(_gpus(base), order.threads, base)
    if not _gpus(environment):
        environment["LD_PRELOAD"] = preloaded(environment.get("LD_PRELOAD", ""))
    return environment


def bound_to(config: ClusterConfig, address: str) -> ClusterConfig:
    """`config` for a node that others reach at `address`."""
    return msgspec.structs.replace(config, control_host=address)


def _gpus(environment: Mapping[str, str]) -> list[str]:
    return [gpu for gpu in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]


def _memory_flags(order: Order, environment: Mapping[str, str]) -> list[str]:
    """Its share of the node's memory. Raises ConfigError if that is too little."""
    on_one_gpu = int(1 / order.gpu) if 0 < order.gpu < 1 else 1
    return memory_flags(
        order.launch.engine_argv,
        order.kv_bytes,
        [order.workers] * on_one_gpu,
        len(_gpus(environment)),
        part_of_memory(order.share),
        environment,
        weights_of(order.model),
    )
