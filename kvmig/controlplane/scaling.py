"""When to add an instance, and which one to drain (Llumnix, section 4.4.3). Pure.

The mean freeness is that of all batches together, sum of free blocks / sum of batch sizes:
so an idle instance counts by its room instead of being infinitely free. It is kept within
[low, high]; outside for `stabilization_s`, something is done. A starting instance counts as
room already, and while one drains, none other does, so nothing is done twice.

Example: three instances of 851 blocks, 150 requests that hold 2,000: (2553 - 2000) / 150 =
3.7 blocks per request. low = 10 wants 1,500 free blocks: 947 more, two instances.
"""

from __future__ import annotations

import math

import msgspec

from kvmig.controlplane.freeness import batch_size
from kvmig.controlplane.view import ClusterView, InstanceView
from kvmig.core.config import ScalingConfig

ANSWER_S = 10.0
"""Pause before the same is asked for again: the launcher may be busy, or can't start more."""


class ScaleOut(msgspec.Struct, frozen=True):
    """Start `count` instances more."""

    count: int


class ScaleIn(msgspec.Struct, frozen=True):
    """Drain this one, then end it."""

    instance: str


class InstanceScaler:
    """Decides when to scale; asked once a round, and its orders are carried out at once."""

    def __init__(self, config: ScalingConfig) -> None:
        self._config = config
        self._low_since: float | None = None
        self._high_since: float | None = None
        self._acted_at = -math.inf
        self._asked_at = -math.inf
        """When more instances were asked for, none of which has been seen."""
        self._members: frozenset[str] = frozenset()

    def decide(self, view: ClusterView) -> ScaleOut | ScaleIn | None:
        """The order to give now; None: none."""
        config, now = self._config, view.now
        members = frozenset(one.instance for one in view.instances)
        if members != self._members:  # the cool-down runs from when it is done
            self._members, self._acted_at, self._asked_at = members, now, -math.inf
        if now - self._asked_at < ANSWER_S:
            return None
        staying = [one for one in view.instances if one.state != "draining"]
        if len(staying) < config.min_instances:
            return self._act(ScaleOut(config.min_instances - len(staying)), now)
        free, batch = _room(view)
        missing = config.low * batch - free
        self._low_since = _since(self._low_since, missing > 0, now)
        self._high_since = _since(self._high_since, free > config.high * batch, now)
        if self._held(self._low_since, now) and len(staying) < config.max_instances:
            count = math.ceil(missing / _typical_blocks(view))
            return self._act(ScaleOut(min(max(count, 1), config.max_instances - len(staying))), now)
        if (
            self._held(self._high_since, now)
            and now - self._acted_at >= config.cooldown_s
            and config.min_instances < len(staying) == len(view.instances)
        ):
            leaving = _least_busy(view)
            if leaving is not None and free - leaving.load.total_blocks >= config.low * batch:
                return self._act(ScaleIn(leaving.instance), now)
        return None

    def _act(self, decision: ScaleOut | ScaleIn, now: float) -> ScaleOut | ScaleIn:
        self._acted_at, self._low_since, self._high_since = now, None, None
        if isinstance(decision, ScaleOut):
            self._asked_at = now
        return decision

    def _held(self, since: float | None, now: float) -> bool:
        return since is not None and now - since >= self._config.stabilization_s


def _since(since: float | None, holds: bool, now: float) -> float | None:
    return (now if since is None else since) if holds else None


def _room(view: ClusterView) -> tuple[float, int]:
    """(free blocks, requests) of the cluster once all that starts and drains has done so."""
    free, batch = 0.0, 0
    for one in view.instances:
        if one.state == "draining":  # what it holds goes to the others
            free -= one.load.used_blocks + one.load.waiting_blocks
        elif one.load.total_blocks:
            free += one.load.total_blocks - one.virtual_blocks - one.behind_blocks
            free -= one.pending_blocks
        else:  # it starts
            free += _typical_blocks(view)
        batch += batch_size(one, "all")
    return free, batch


def _typical_blocks(view: ClusterView) -> float:
    known = [one.load.total_blocks for one in view.instances if one.load.total_blocks]
    return sum(known) / len(known) if known else 1.0


def _least_busy(view: ClusterView) -> InstanceView | None:
    """The one with the fewest requests; of several, the last that joined."""
    serving = [one for one in view.instances if one.state == "serving" and not view.stale(one)]
    return min(reversed(serving), key=lambda one: one.requests, default=None)
