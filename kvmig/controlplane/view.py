"""A frozen view of the cluster, and the builder that keeps it from load reports.

Policies see only this. An `InstanceView` changes when something is heard of the
instance, so a view costs nothing to take between two reports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from kvmig.controlplane.messages import LoadReport, Member
from kvmig.controlplane.virtual_usage import usage
from kvmig.engines.base import EngineLoad

NO_LOAD = EngineLoad(0, 0, 0, 0, 0, 0)


class InstanceView(msgspec.Struct, frozen=True, kw_only=True):
    """One instance as last heard of. Sizes in KV blocks, times in the view's clock."""

    instance: str
    endpoint: str
    load: EngineLoad = NO_LOAD
    virtual_blocks: float = 0.0
    """Sum of virtual usage (`virtual_usage.usage`)."""
    behind_blocks: float = 0.0
    """Demand of those behind the head of the queue."""
    state: str = "starting"
    """starting, serving or draining."""
    migrations_in: int = 0
    migrations_out: int = 0
    staging_used: int = 0
    bandwidth: float = 0.0
    """KV blocks a second that migrations out of it have lately sent; 0: none was measured."""
    reported_at: float | None = None
    """None: not heard of yet."""
    pending_blocks: float = 0.0
    """Demand that was dispatched here and that its report can't count yet."""
    pending_requests: int = 0

    @property
    def requests(self) -> int:
        """Requests here or on their way."""
        load = self.load
        return load.running + load.waiting + self.migrations_in + self.pending_requests


class ClusterView(msgspec.Struct, frozen=True):
    """All instances at one moment."""

    now: float
    instances: tuple[InstanceView, ...]
    stale_after_s: float = 1.0

    def stale(self, one: InstanceView) -> bool:
        """Whether nothing was heard of it for so long that its load says little."""
        return one.reported_at is None or self.now - one.reported_at > self.stale_after_s


class _Entry:
    """What is known of one instance; `seq` -1: any report is news."""

    __slots__ = ("pending", "seq", "view")

    def __init__(self, view: InstanceView) -> None:
        self.view = view
        self.seq = -1
        self.pending: deque[tuple[float, float]] = deque()  # (dispatched at, blocks)


class ViewBuilder:
    """Members and their newest reports, in a fixed order.

    settle_s: a report that arrives within this time of a dispatch may not count the
    dispatched request yet (it was on its way, or the engine in the middle of a step),
    so the request stays pending until a later one. Counted twice for a moment is
    harmless; not counted, a burst would all go to one instance.
    headroom: whether that of priorities counts as usage.
    """

    def __init__(
        self, stale_after_s: float = 1.0, settle_s: float = 0.1, headroom: bool = True
    ) -> None:
        self.stale_after_s = stale_after_s
        self.settle_s = settle_s
        self.headroom = headroom
        self._entries: dict[str, _Entry] = {}
        self._instances: tuple[InstanceView, ...] | None = ()

    def join(self, member: Member) -> None:
        """A new instance, or a new start of a known one: nothing is known of it."""
        view = InstanceView(instance=member.instance, endpoint=member.endpoint)
        self._entries[member.instance] = _Entry(view)
        self._instances = None

    def leave(self, instance: str) -> None:
        """Forget it. Unknown ones are ignored."""
        self._entries.pop(instance, None)
        self._instances = None

    def members(self, members: Iterable[Member]) -> None:
        """These and no others; one with a new endpoint starts anew."""
        wanted = {member.instance: member for member in members}
        for instance in [known for known in self._entries if known not in wanted]:
            self.leave(instance)
        for instance, member in wanted.items():
            entry = self._entries.get(instance)
            if entry is None or entry.view.endpoint != member.endpoint:
                self.join(member)

    def report(self, report: LoadReport, now: float) -> None:
        """Take a report in; one that is older than the last, or of a stranger, is ignored."""
        entry = self._entries.get(report.instance)
        if entry is None or report.seq <= entry.seq:
            return
        entry.seq = report.seq
        while entry.pending and entry.pending[0][0] <= now - self.settle_s:
            entry.pending.popleft()
        weight = usage(
            report.load,
            report.headroom if self.headroom else None,
            terminating=report.state == "draining",
        )
        entry.view = InstanceView(
            instance=report.instance,
            endpoint=entry.view.endpoint,
            load=report.load,
            virtual_blocks=weight.virtual,
            behind_blocks=weight.behind,
            state=report.state,
            migrations_in=report.migrations_in,
            migrations_out=report.migrations_out,
            staging_used=report.staging_used,
            bandwidth=report.bandwidth,
            reported_at=now,
            pending_blocks=sum(blocks for _, blocks in entry.pending),
            pending_requests=len(entry.pending),
        )
        self._instances = None

    def dispatched(self, instance: str, demand_blocks: float, now: float) -> None:
        """A request was sent there that no report counts yet. Unknown ones are ignored."""
        entry = self._entries.get(instance)
        if entry is None:
            return
        entry.pending.append((now, demand_blocks))
        entry.view = msgspec.structs.replace(
            entry.view,
            pending_blocks=entry.view.pending_blocks + demand_blocks,
            pending_requests=len(entry.pending),
        )
        self._instances = None

    def view(self, now: float) -> ClusterView:
        """The cluster as known now."""
        if self._instances is None:
            self._instances = tuple(entry.view for entry in self._entries.values())
        return ClusterView(now, self._instances, self.stale_after_s)
