"""The instances of a front end: their links, their load, and where a new request goes."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence

from kvmig.controlplane.dispatch import NewRequest, allowed
from kvmig.controlplane.messages import LoadReport, Member
from kvmig.controlplane.policy import Policy
from kvmig.controlplane.view import ClusterView, InstanceView
from kvmig.controlplane.view_builder import ViewBuilder
from kvmig.gateway.errors import InstanceLost, UnknownInstance
from kvmig.gateway.health import Health
from kvmig.gateway.inventory import InstanceRow, instance_row
from kvmig.gateway.links import Link, Listener
from kvmig.gateway.ports import NOT_BEGUN, Arithmetic
from kvmig.ground.clock import Clock
from kvmig.ground.errors import NoInstance
from kvmig.kvtransfer.messages import Message
from kvmig.kvtransfer.wire import Frame

log = logging.getLogger(__name__)


class Fleet:
    """Instances by id, in the order in which they were added; each keeps its engine index.

    An instance is alive while it is connected. Only those that report are dispatched to;
    one that was lost comes back with its next report. It is fit while it also says enough,
    and nothing bad (`Health`).
    """

    def __init__(
        self,
        name: str,
        secret: bytes,
        policy: Policy,
        clock: Clock,
        silent_after_s: float,
        lost_after_s: float,
        tick_s: float,
        listener: Listener,
    ) -> None:
        self.block_tokens = 16
        """Tokens a KV block."""
        self.preferred = ""
        """Weights under which new requests had better begin; empty: no matter which."""
        self._name = name
        self._secret = secret
        self._clock = clock
        self._lost_after_s = lost_after_s
        self._listener = listener
        self._dispatch = policy.dispatcher()
        self._view = ViewBuilder(headroom=policy.headroom)
        self._links: dict[str, Link] = {}
        self._indexes: dict[str, int] = {}
        self._arithmetic: dict[str, Arithmetic] = {}
        """As last reported."""
        self._health = Health(silent_after_s, tick_s, clock())
        """Of the instances in the view."""

    async def add(
        self, instance: str, endpoint: str, timeout_s: float, index: int | None = None
    ) -> bytes:
        """See `Router.add_instance`."""
        if instance in self._links:
            raise ValueError(f"instance {instance} was added before")
        self._indexes.setdefault(instance, len(self._indexes) if index is None else index)
        link = Link(instance, endpoint, self._secret, self._name, self._listener)
        self._links[instance] = link
        try:
            welcome = await link.connected(timeout_s)
        except BaseException:
            await self.remove(instance)
            raise
        if instance not in self._health:
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

    def fit(self, instance: str) -> bool:
        """Whether requests had better be there than elsewhere."""
        link = self._links.get(instance)
        known = link is not None and link.alive and instance in self._health
        return known and not self._health.ailment(instance)

    def others_serve(self, instance: str, begun: Arithmetic = NOT_BEGUN) -> bool:
        """Whether another one that is fit takes requests, also those that have begun so."""
        return any(
            self._health.state(one) == "serving" and begun.goes_on(self.arithmetic(one))
            for one in self._links
            if one != instance and self.fit(one)
        )

    def arithmetic(self, instance: str) -> Arithmetic:
        """By what it computes, as last told."""
        link = self._links.get(instance)
        welcomed = "" if link is None or link.welcome is None else link.welcome.weights
        return self._arithmetic.get(instance) or Arithmetic(welcomed)

    def any_fit(self) -> bool:
        """Whether there is one that is fit."""
        return any(self.fit(instance) for instance in self._links)

    def ailing(self) -> dict[str, str]:
        """Those that are connected and not fit: silent, hung or failed."""
        return {name: ill for name in self.alive if (ill := self._ailment(name))}

    def silence_s(self) -> dict[str, float]:
        """For how long each connected instance has said nothing."""
        return self._health.silence_s()

    def _ailment(self, instance: str) -> str:
        return self._health.ailment(instance) if instance in self._health else ""

    def index(self, instance: str) -> int:
        """Its engine index, also after it was removed."""
        return self._indexes[instance]

    def engine_indexes(self) -> dict[int, str]:
        """Instance by index, also those that were removed."""
        return {index: instance for instance, index in self._indexes.items()}

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
        self,
        tokens: int,
        priority: int,
        message: Message,
        payload: Sequence[Frame],
        *,
        fit: bool = False,
        begun: Arithmetic = NOT_BEGUN,
    ) -> str:
        """Send a request of so many tokens where the policy wants it. Raises NoInstance.

        fit: only to one that is. begun: by what its tokens so far were computed.
        """
        now = self._clock()
        demand_blocks = math.ceil((tokens + 1) / self.block_tokens)
        while True:
            try:
                request = NewRequest(demand_blocks, priority, *begun, preferred=self.preferred)
                view = self._view.view(now)
                if fit:
                    well = [one for one in view.instances if self.fit(one.instance)]
                    view = ClusterView(now, well, view.stale_after_s)
                instance = self._dispatch.pick(allowed(view, request), request).instance
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
        if report.instance not in self._health:
            self._join(report.instance)
        self._arithmetic[report.instance] = Arithmetic(report.weights, report.numerics)
        self._health.said(report.instance, report.state)
        self._view.report(report, self._clock())

    def heard(self, instance: str) -> None:
        """It has said something."""
        self._health.heard(instance)

    def _join(self, instance: str) -> None:
        self._view.join(Member(instance, self._links[instance].endpoint))
        self._health.join(instance)

    def forget(self, instance: str) -> None:
        """Dispatch nothing there until its next report."""
        self._arithmetic.pop(instance, None)
        self._health.leave(instance)
        self._view.leave(instance)

    def tick(self) -> None:
        """Let time pass; give up connections over which nothing has come for long."""
        self._health.tick(self._clock())
        for instance, silence in self._health.silence_s().items():
            if silence > self._lost_after_s:
                self.forget(instance)
                self._links[instance].drop(f"nothing was heard for {silence:.1f} s")

    def waiting(self, priority: int) -> int:
        """Requests in queues, as last told, that aren't after this priority."""
        loads = (one.load for one in self._view.view(self._clock()).instances)
        return sum(
            sum(one.waiting for one in load.classes if one.priority <= priority)
            if load.classes
            else load.waiting * (priority >= 0)
            for load in loads
            if load.waiting
        )

    def rows(self) -> list[InstanceRow]:
        """All instances as last heard of."""
        known = {one.instance: one for one in self._view.view(self._clock()).instances}
        return [
            instance_row(
                self._indexes[name],
                known.get(name) or InstanceView(instance=name, endpoint=link.endpoint),
                self._ailment(name) if link.alive else "lost",
            )
            for name, link in self._links.items()
        ]
