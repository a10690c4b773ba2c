"""The instances of a front end: their links, their load, and where a new request goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from kvmig.controlplane.dispatch import NewRequest
from kvmig.controlplane.messages import LoadReport, Member
from kvmig.controlplane.policy import Policy
from kvmig.controlplane.view import InstanceView
from kvmig.controlplane.view_builder import ViewBuilder
from kvmig.gateway.errors import InstanceLost, UnknownInstance
from kvmig.gateway.inventory import InstanceRow, instance_row
from kvmig.gateway.links import Link, Listener
from kvmig.ground.clock import Clock
from kvmig.ground.errors import NoInstance
from kvmig.kvtransfer.messages import Message
from kvmig.kvtransfer.wire import Frame

log = logging.getLogger(__name__)


class Fleet:
    """Instances by id, in the order in which they were added; each keeps its engine index.

    An instance is alive while it is connected. Only those that report are dispatched to;
    one that was lost comes back with its next report.
    """

    def __init__(
        self,
        name: str,
        secret: bytes,
        policy: Policy,
        clock: Clock,
        lost_after_s: float,
        listener: Listener,
    ) -> None:
        self._name = name
        self._secret = secret
        self._clock = clock
        self._lost_after_s = lost_after_s
        self._listener = listener
        self._dispatch = policy.dispatcher()
        self._view = ViewBuilder(headroom=policy.headroom)
        self._links: dict[str, Link] = {}
        self._indexes: dict[str, int] = {}
        self._heard: dict[str, float] = {}
        """When each instance in the view was last heard of."""

    async def add(self, instance: str, endpoint: str, timeout_s: float) -> bytes:
        """See `Router.add_instance`."""
        if instance in self._links:
            raise ValueError(f"instance {instance} was added before")
        self._indexes.setdefault(instance, len(self._indexes))
        link = Link(instance, endpoint, self._secret, self._name, self._listener)
        self._links[instance] = link
        try:
            welcome = await link.connected(timeout_s)
        except BaseException:
            await self.remove(instance)
            raise
        if instance not in self._heard:
            self._join(instance)
        return welcome.engine

    async def remove(self, instance: str) -> bool:
        """Disconnect; whether there was one."""
        link = self._links.pop(instance, None)
        if link is None:
            return False
        self.forget(instance)
        await link.close()
        return True

    async def close(self) -> None:
        """Disconnect from all."""
        await asyncio.gather(*(link.close() for link in self._links.values()))

    @property
    def names(self) -> list[str]:
        """All instances."""
        return list(self._links)

    @property
    def alive(self) -> list[str]:
        """Those that are connected."""
        return [name for name, link in self._links.items() if link.alive]

    def index(self, instance: str) -> int:
        """Its engine index, also after it was removed."""
        return self._indexes[instance]

    def endpoint(self, instance: str) -> str:
        """Where it listens. Raises UnknownInstance."""
        if instance not in self._links:
            known = ", ".join(self._links)
            raise UnknownInstance(f"there is no instance {instance}, only {known}")
        return self._links[instance].endpoint

    def send(self, instance: str, message: Message, payload: Sequence[Frame] = ()) -> None:
        """Queue a message, at once. Raises InstanceLost."""
        link = self._links.get(instance)
        if link is None:
            raise InstanceLost(f"instance {instance} was removed")
        link.send(message, payload)

    def dispatch(
        self, demand_blocks: int, priority: int, message: Message, payload: Sequence[Frame]
    ) -> str:
        """Send a new request where the policy wants it. Raises NoInstance."""
        now = self._clock()
        while True:
            try:
                request = NewRequest(demand_blocks, priority)
                instance = self._dispatch.pick(self._view.view(now), request).instance
                self.send(instance, message, payload)
            except NoInstance:
                raise NoInstance("no instance is connected that could take the request") from None
            except InstanceLost as lost:
                log.warning("a request goes elsewhere: %s", lost)
                self.forget(instance)
                continue
            self._view.dispatched(instance, demand_blocks, now)
            return instance

    def report(self, report: LoadReport) -> None:
        """An instance told of its load."""
        if report.instance not in self._links:
            return
        if report.instance not in self._heard:
            self._join(report.instance)
        self._heard[report.instance] = self._clock()
        self._view.report(report, self._clock())

    def _join(self, instance: str) -> None:
        self._view.join(Member(instance, self._links[instance].endpoint))
        self._heard[instance] = self._clock()

    def forget(self, instance: str) -> None:
        """Dispatch nothing there until its next report."""
        self._heard.pop(instance, None)
        self._view.leave(instance)

    def drop_silent(self) -> None:
        """Give up connections over which no report has come for long."""
        now = self._clock()
        for instance, heard in list(self._heard.items()):
            if now - heard > self._lost_after_s:
                self.forget(instance)
                self._links[instance].drop(f"no report for {now - heard:.1f} s")

    def rows(self) -> list[InstanceRow]:
        """All instances as last heard of."""
        known = {one.instance: one for one in self._view.view(self._clock()).instances}
        return [
            instance_row(
                self._indexes[name],
                known.get(name) or InstanceView(instance=name, endpoint=link.endpoint),
                lost=not link.alive,
            )
            for name, link in self._links.items()
        ]
