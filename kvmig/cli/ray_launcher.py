"""The launcher of a Ray cluster: each llumlet on a node that has the resources it takes.

Ray places, and tells when an actor is gone; what is started and how it ends is the same as on
one host (`ray_supervisor`). An actor isn't restarted by Ray: `kvmig.cli.cluster` starts an
instance again, and Ray may place it elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kvmig.cli import ray_cluster
from kvmig.cli.launch import LlumletLaunch
from kvmig.cli.launcher import STOP_S, Handle
from kvmig.cli.ray_resources import (
    Node,
    Resources,
    actor_options,
    amounts,
    check_room,
    check_sizes,
    needs_of,
    share_of,
)
from kvmig.cli.ray_supervisor import Order, Supervisor, forwarded
from kvmig.ground.config import RayConfig
from kvmig.ground.errors import ConfigError, KvmigError, StartupError

if TYPE_CHECKING:
    from ray.actor import ActorHandle

T = TypeVar("T")

log = logging.getLogger(__name__)

ROOM_WAIT_S = 5.0
"""What an earlier job held is free only a moment after its end."""
ASK_S = 30.0
"""Longest wait for an actor that is alive, beyond what it waits for itself."""
RETRY_S = 1.0
PLACE_S = 60.0
"""The first instances find their places within this time: there was room for them. Later ones
wait for a node that has room, however long, and say so this often."""
LET_CHILDREN_END = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Else Ray kills a llumlet with its worker, and nobody frees what it shares. It ends by itself,
with its stdin. (Ray's documentation: Lifetimes of a User-Spawn Process.)"""


class RayLauncher:
    """Implements `Launcher` with actors of a Ray cluster."""

    def __init__(
        self, config: RayConfig, workers: Sequence[int], model: str, kv_bytes: int | None
    ) -> None:
        """workers: of each instance that is started first, for which there must be room.

        kv_bytes: --kv-cache-memory-bytes, if the user gave it.
        """
        self._config = config
        self._workers = list(workers)
        self._model = model
        self._kv_bytes = kv_bytes
        self._connected = False
        self._unplaced = len(self._workers)

    async def open(self) -> None:
        """Join the Ray cluster and see whether it has room for all."""
        await asyncio.to_thread(ray_cluster.connect, self._config.address)
        self._connected = True
        try:
            await self._find_room([self._needs(count) for count in self._workers])
        except BaseException:
            await self.close()
            raise

    async def llumlet(self, launch: LlumletLaunch, workers: int) -> Handle:
        """Waits for a node with room: one may be added, and Ray's autoscaler hears of the wish."""
        import ray

        needs = self._needs(workers)
        name = f"instance {launch.instance}"
        actor = (
            ray.remote(Supervisor)
            .options(
                max_restarts=0,
                scheduling_strategy="SPREAD",
                runtime_env={"env_vars": LET_CHILDREN_END},
                **actor_options(needs),
            )
            .remote()
        )
        handle = RayHandle(name, actor)
        try:
            node = await self._place(name, needs, actor)
            order = Order(
                launch=launch,
                workers=workers,
                threads=max(1, int(needs.get("CPU", node.total.get("CPU", 1))) // workers),
                share=share_of(needs, node.total),
                gpu=needs.get("GPU", 0.0),
                model=self._model,
                kv_bytes=self._kv_bytes,
                environment=forwarded(os.environ),
            )
            await handle.ask(actor.start.remote(order, node.address), ASK_S)
        except BaseException:
            await handle.kill()
            raise
        return handle

    def renew(self) -> None:
        """Nothing: each llumlet loads all by itself."""

    async def close(self) -> None:
        """Leave the Ray cluster."""
        if self._connected:
            self._connected = False
            await asyncio.to_thread(ray_cluster.disconnect)

    def _needs(self, workers: int) -> dict[str, float]:
        return needs_of(self._config.resources, workers)

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

    async def _place(self, name: str, needs: Resources, actor: ActorHandle) -> Node:
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
    """A `Handle`: one llumlet under its supervisor."""

    def __init__(self, name: str, actor: ActorHandle) -> None:
        self._name = name
        self._actor = actor

    async def ready(self, timeout_s: float) -> str:
        """Its endpoint."""
        answer: Awaitable[str] = self._actor.ready.remote(timeout_s)
        return await self.ask(answer, timeout_s + ASK_S)

    async def ended(self) -> str:
        """How it ended; an actor that Ray can't reach for a moment is asked again."""
        from ray.exceptions import ActorUnavailableError, RayError

        while True:
            try:
                how: str = await self._actor.ended.remote()
            except ActorUnavailableError:
                await asyncio.sleep(RETRY_S)
            except RayError as error:
                return f"its Ray node or actor is gone: {_why(error)}"
            else:
                return how

    async def stop(self, timeout_s: float = STOP_S) -> None:
        """End the llumlet, then its actor."""
        try:
            await self.ask(self._actor.stop.remote(timeout_s), timeout_s + STOP_S)
        except StartupError as error:
            log.info("%s", error)  # it is gone already, and what it had with it
        await self.kill()

    async def kill(self) -> None:
        """End the actor, placed or not; its child goes with it."""
        import ray

        await asyncio.to_thread(ray.kill, self._actor)

    async def ask(self, answer: Awaitable[T], timeout_s: float) -> T:
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
        raise StartupError(f"{name}: its Ray node or actor is gone: {_why(error)}") from error


def _why(error: Any) -> str:
    """The last line of Ray's explanation, which has the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
