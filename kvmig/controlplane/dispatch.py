"""Dispatch: on which instance a new request runs. Pure but for a counter that breaks ties.

Every policy takes serving instances that were heard of lately and are large enough;
others only if there is none. Ties go to the fewest requests, then round and round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvmig.controlplane.freeness import Queued, batch_size, free_blocks, freeness, slack
from kvmig.controlplane.view import ClusterView, InstanceView
from kvmig.ground.config import Policy
from kvmig.ground.errors import NoInstance

_STATES = {"serving": 0, "starting": 1, "draining": 2}


class Dispatch(Protocol):
    """A dispatch policy."""

    def pick(self, view: ClusterView, demand_blocks: float, priority: int = 0) -> InstanceView:
        """Where a request of `demand_blocks` shall run. Raises NoInstance if there is none."""
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

    def pick(self, view: ClusterView, demand_blocks: float, priority: int = 0) -> InstanceView:
        """The next one."""
        return self._rotation.take(view, candidates(view, demand_blocks))


class _Best:
    """The instance with the highest score."""

    def __init__(self) -> None:
        self._rotation = Rotation()

    def score(self, one: InstanceView, demand_blocks: float) -> float:
        """How well the request would be there."""
        raise NotImplementedError

    def pick(self, view: ClusterView, demand_blocks: float, priority: int = 0) -> InstanceView:
        """The one with the highest score, then with the fewest requests."""
        ranked = [
            ((self.score(one, demand_blocks), -one.requests), one)
            for one in candidates(view, demand_blocks)
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

    queued "head": the paper's rule, literally. "all": the slack that would be left with
    the request there, all queued demand counted, so that one goes where it fits now
    rather than where others have more room to grow; an idle one that it fits on is best.
    """

    def __init__(self, queued: Queued = "all") -> None:
        super().__init__()
        self.queued: Queued = queued

    def score(self, one: InstanceView, demand_blocks: float) -> float:
        """More freeness is better."""
        free, batch = free_blocks(one, self.queued), batch_size(one, self.queued)
        if self.queued == "head":
            return freeness(free, batch)
        free -= demand_blocks
        return slack(free, batch + 1 if batch else 0)


_POLICIES: dict[Policy, Callable[[], Dispatch]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "freeness": Freest,
}


def dispatch_policy(name: Policy) -> Dispatch:
    """A new dispatcher for `--policy name`."""
    return _POLICIES[name]()
