"""The view of the cluster that policies see: instances as last reported, at one moment.

The cluster is kept as columns, one row per instance: a report changes one row, a policy computes
over whole columns. With 10,000 instances a column is 80 kB, and an operation on one takes some
microseconds. `ViewBuilder` keeps them from load reports.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvmig.controlplane.messages import ClusterMember, LoadReport
from kvmig.engines.base import ClassLoad, EngineLoad, GroupLoad
from kvmig.sharing.messages import InUnit

Column = NDArray[np.float64]
Mask = NDArray[np.bool_]

SERVING, STARTING, DRAINING = 0.0, 1.0, 2.0


class ViewColumns:
    """Rows in a fixed order; sizes in KV blocks, see `InstanceView`. Read-only outside.

    weights, numerics: numbers that are equal where requests can move, and where they do so exactly.
    """

    total: Column
    limit: Column
    free: Column
    behind: Column
    room: Column
    share: Column
    used: Column
    head: Column
    prompts: Column
    running: Column
    waiting: Column
    requests: Column
    out: Column
    seats: Column
    kept: Column
    lower: Column
    preempted: Column
    movable: Column
    weights: Column
    numerics: Column
    state: Column
    fresh_until: Column
    open_until: Column

    def __init__(self, rows: Iterable[tuple[float, ...]] = ()) -> None:
        table = np.array(list(rows), dtype=np.float64).reshape(-1, len(FIELDS))
        self._take(np.ascontiguousarray(table.T))

    def _take(self, table: Column) -> None:
        self._table = table
        for name, column in zip(FIELDS, table, strict=True):
            view = column.view()
            view.flags.writeable = False
            setattr(self, name, view)

    def only(self, rows: Mask) -> ViewColumns:
        """A copy of these rows."""
        some = ViewColumns()
        some._take(np.ascontiguousarray(self._table[:, rows]))
        return some

    def __len__(self) -> int:
        return len(self.total)

    def set(self, row: int, values: tuple[float, ...]) -> None:
        """Replace a row."""
        self._table[:, row] = values


FIELDS = tuple(ViewColumns.__annotations__)
Headroom = Mapping[int, float]
"""Priority -> blocks kept free for all its running requests together (absent: 0)."""


class RequestWeight(NamedTuple):
    """What an instance's requests weigh together, in KV blocks (Llumnix, section 4.4).

    Example: 3 running requests of 10, 20 and 30 blocks, then a queue that wants 8 and 5
    blocks: 10 + 20 + 30 + 8 + 0 = 68. The request behind the head weighs nothing yet.
    """

    virtual: float
    """Sum over running requests and the head of the queue, with headroom."""
    behind: float
    """Demand of those behind the head, which weigh nothing in the paper."""
    kept: float
    """Headroom, a part of `virtual`."""
    lower: float
    """Held by running requests whose priority comes after one with headroom."""


def usage(
    load: EngineLoad, headroom: Headroom | None = None, *, terminating: bool = False
) -> RequestWeight:
    """The usage by an engine's totals. Of several pools of blocks, the scarcest counts.

    It is expressed in blocks of the first pool: a share of one is as good as the same share
    of the other.
    """
    pools: tuple[EngineLoad | GroupLoad, ...] = (load, *load.groups)
    scarcest = max(pools, key=lambda p: (p.used_blocks + p.waiting_blocks) / max(p.total_blocks, 1))
    scale = load.total_blocks / max(scarcest.total_blocks, 1)
    kept, lower = _headroom(load, headroom) if headroom else (0.0, 0.0)
    held = scale * (scarcest.used_blocks + scarcest.head_blocks) + kept
    behind = scale * (scarcest.waiting_blocks - scarcest.head_blocks)
    return RequestWeight(math.inf if terminating else held, behind, kept, lower)


def _headroom(load: EngineLoad, headroom: Headroom) -> tuple[float, float]:
    """(headroom that is kept, blocks held by those who come after its owners)."""
    classes = load.classes or (ClassLoad(0, load.running, load.waiting, load.used_blocks),)
    owners = [one.priority for one in classes if one.running and headroom.get(one.priority)]
    if not owners:
        return 0.0, 0.0
    lower = sum(one.used_blocks for one in classes if one.priority > min(owners))
    return sum(headroom[priority] for priority in owners), lower


NO_LOAD = EngineLoad(0, 0, 0, 0, 0, 0)
_STATES = {"serving": SERVING, "starting": STARTING, "draining": DRAINING}
_OTHER = 3.0


@lru_cache(maxsize=1024)
def number_of(words: str) -> float:
    """A number that stands for these words in a column; other words have another one."""
    return float(int.from_bytes(blake2b(words.encode(), digest_size=6).digest()))


class InstanceView(msgspec.Struct, frozen=True, kw_only=True):
    """One instance as last reported. Sizes in KV blocks, times in the view's clock."""

    instance: str
    endpoint: str
    load: EngineLoad = NO_LOAD
    virtual_blocks: float = 0.0
    """Sum of virtual usage (`usage`)."""
    behind_blocks: float = 0.0
    """Demand of those behind the head of the queue."""
    kept_blocks: float = 0.0
    """Headroom that is part of the virtual usage: more than 0 where a request is protected."""
    lower_blocks: float = 0.0
    """Held by running requests that come after the protected ones."""
    state: str = "starting"
    """starting, serving or draining."""
    migrations_in: int = 0
    migrations_out: int = 0
    staging_used: int = 0
    headroom: dict[int, float] = msgspec.field(default_factory=dict)
    """Headroom of each priority, whether or not it has requests here."""
    bandwidth: float = 0.0
    """KV blocks per second that migrations out of it have lately sent; 0: none was measured."""
    reported_at: float | None = None
    """Time of the last report; None: there was none yet."""
    pending_blocks: float = 0.0
    """Demand that was dispatched here and that its report can't count yet."""
    pending_requests: int = 0
    unmovable: str = ""
    """Why no request can be moved from it or to it; empty when they can."""
    weights: str = ""
    """Identity of its weights; empty before its first report."""
    numerics: str = ""
    """Numerics class of the instance."""
    shared: InUnit | None = None
    """The instance's share of a unit; None: it shares no KV cache."""
    beside_kv: int = 0
    """Bytes of the host's memory that it has taken apart from its KV cache; 0: not known."""

    @property
    def requests(self) -> int:
        """Requests here or on their way."""
        load = self.load
        return load.running + load.waiting + self.migrations_in + self.pending_requests

    def row(self, stale_after_s: float) -> tuple[float, ...]:
        """The instance's row in `ViewColumns`."""
        load = self.load
        state = _STATES.get(self.state, _OTHER)
        free = load.total_blocks - self.virtual_blocks - self.pending_blocks
        heard = -math.inf if self.reported_at is None else self.reported_at + stale_after_s
        return (
            load.total_blocks,
            load.most_blocks,
            free,
            self.behind_blocks,
            free - self.behind_blocks,
            1 / (self.requests + 1),
            load.used_blocks,
            load.head_blocks,
            load.prefill_blocks + load.waiting_blocks + self.pending_blocks,
            load.running,
            load.waiting,
            self.requests,
            self.migrations_out,
            load.seats or math.inf,
            self.kept_blocks,
            self.lower_blocks,
            load.preempted_waiting,
            not self.unmovable,
            number_of(self.weights),
            number_of(f"{self.weights} {self.numerics}"),
            state,
            heard,
            heard if state == SERVING else -math.inf,
        )


