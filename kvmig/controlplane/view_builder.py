"""Keeps the view of the cluster from load reports: a report costs one row, however many."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from kvmig.controlplane.columns import Columns
from kvmig.controlplane.messages import LoadReport, Member
from kvmig.controlplane.view import ClusterView, InstanceView
from kvmig.controlplane.virtual_usage import usage


class _Entry:
    """What is known of one instance beside its view; `seq` -1: any report is news."""

    __slots__ = ("pending", "row", "seq")

    def __init__(self, row: int) -> None:
        self.row = row
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
        self._views: list[InstanceView] = []
        self._columns: Columns | None = None
        """None: who is there has changed."""

    def join(self, member: Member) -> None:
        """A new instance, or a new start of a known one: nothing is known of it."""
        view = InstanceView(instance=member.instance, endpoint=member.endpoint)
        known = self._entries.get(member.instance)
        if known is None:
            self._entries[member.instance] = _Entry(len(self._views))
            self._views.append(view)
        else:
            self._entries[member.instance] = _Entry(known.row)
            self._views[known.row] = view
        self._columns = None

    def leave(self, instance: str) -> None:
        """Forget it. Unknown ones are ignored."""
        gone = self._entries.pop(instance, None)
        if gone is None:
            return
        del self._views[gone.row]
        for row, view in enumerate(self._views):
            self._entries[view.instance].row = row
        self._columns = None

    def members(self, members: Iterable[Member]) -> None:
        """These and no others; one with a new endpoint starts anew."""
        wanted = {member.instance: member for member in members}
        for instance in [known for known in self._entries if known not in wanted]:
            self.leave(instance)
        for instance, member in wanted.items():
            entry = self._entries.get(instance)
            if entry is None or self._views[entry.row].endpoint != member.endpoint:
                self.join(member)

    def report(self, report: LoadReport, now: float) -> None:
        """Take a report in; one that is older than the last, or of a stranger, is ignored."""
        entry = self._entries.get(report.instance)
        if entry is None or report.seq <= entry.seq:
            return
        entry.seq = report.seq
        while entry.pending and entry.pending[0][0] <= now - self.settle_s:
            entry.pending.popleft()
        headroom = report.headroom if self.headroom else {}
        weight = usage(report.load, headroom, terminating=report.state == "draining")
        self._put(
            entry,
            InstanceView(
                instance=report.instance,
                endpoint=self._views[entry.row].endpoint,
                load=report.load,
                virtual_blocks=weight.virtual,
                behind_blocks=weight.behind,
                kept_blocks=weight.kept,
                lower_blocks=weight.lower,
                state=report.state,
                migrations_in=report.migrations_in,
                migrations_out=report.migrations_out,
                staging_used=report.staging_used,
                headroom=headroom,
                bandwidth=report.bandwidth,
                reported_at=now,
                pending_blocks=sum(blocks for _, blocks in entry.pending),
                pending_requests=len(entry.pending),
                unmovable=report.unmovable,
                weights=report.weights,
                numerics=report.numerics,
            ),
        )

    def dispatched(self, instance: str, demand_blocks: float, now: float) -> None:
        """A request was sent there that no report counts yet. Unknown ones are ignored."""
        entry = self._entries.get(instance)
        if entry is None:
            return
        entry.pending.append((now, demand_blocks))
        view = self._views[entry.row]
        self._put(
            entry,
            msgspec.structs.replace(
                view,
                pending_blocks=view.pending_blocks + demand_blocks,
                pending_requests=len(entry.pending),
            ),
        )

    def view(self, now: float) -> ClusterView:
        """The cluster as known now; to be looked at before the builder is told anything more."""
        if self._columns is None:
            self._columns = Columns(one.row(self.stale_after_s) for one in self._views)
        return ClusterView(now, self._views, self.stale_after_s, self._columns)

    def _put(self, entry: _Entry, view: InstanceView) -> None:
        self._views[entry.row] = view
        if self._columns is not None:
            self._columns.set(entry.row, view.row(self.stale_after_s))
