"""Dispatch: the choice of an instance for a new request. Pure, except a counter that breaks ties.

Every policy takes serving instances that have reported lately and are large enough;
others only if there is none. Ties go to the fewest requests, then round and round.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import repeat
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvmig.controlplane.freeness import Queued, batch_sizes, free_blocks_of, freenesses
from kvmig.controlplane.view import ClusterView, Column, InstanceView, Mask, ViewColumns, number_of
from kvmig.core.errors import NoInstance

_IDLE = 1e12
"""Weight of an idle instance's slack: above all others, and the more the more it has."""


class NewRequest(msgspec.Struct, frozen=True):
    """A request as dispatch knows it."""

    demand_blocks: float
    """KV blocks of its prompt and first token."""
    priority: int = 0
    """vLLM's: the smaller one runs first."""
    weights: str = ""
    """The weights under which it has begun; it goes on under no others. Empty: not begun."""
    numerics: str = ""
    """The numerics class in which it has begun: it goes on there, if any instance of it serves."""
    preferred: str = ""
    """Weights under which it had better begin, where there is room for it."""
    held_blocks: dict[str, float] = {}
    """Blocks of its prompt that an instance holds and needn't compute; those with none are left
    out."""
    carry_ratio: float = 1.0
    """Time to copy what an instance holds of it to another one, by the time to compute it there;
    1: it would be computed."""


class DispatchPolicy(Protocol):
    """A dispatch policy."""

    def pick(self, view: ClusterView, request: NewRequest) -> InstanceView:
        """The instance that runs the request. Raises NoInstance if there is none."""
        ...


def candidates(view: ClusterView, demand_blocks: float) -> Mask:
    """The rows to choose from: of the best kind there is."""
    columns = view.columns
    if not len(columns):
        raise NoInstance("no instance to run a request on: the cluster has none")
    fits = columns.limit >= demand_blocks
    good: Mask = (columns.open_until >= view.now) & fits
    if good.any():
        return good
    kinds = (columns.fresh_until < view.now) * 100 + columns.state * 10 + ~fits
    return np.asarray(kinds == kinds.min())


def allowed(view: ClusterView, request: NewRequest) -> ClusterView:
    """The instances that the request may run on, maybe none: a policy picks among these."""
    columns = view.columns
    if request.weights:
        alike: Mask = columns.weights == number_of(request.weights)
        kind = number_of(f"{request.weights} {request.numerics}")
        exact = alike & (columns.numerics == kind) & (columns.open_until >= view.now)
        rows = exact if exact.any() else alike
        return view if rows.all() else view.only(rows)
    if request.preferred:
        roomy = (columns.open_until >= view.now) & (columns.room >= request.demand_blocks)
        rows = roomy & (columns.weights == number_of(request.preferred))
        return view.only(rows) if rows.any() and not rows.all() else view
    return view


def here_first(
    view: ClusterView, request: NewRequest, guests: Collection[str], weights: str
) -> ClusterView:
    """The instances of this server, if one of them may take the request; else also the guests.

    guests: instances of other servers. weights: of this server's, under which a new request begins;
    empty: they aren't known, and the guests have the same ones.
    """
    columns = view.columns
    here: Mask = np.array([one.instance not in guests for one in view.instances], dtype=bool)
    open_here = here & (columns.open_until >= view.now) & (columns.limit >= request.demand_blocks)
    if open_here.any():
        return view.only(here)
    if not request.weights and weights:
        here |= columns.weights == number_of(weights)
        return view.only(here)
    return view


class TieRotation:
    """Breaks ties: the first after the one taken last, in the view's order."""

    def __init__(self) -> None:
        self._taken = -1

    def take_row(self, rows: NDArray[np.intp]) -> int:
        """Take one of `rows`, which are not empty and in order."""
        after = int(np.searchsorted(rows, self._taken, side="right"))
        self._taken = int(rows[after if after < len(rows) else 0])
        return self._taken


class RoundRobin:
    """Dispatch to the instances in turn, regardless of load."""

    def __init__(self) -> None:
        self._rotation = TieRotation()

    def pick(self, view: ClusterView, request: NewRequest) -> InstanceView:
        """The next one."""
        rows = np.flatnonzero(candidates(view, request.demand_blocks))
        return view.instances[self._rotation.take_row(rows)]


class _Best:
    """The instance with the highest score."""

    def __init__(self) -> None:
        self._rotation = TieRotation()

    def scores(self, columns: ViewColumns, demand_blocks: float) -> Column:
        """How well the request would be at each."""
        raise NotImplementedError

    def pick(self, view: ClusterView, request: NewRequest) -> InstanceView:
        """The one with the highest score, then with the fewest requests."""
        good = candidates(view, request.demand_blocks)
        scores = np.where(good, self.scores(view.columns, request.demand_blocks), -np.inf)
        rows = np.flatnonzero(good & (scores == scores.max()))
        if len(rows) > 1:
            requests = view.columns.requests[rows]
            rows = rows[requests == requests.min()]
        return view.instances[self._rotation.take_row(rows)]


