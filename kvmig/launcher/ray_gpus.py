"""Takes GPUs of a node from Ray, for units: one actor a GPU, which does nothing but have it.

An actor outlives the server that wished the unit, and the node's agent, so that the unit's models
keep their GPU meanwhile. The actor ends by itself once no agent has asked for it for a while and no
instance uses the GPU.
"""

from __future__ import annotations

import os
import threading
import time
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from kvmig.core.errors import StartupError, TransportError
from kvmig.launcher import ray_cluster
from kvmig.launcher.node_forks import node_folder
from kvmig.launcher.unit_gpus import GpuHolder
from kvmig.process.nvml import read_devices
from kvmig.sharing.member_locks import MemberLocks

if TYPE_CHECKING:
    from ray.actor import ActorHandle

NAMESPACE = "kvmig"
"""Ray's namespace of the actors' names."""
LEASE_S = 60.0
"""Time without a question after which a holder ends, if no instance uses its GPU."""
LOOKS = 12
"""Looks in this time whether it is over."""


class HeldGpu:
    """The actor's class."""

    def __init__(self, node: str, lease_s: float = LEASE_S) -> None:
        """node: Ray's id of this one. lease_s: see `LEASE_S`."""
        found = read_devices(os.environ)  # Ray has left the one that it gives
        if not found.devices:
            why = found.missing or "Ray has given none that NVML shows"
            raise StartupError(f"a GPU of the unit can't be held: {why}")
        self._uuid = found.devices[0].uuid
        self._roll = gpu_roll(node, self._uuid)
        self._lease_s = lease_s
        self._asked = time.monotonic()
        threading.Thread(target=self._end_unasked, name="lease", daemon=True).start()

    def uuid(self) -> str:
        """The GPU's. The lease is renewed."""
        self._asked = time.monotonic()
        return self._uuid

    def _end_unasked(self) -> None:
        while time.monotonic() - self._asked < self._lease_s or is_used(self._roll):
            time.sleep(self._lease_s / LOOKS)
        os._exit(0)


def gpu_roll(node: str, uuid: str) -> str:
    """The path, without its suffix, of the roll of those that use a GPU of a node's units. Raises
    StartupError."""
    return str(node_folder(node) / f"gpu-{blake2b(uuid.encode(), digest_size=8).hexdigest()}")


def use_gpu(node: str, uuid: str) -> None:
    """Keep a GPU of a node's units taken as long as this process lives. Raises StartupError."""
    try:
        MemberLocks(gpu_roll(node, uuid)).enter()
    except TransportError as error:
        raise StartupError(f"GPU {uuid} of the unit can't be used: {error}") from error


def is_used(roll: str) -> bool:
    """Whether a process lives that uses the GPU with this roll."""
    try:
        locks = MemberLocks(roll)
    except TransportError:  # its folder is gone
        return False
    try:
        return bool(locks.processes())
    finally:
        locks.close()


class RayHolder:
    """Implements `GpuHolder`."""

    def __init__(self, actor: ActorHandle) -> None:
        self._actor = actor
        self._asked: Any = None
        self._uuid = ""

    def given(self) -> str:
        """See `GpuHolder`. Ray is asked each time, and its answer counts in a later call."""
        import ray
        from ray.exceptions import ActorUnavailableError, RayError

        if self._asked is not None:
            answered, _ = ray.wait([self._asked], timeout=0)
            if not answered:
                return self._uuid
            try:
                self._uuid = ray.get(self._asked)
            except ActorUnavailableError:
                pass  # asked again below
            except RayError as error:
                raise StartupError(ray_cluster.last_line(error)) from error
        self._asked = self._actor.uuid.remote()
        return self._uuid

    def release(self) -> None:
        """See `GpuHolder`."""
        import ray

        ray.kill(self._actor)


class RayHolders:
    """Implements `HolderSource`."""

    def __init__(self, node: str, lease_s: float = LEASE_S) -> None:
        """node: Ray's id of it. lease_s: see `LEASE_S`."""
        self._node = node
        self._lease_s = lease_s

    def find_holders(self, fleet: str) -> dict[int, GpuHolder]:
        """See `HolderSource`."""
        import ray
        from ray.exceptions import RayError
        from ray.util import list_named_actors

        start, found = self._start_of(fleet), dict[int, GpuHolder]()
        try:
            for one in list_named_actors(all_namespaces=True):
                name = one["name"]
                if one["namespace"] == NAMESPACE and name.startswith(start):
                    actor = ray.get_actor(name, namespace=NAMESPACE)
                    found[int(name.removeprefix(start))] = RayHolder(actor)
        except (RayError, ValueError) as error:  # one has ended meanwhile
            raise StartupError(f"GPUs of units are looked for: {error}") from error
        return found

    def take_gpu(self, fleet: str, number: int) -> GpuHolder:
        """See `HolderSource`."""
        import ray
        from ray.exceptions import RayError

        try:
            actor = (
                ray.remote(HeldGpu)
                .options(
                    num_cpus=0,
                    num_gpus=1,
                    max_restarts=0,
                    lifetime="detached",
                    name=f"{self._start_of(fleet)}{number}",
                    namespace=NAMESPACE,
                    get_if_exists=True,
                    scheduling_strategy=ray_cluster.strategy_of(self._node),
                )
                .remote(self._node, self._lease_s)
            )
        except (RayError, ValueError) as error:
            raise StartupError(f"Ray is not asked for a GPU: {error}") from error
        return RayHolder(actor)

    def _start_of(self, fleet: str) -> str:
        word = blake2b(fleet.encode(), digest_size=8).hexdigest()
        return f"kvmig-unit-{self._node[:16]}-{word}-"
