"""The router's instances are those that the launcher names: they come, go and come again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from kvmig.controlplane.messages import Member, Members, MessagesRefused
from kvmig.controlplane.orders import Evacuate
from kvmig.gateway.errors import InstanceLost
from kvmig.gateway.router import Router
from kvmig.ground.errors import PeerError, StartupError
from kvmig.ground.lifecycle import instance_number

RETRY_S = 1.0
"""Before an instance that didn't answer is connected to again."""

log = logging.getLogger(__name__)


class Membership:
    """Implements `Hearer`. Make it inside a running event loop; `close` it.

    members: as last told.
    """

    def __init__(self, router: Router) -> None:
        self.members: Sequence[Member] = ()
        self._router = router
        self._following: dict[str, tuple[str, asyncio.Task[None]]] = {}
        """By instance: its endpoint, and who holds it in the router."""
        self._ended: set[asyncio.Task[None]] = set()
        self._described: dict[str, bytes] = {}
        self._changed = asyncio.Event()

    async def first(self, timeout_s: float) -> list[bytes]:
        """The descriptions of the first instances, once all that serve are connected.

        Raises StartupError.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self._described or self._described.keys() != self._following.keys():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise StartupError(f"no instance to connect to within {timeout_s:g} s") from error
        return list(self._described.values())

    async def close(self) -> None:
        """Follow nobody any more; the router drops all."""
        self.members = ()
        tasks = [task for _, task in self._following.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._ended, return_exceptions=True)

    def take(self, members: Members) -> None:
        """See `Hearer`. A new endpoint is a new start, which knows nothing of the one before."""
        self.members = members.members
        self._router.prefer(members.weights)
        if self.members and all(one.state == "failed" for one in self.members):
            self._router.give_up("no instance is left")
        wanted = {one.instance: one.endpoint for one in members.members if one.endpoint}
        before: dict[str, asyncio.Task[None]] = {}
        for name, (endpoint, task) in list(self._following.items()):
            if wanted.get(name) != endpoint:
                del self._following[name]
                self._described.pop(name, None)
                task.cancel()
                self._ended.add(task)
                task.add_done_callback(self._ended.discard)
                before[name] = task
        for name, endpoint in wanted.items():
            if name not in self._following:
                work = self._follow(name, endpoint, before.get(name))
                task = asyncio.create_task(work, name=f"follow {name}")
                self._following[name] = (endpoint, task)
        self._changed.set()

    def evacuate(self, told: Evacuate) -> None:
        """See `Hearer`."""
        self._router.evacuate(told.instance, ends=told.ends)

    def messages_refused(self, told: MessagesRefused) -> None:
        """See `Hearer`."""
        self._router.messages_refused(told.process, told.counts)

    def refused(self, error: PeerError) -> None:
        """See `Hearer`."""
        self._router.refused(error)

    async def _follow(self, name: str, endpoint: str, before: asyncio.Task[None] | None) -> None:
        """Hold the instance in the router until cancelled."""
        if before is not None:
            await asyncio.wait([before])
        try:
            while True:
                try:
                    self._described[name] = await self._router.add_instance(
                        name, endpoint, index=instance_number(name)
                    )
                    break
                except InstanceLost as error:
                    log.warning("%s", error)
                    await asyncio.sleep(RETRY_S)
            self._changed.set()
            await asyncio.Event().wait()
        finally:
            # One that left when it was told to isn't named any more.
            crashed = any(one.instance == name for one in self.members)
            await self._router.remove_instance(name, crashed=crashed)