class LeastLoaded(_Best):
    """The lowest share of memory in use or queued for: INFaaS++ of the paper."""

    def scores(self, columns: ViewColumns, demand_blocks: float) -> Column:
        """Less load is better."""
        free: Column = columns.free + columns.kept - columns.behind
        share: Column = free / np.maximum(columns.total, 1)
        return share


class FreestInstance(_Best):
    """The freest instance.

    queued: whose demand counts. The paper's rule, literally, with "head"; its artifact's
    with "all".
    """

    def __init__(self, queued: Queued) -> None:
        super().__init__()
        self.queued: Queued = queued

    def scores(self, columns: ViewColumns, demand_blocks: float) -> Column:
        """More freeness is better."""
        return freenesses(free_blocks_of(columns, self.queued), batch_sizes(columns, self.queued))


class RoomiestAfter(_Best):
    """The most slack that would be left with the request there, all queued demand counted.

    So one goes where it fits now rather than where others have more room to grow; an idle
    one that it fits on is best.
    """

    def scores(self, columns: ViewColumns, demand_blocks: float) -> Column:
        """More slack is better."""
        free = columns.room - demand_blocks
        weight = np.where(columns.requests == 0, _IDLE, columns.share)
        return np.where(free < 0, free, free * weight)


class FewestWithRoom:
    """The fewest requests among those with room enough; the roomiest if there is none.

    A step takes longer with each request in the batch, and each prompt stops all others for
    its prefill: where memory isn't short, requests are what an instance should have few of,
    and prompts that are still to be computed count by their length besides: each block of
    them as `prompt_weight` requests.

    Where an instance holds a part of the request's prompt, those blocks count that each one would
    have to compute, for the request and for all that it would stop there: `prefill_weight` times
    each of them, by the most of the prompt that any holds. So the request goes where its beginning
    is, unless that instance is so crowded that another one costs less. That one holds the beginning
    afterwards, too. A short beginning that all hold changes next to nothing.
    Enough: each request could still grow by `enough` blocks with the new one there. Blocks that an
    instance holds of its prompt take no room there; so the beginning counts where room is short.

    A request of a priority with headroom goes to where such ones run already, as long as
    they fit side by side once all others have made way: kept apart, each would cost
    the room of a whole instance. Others go there only where they would have to wait elsewhere.
    """

    def __init__(self, enough: float, prompt_weight: float, prefill_weight: float = 0.5) -> None:
        self.enough = enough
        self.prompt_weight = prompt_weight
        self.prefill_weight = prefill_weight
        self._rotation = TieRotation()
        self._roomiest = RoomiestAfter()

    def pick(self, view: ClusterView, request: NewRequest) -> InstanceView:
        columns, demand = view.columns, request.demand_blocks
        if _is_protected(view, request.priority):
            beside = (columns.kept > 0) & (columns.room + columns.lower >= demand)
            row = _most(columns.room, beside & (columns.open_until >= view.now))
            if row is not None:
                return view.instances[row]
            row = _most(columns.room, candidates(view, demand))
            return view.instances[0 if row is None else row]
        is_open = columns.open_until >= view.now
        room, held, longest = columns.room - demand, None, 0.0
        if request.held_blocks:
            held, longest = _held(view, request)
            room += held
        slack = np.where(is_open, room * columns.share, -np.inf)
        most = slack.max(initial=-np.inf)
        if most < 0:  # it fits nowhere now, but perhaps into a headroom
            row = _most(columns.room, is_open & (columns.room + columns.kept >= demand))
            return self._roomiest.pick(view, request) if row is None else view.instances[row]
        if most >= self.enough:
            crowds = columns.requests + self.prompt_weight * columns.prompts
            if held is not None:
                lacking = demand - held
                if request.carry_ratio != 1:
                    lacking -= (longest - held) * (1 - request.carry_ratio)
                lacking *= self.prefill_weight * longest / demand
                lacking *= 1 + columns.requests
                crowds += lacking
            crowds = np.where(slack >= self.enough, crowds, np.inf)
            rows = np.flatnonzero(crowds == crowds.min())
            most = slack[rows].max()
            rows = rows[slack[rows] == most]
        else:
            rows = np.flatnonzero(slack == most)
        return view.instances[self._rotation.take_row(rows)]


def _held(view: ClusterView, request: NewRequest) -> tuple[Column, float]:
    """Blocks of the request's prompt that each instance holds, at most the whole; and the most."""
    known, count = request.held_blocks, len(request.held_blocks)
    held = np.zeros(len(view.instances) + 1)  # the last row takes what those hold that aren't here
    rows = np.fromiter(map(view.rows.get, known, repeat(-1)), np.intp, count)
    held[rows] = np.fromiter(known.values(), np.float64, count)
    here = held[:-1]
    longest = float(here.max(initial=0.0))
    if longest > request.demand_blocks:
        return np.minimum(here, request.demand_blocks), request.demand_blocks
    return here, longest


def _is_protected(view: ClusterView, priority: int) -> bool:
    """Whether the priority has headroom anywhere (all instances have the same classes)."""
    heard = (one.headroom for one in view.instances if one.reported_at is not None)
    return bool(next(heard, {}).get(priority))


def _most(values: Column, rows: Mask) -> int | None:
    """The row with the highest value among `rows`."""
    if not rows.any():
        return None
    return int(np.where(rows, values, -np.inf).argmax())
