"""What policies see: instances as last heard of, at one moment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import msgspec
import numpy as np

from kvmig.controlplane.columns import DRAINING, SERVING, STARTING, Columns, Mask
from kvmig.engines.base import EngineLoad

NO_LOAD = EngineLoad(0, 0, 0, 0, 0, 0)
_STATES = {"serving": SERVING, "starting": STARTING, "draining": DRAINING}
_OTHER = 3.0


@lru_cache(maxsize=1024)
def number_of(words: str) -> float:
    """One that stands for these words in a column; others have another one."""
    return float(int.from_bytes(blake2b(words.encode(), digest_size=6).digest()))


class InstanceView(msgspec.Struct, frozen=True, kw_only=True):
    """One instance as last heard of. Sizes in KV blocks, times in the view's clock."""

    instance: str
    endpoint: str
    load: EngineLoad = NO_LOAD
    virtual_blocks: float = 0.0
    """Sum of virtual usage (`virtual_usage.usage`)."""
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
    """Of each priority, whether or not it has requests here."""
    bandwidth: float = 0.0
    """KV blocks a second that migrations out of it have lately sent; 0: none was measured."""
    reported_at: float | None = None
    """None: not heard of yet."""
    pending_blocks: float = 0.0
    """Demand that was dispatched here and that its report can't count yet."""
    pending_requests: int = 0
    unmovable: str = ""
    """Why no request can be moved from it or to it; empty when they can."""
    weights: str = ""
    """Identity of its weights; empty until it is heard of."""
    numerics: str = ""
    """Its numerics class."""

    @property
    def requests(self) -> int:
        """Requests here or on their way."""
        load = self.load
        return load.running + load.waiting + self.migrations_in + self.pending_requests

    def row(self, stale_after_s: float) -> tuple[float, ...]:
        """Its row in `Columns`."""
        load = self.load
        state = _STATES.get(self.state, _OTHER)
        free = load.total_blocks - self.virtual_blocks - self.pending_blocks
        heard = -math.inf if self.reported_at is None else self.reported_at + stale_after_s
        return (
            load.total_blocks,
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
    """All instances at one moment.

    It shows what its builder knows until the builder is told something: it is looked at
    at once and never kept. Policies don't change it.
    """

    __slots__ = ("_columns", "instances", "now", "stale_after_s")

    def __init__(
        self,
        now: float,
        instances: Sequence[InstanceView],
        stale_after_s: float = 1.0,
        columns: Columns | None = None,
    ) -> None:
        """columns: of the same instances, if they are there already."""
        self.now = now
        self.instances = instances
        self.stale_after_s = stale_after_s
        self._columns = columns

    @property
    def columns(self) -> Columns:
        """The instances in the same order, a row each."""
        if self._columns is None:
            self._columns = Columns(one.row(self.stale_after_s) for one in self.instances)
        return self._columns

    def only(self, rows: Mask) -> ClusterView:
        """The same moment, with these instances alone."""
        kept = [self.instances[row] for row in np.flatnonzero(rows)]
        return ClusterView(self.now, kept, self.stale_after_s, self.columns.only(rows))

    def stale(self, one: InstanceView) -> bool:
        """Whether nothing was heard of it for so long that its load says little."""
        return one.reported_at is None or self.now - one.reported_at > self.stale_after_s