class ClusterView:
    """The instances at one moment.

    It shows what its builder knows until the builder learns anything more: it is looked at
    at once and never kept. Policies don't change it.
    """

    __slots__ = ("_columns", "_rows", "instances", "now", "stale_after_s")

    def __init__(
        self,
        now: float,
        instances: Sequence[InstanceView],
        stale_after_s: float = 1.0,
        columns: ViewColumns | None = None,
        rows: Mapping[str, int] | None = None,
    ) -> None:
        """columns: of the same instances, if they are there already; rows: so are their rows."""
        self.now = now
        self.instances = instances
        self.stale_after_s = stale_after_s
        self._columns = columns
        self._rows = rows

    @property
    def rows(self) -> Mapping[str, int]:
        """The rows of all instances, by their names."""
        if self._rows is None:
            self._rows = {one.instance: row for row, one in enumerate(self.instances)}
        return self._rows

    def row_of(self, instance: str) -> int | None:
        """The instance's row; None: it isn't among these."""
        return self.rows.get(instance)

    def rows_of(self, instances: Iterable[str]) -> Mask:
        """The rows of these instances; those that aren't here have none."""
        rows = np.zeros(len(self.instances), bool)
        for row in map(self.row_of, instances):
            if row is not None:
                rows[row] = True
        return rows

    @property
    def columns(self) -> ViewColumns:
        """The instances in the same order, a row each."""
        if self._columns is None:
            self._columns = ViewColumns(one.row(self.stale_after_s) for one in self.instances)
        return self._columns

    def only(self, rows: Mask) -> ClusterView:
        """The same moment, with these instances alone."""
        kept = [self.instances[row] for row in np.flatnonzero(rows)]
        return ClusterView(self.now, kept, self.stale_after_s, self.columns.only(rows))

    def stale(self, one: InstanceView) -> bool:
        """Whether its last report is too old for its load to be trusted."""
        return one.reported_at is None or self.now - one.reported_at > self.stale_after_s


class _Entry:
    """What is known of one instance besides its view; `seq` -1: any report is news."""

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
        self._rows: dict[str, int] | None = None
        """Rows by instance; None: the members have changed."""
        self._views: list[InstanceView] = []
        self._columns: ViewColumns | None = None
        """The columns; None: the members have changed."""

    def join(self, member: ClusterMember) -> None:
        """A new instance, or a new start of a known one: nothing is known of it."""
        view = InstanceView(instance=member.instance, endpoint=member.endpoint)
        known = self._entries.get(member.instance)
        if known is None:
            self._entries[member.instance] = _Entry(len(self._views))
            self._views.append(view)
        else:
            self._entries[member.instance] = _Entry(known.row)
            self._views[known.row] = view
        self._columns = self._rows = None

    def leave(self, instance: str) -> None:
        """Forget an instance; unknown ones are ignored."""
        gone = self._entries.pop(instance, None)
        if gone is None:
            return
        del self._views[gone.row]
        for row, view in enumerate(self._views):
            self._entries[view.instance].row = row
        self._columns = self._rows = None

    def members(self, members: Iterable[ClusterMember]) -> None:
        """Keep these members and no others; nothing is known of one with a new endpoint."""
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
                shared=report.shared,
                beside_kv=report.beside_kv,
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
        """The cluster as known now; to be looked at before the builder learns anything more."""
        if self._columns is None:
            self._columns = ViewColumns(one.row(self.stale_after_s) for one in self._views)
        if self._rows is None:
            self._rows = {name: entry.row for name, entry in self._entries.items()}
        return ClusterView(now, self._views, self.stale_after_s, self._columns, self._rows)

    def _put(self, entry: _Entry, view: InstanceView) -> None:
        self._views[entry.row] = view
        if self._columns is not None:
            self._columns.set(entry.row, view.row(self.stale_after_s))
