"""Dispatch: on which instance a new request runs. Pure but for a counter that breaks ties.

Every policy takes serving instances that were heard of lately and are large enough;
others only if there is none. Ties go to the fewest requests, then round and round.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from kvmig.controlplane.freeness import Queued, batch_size, free_blocks, freeness, slack
from kvmig.controlplane.view import ClusterView, InstanceView
from kvmig.ground.errors import NoInstance

_STATES = {"serving": 0, "starting": 1, "draining": 2}


class NewRequest(msgspec.Struct, frozen=True):
    """What dispatch knows of a request."""

    demand_blocks: float
    """KV blocks of its prompt and first token."""
    priority: int = 0
    """vLLM's: the smaller one runs first."""


class Dispatch(Protocol):
    """A dispatch policy."""

    def pick(self, view: ClusterView, request: NewRequest) -> InstanceView:
        """Where the request shall run. Raises NoInstance if there is none."""
        ...


def candidates(view: ClusterView, demand_blocks: float) -> list[InstanceView]:
    """The instances to choose from: the best kind there is, in the view's order."""

    def kind(one: InstanceView) -> tuple[bool, int, bool]:
        state = _STATES.get(one.state, len(_STATES))
        return view.stale(one), state, demand_blocks > one.load.total_blocks

    kinds = [kind(one) for one in view.instances]
    if not kinds:
        raise NoInstance("no instance to run a request on: the cluster has none")
    best = min(kinds)
    return [one for one, its in zip(view.instances, kinds, strict=True) if its == best]


class Rotation:
    """Breaks ties: the first after the one taken last, in the view's order."""

    def __init__(self) -> None:
        self._taken = -1

    def take(self, view: ClusterView, tied: list[InstanceView]) -> InstanceView:
        """One of `tied`, which is not empty and in the view's order."""
        places = {one.instance: place for place, one in enumerate(view.instances)}
        chosen = min(tied, key=lambda one: places[one.instance] <= self._taken)
        self._taken = places[chosen.instance]
        return chosen


class RoundRobin:
    """Each instance in its turn, whatever its load."""

    def __init__(self) -> None:
        self._rotation = Rotation()

    def pick(self, view: ClusterView, request: NewRequest) -> InstanceView:
        """The next one."""
        return self._rotation.take(view, candidates(view, request.demand_blocks))


class _Best:
    """The instance with the highest score."""

    def __init__(self) -> None:
        self._rotation = Rotation()

    def score(self, one: InstanceView, demand_blocks: float) -> float:
        """How well the request would be there."""
        raise NotImplementedError

    def pick(self, view: ClusterView, request: NewRequest) -> InstanceView:
        """The one with the highest score, then with the fewest requests."""
        demand = request.demand_blocks
        ranked = [
            ((self.score(one, demand), -one.requests), one) for one in candidates(view, demand)
        ]
        best = max(rank for rank, _ in ranked)
        return self._rotation.take(view, [one for rank, one in ranked if rank == best])


class LeastLoaded(_Best):
    """The lowest share of memory in use or queued for: INFaaS++ of the paper."""

    def score(self, one: InstanceView, demand_blocks: float) -> float:
        """Less load is better."""
        load = one.load
        demand = load.used_blocks + load.waiting_blocks + one.pending_blocks
        return -demand / max(load.total_blocks, 1)


class Freest(_Best):
    """The freest instance.

    queued: whose demand counts. The paper's rule, literally, with "head"; its artifact's
    with "all".
    """

    def __init__(self, queued: Queued) -> None:
        super().__init__()
        self.queued: Queued = queued

    def score(self, one: InstanceView, demand_blocks: float) -> float:
        """More freeness is better."""
        return freeness(free_blocks(one, self.queued), batch_size(one, self.queued))


class RoomiestAfter(_Best):
    """The most slack that would be left with the request there, all queued demand counted.

    So one goes where it fits now rather than where others have more room to grow; an idle
    one that it fits on is best.
    """

    def score(self, one: InstanceView, demand_blocks: float) -> float:
        """More slack is better."""
        free, batch = free_blocks(one, "all") - demand_blocks, batch_size(one, "all")
        return slack(free, batch + 1 if batch else 0)
