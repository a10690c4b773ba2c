"""A plan from the present instances to those of a placement, while they serve. Pure.

`plan` finds waves: all steps of a wave begin at once, the next wave when all of them are over.
In any order of their ends every state between is legal: what is on a unit fits into its memory, a
model with work has an instance that serves, and all live tokens have room with instances that
serve. Times are seconds, sizes bytes.

What is searched are sets of instances (A*, by time): a set is legal if the models' live tokens
can be spread over it, which a flow decides. How tokens and quotas get from one spread to the next
follows from the flow's own paths (`_settled`).
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvmig.placement.matching import matched

GIB = 2**30
LOOKED_AT = 4000
"""Sets of instances that a search looks at, at most."""
SMALL = 12
"""Number of possible instances up to which every helping step is tried everywhere."""
TRIES = 10
"""Ways that are looked for where tokens have no room to pass each other."""
IDLE_GAP, LIVE_GAP = 10.0, 100.0
"""Cost of a gap in which a model has no instance, without and with live requests, in starts of the
model: a way without the gap is preferred if it is longer by less than that."""

Slot = tuple[str, str]
"""A model and the unit where an instance of it is; a unit has one of each model at most."""
Slots = frozenset[Slot]


class PlacedLease(NamedTuple):
    """What one instance needs."""

    quota: int
    """Bytes of KV cache that it may always hold."""
    used: int = 0
    """Bytes that live requests hold: more than the quota where others lend them."""
    share: float = 1.0
    """Share of the unit's SMs for decode steps."""


Leases = Mapping[Slot, PlacedLease]


class MoveUnit(NamedTuple):
    """GPUs that instances share."""

    memory: int
    """Bytes for weights, instances and KV cache, all GPUs together."""
    gpus: int = 1
    arena: int | None = None
    """Bytes of KV cache for all instances together; None: what is left of the memory."""

    def room(self, held: int) -> int:
        """Bytes for KV cache besides what its instances hold without it; below 0: too much."""
        left = self.memory - held
        return left if self.arena is None else min(left, self.arena)


class ModelNeeds(NamedTuple):
    """What one instance of it takes."""

    held: int
    """Bytes before the first token of KV cache."""
    floor: int
    """Bytes of KV cache for one request of the greatest length: no quota is smaller."""
    start_s: float
    """Seconds from the order until it serves."""
    byte_s: float = 0.0
    """Seconds for each byte that leaves one instance of it, besides the link's: its requests move
    in handshakes that wait for steps of their engines."""


class PlacementSite(NamedTuple):
    """What stays as it is while instances come and go."""

    units: Mapping[str, MoveUnit]
    models: Mapping[str, ModelNeeds]
    elastic: bool = False
    """Whether quotas can change while instances serve; otherwise they are those of the start."""
    bandwidth: float = 1e9
    """Bytes of KV cache a second that leave one instance."""
    drain_s: float = 1.0
    """Seconds of a drain, besides its bytes."""
    allow_gap: bool = False
    """Whether requests may wait until their model's next instance has computed them again."""

    def leave_s(self, model: str, size: float) -> float:
        """Seconds for `size` bytes of live requests to leave one instance of the model."""
        return size * (1 / self.bandwidth + self.models[model].byte_s)

    def rooms(self, on: Collection[Slot]) -> dict[str, int]:
        """Bytes for KV cache in each unit with these instances."""
        held = Counter[str]()
        for model, unit in on:
            held[unit] += self.models[model].held
        return {unit: one.room(held[unit]) for unit, one in self.units.items()}


Kind = Literal["quota", "move", "start", "drain", "gap"]
"""quota: it may hold this much from now on; move: requests and quota for them go to another unit;
start; drain: its requests go to others of its model, then it ends; gap: it ends though no other
instance of its model serves."""


class PlanStep(NamedTuple):
    """One order."""

    kind: Kind
    model: str
    unit: str
    seconds: float
    size: int = 0
    """start: weights that are loaded; drain, move: KV cache that travels."""
    quota: int = 0
    """start, quota: from then on."""
    share: float = 1.0
    to: tuple[tuple[str, int], ...] = ()
    """move, drain: units where there is room for what travels, and how much of it goes there; a
    drain may share it out otherwise."""


class PlanWave(NamedTuple):
    """Steps that begin at once."""

    steps: tuple[PlanStep, ...]

    @property
    def seconds(self) -> float:
        """Seconds until all are over."""
        return max(one.seconds for one in self.steps)


class PlanRefused(NamedTuple):
    """No plan was found; there may be none."""

    why: str


def plan(site: PlacementSite, now: Leases, target: Leases) -> list[PlanWave] | PlanRefused:
    """Waves from `now` to `target`, with its units as they are named; `used` of it doesn't count.
    Raises KeyError for an unknown model or unit."""
    search = _Search(site, now, target)
    if short := search.impossible():
        return PlanRefused(short)
    for _ in range(TRIES):
        found = search.ways()
        if isinstance(found, PlanRefused):
            return found
        leases = _Leases(search)
        try:
            for change in found:
                leases.carry_out(change)
        except _Stuck:
            search.banned.add(change)
            continue
        leases.finish()
        return leases.waves
    return PlanRefused(f"{TRIES} ways were found, each with a unit too full for requests to pass")


def nearest(site: PlacementSite, now: Leases, target: Leases) -> dict[str, str]:
    """The unit that each unit of the target had better be, so that the least is loaded and
    moved: a placement means no unit in particular among those that are alike (Hungarian method)."""
    names = list(site.units)
    there = {unit: {model for model, at in now if at == unit} for unit in names}
    wanted = {unit: {model for model, at in target if at == unit} for unit in names}
    never = 1.0 + sum(2.0 * site.models[model].held for model, _ in (*now, *target))
    never += sum(one.used for one in now.values())

    def cost(want: str, unit: str) -> float:
        if site.units[want] != site.units[unit]:
            return never
        load = sum(site.models[model].held for model in wanted[want] - there[unit])
        leave = sum(now[model, unit].used for model in there[unit] - wanted[want])
        return load + leave + (0.0 if want == unit else 0.5)  # equal ones stay as they are named

    columns = matched([[cost(want, unit) for unit in names] for want in names])
    return {want: names[column] for want, column in zip(names, columns, strict=True)}


def placed(site: PlacementSite, now: Leases, target: Leases) -> dict[Slot, PlacedLease]:
    """The target with its units as `nearest` names them."""
    name = nearest(site, now, target)
    return {(model, name[unit]): lease for (model, unit), lease in target.items()}


def seconds(waves: Sequence[PlanWave]) -> float:
    """How long they take, one after the other."""
    return sum(one.seconds for one in waves)


# -- sets of instances


@dataclass(frozen=True)
class _Change:
    """What a set of instances takes in one wave."""

    starts: Slots
    drains: Slots
    gaps: Slots = frozenset()
    """Drains after which no instance of their model serves."""


class _Search:
    def __init__(self, site: PlacementSite, now: Leases, target: Leases) -> None:
        self.site = site
        self.begin, self.end = frozenset(now), frozenset(target)
        self.live = dict.fromkeys(site.models, 0)
        for (model, _), lease in now.items():
            self.live[model] += lease.used
        self.now, self.target = now, target
        self.banned: set[_Change] = set()
        """Legal before and after, and not on the way."""
        self._missing: dict[tuple[Slots, Slots], int] = {}
        self._short: tuple[int, Slot, str] | None = None
        """The least that was missing for a step that is wanted, whose it was, and which."""

    # -- what may be

    def least(self, slot: Slot) -> int:
        """Bytes of KV cache that the instance has for itself."""
        if self.site.elastic:
            return self.site.models[slot[0]].floor
        if slot in self.now:
            return self.now[slot].quota
        if slot in self.target:
            return self.target[slot].quota
        return self.site.models[slot[0]].floor

    def missing(self, on: Slots, holders: Slots) -> int:
        """Bytes that are short if these instances are there and those hold all live tokens; at
        most 0: none."""
        key = on, holders
        if key not in self._missing:
            self._missing[key] = self._compute_missing(on, holders)
        return self._missing[key]

    def _compute_missing(self, on: Slots, holders: Slots) -> int:
        spare = self.site.rooms(on)
        for slot in on:
            spare[slot[1]] -= self.least(slot)
        if (over := -min(spare.values())) > 0:
            return over
        # In a gap nobody holds a model's tokens; that it may be one is decided elsewhere.
        left = {slot[0]: self.live[slot[0]] for slot in holders}
        for slot in holders:
            left[slot[0]] -= self.least(slot)
        demand = {model: need for model, need in left.items() if need > 0}
        if not self.site.elastic:
            return sum(demand.values())
        spread = _Spread(dict.fromkeys(sorted(holders), 0), {}, spare)
        return sum(spread.send((model, ""), need) for model, need in sorted(demand.items()))

    def legal(self, on: Slots, change: _Change) -> bool:
        """Whether the wave is, however its steps end."""
        return self.missing(on | change.starts, on - change.drains) <= 0

    def impossible(self) -> str:
        """Why the target itself can't be; empty: it can."""
        for unit, one in self.site.units.items():
            there = [slot for slot in self.end if slot[1] == unit]
            held = sum(self.site.models[model].held for model, _ in there)
            over = sum(self.target[slot].quota for slot in there) - one.room(held)
            if over > 0:
                return (
                    f"unit {unit}: the placement puts {over / GIB:.2f} GiB more there than it holds"
                )
        for model, live in sorted(self.live.items()):
            if live and not any(name == model for name, _ in self.end):
                return (
                    f"model {model}: the placement has no instance of it, and "
                    f"{live / GIB:.2f} GiB of live requests"
                )
        if (short := self.missing(self.end, self.end)) > 0:
            return f"live requests hold {short / GIB:.2f} GiB more than the placement has room for"
        return ""

    # -- what may be done next

    def changes(self, on: Slots) -> Iterator[_Change]:
        """Waves worth a look: each possible step alone, with all drains that are wanted, and with
        all wanted steps that are legal besides it."""
        wanted = self._wanted(on)
        small = len(self.site.units) * len(self.site.models) <= SMALL
        stuck = not any(self.legal(on, one) for one in wanted)
        helping = self._helping(on) if small or stuck else []
        if small:
            helping += [
                _Change(one.starts | two.starts, frozenset())
                for one, two in itertools.combinations([one for one in helping if one.starts], 2)
            ]
        nothing = _Change(frozenset(), frozenset())
        seeds = [nothing, *wanted, *helping]
        seen: set[_Change] = set()
        for seed in seeds:
            if not self.legal(on, seed):
                if seed in wanted:
                    self._note(on, seed)
                continue
            drained = self._grown(on, seed, [one for one in wanted if one.drains])
            full = self._grown(on, drained, [one for one in wanted if one.starts])
            started = self._grown(on, seed, [one for one in wanted if one.starts])
            for one in (seed, drained, full, started):
                if one != nothing and one not in seen and one not in self.banned:
                    seen.add(one)
                    yield one

    def _wanted(self, on: Slots) -> list[_Change]:
        models = self.site.models
        starts = sorted(self.end - on, key=lambda slot: (models[slot[0]].held, slot))
        drains = sorted(on - self.end, key=lambda slot: (-models[slot[0]].held, slot))
        return [
            *(one for slot in drains if (one := self._drain(on, slot)) is not None),
            *(_Change(frozenset([slot]), frozenset()) for slot in starts),
        ]

    def _helping(self, on: Slots) -> list[_Change]:
        """Steps that aren't towards the target: an instance for a while, or one that goes and
        comes back."""
        some = [
            _Change(frozenset([(model, unit)]), frozenset())
            for model in self.site.models
            for unit in self.site.units
            if (model, unit) not in on | self.end and any(name == model for name, _ in on)
        ]
        away = [self._drain(on, slot) for slot in sorted(on & self.end)]
        return [*some, *(one for one in away if one is not None)]

    def _drain(self, on: Slots, slot: Slot) -> _Change | None:
        """The drain of an instance, or its end where no other serves its model; None: it may not
        end."""
        alone = frozenset([slot])
        others = any(one[0] == slot[0] for one in on - alone)
        if others:
            return _Change(frozenset(), alone)
        wanted = any(one[0] == slot[0] for one in self.end)
        if self.live[slot[0]] and not (self.site.allow_gap and wanted):
            return None
        return _Change(frozenset(), alone, alone)

    def _grown(self, on: Slots, change: _Change, more: Sequence[_Change]) -> _Change:
        for one in more:
            larger = _Change(
                change.starts | one.starts, change.drains | one.drains, change.gaps | one.gaps
            )
            last = {slot[0] for slot in larger.drains} - {s[0] for s in on - larger.drains}
            if last <= {slot[0] for slot in larger.gaps} and self.legal(on, larger):
                change = larger
        return change

    # -- the way

    def ways(self) -> list[_Change] | PlanRefused:
        """The quickest way; in a large problem, or where it takes too long, a quick one."""
        for exact in (True, False):
            found = self._a_star(exact)
            if not isinstance(found, PlanRefused):
                return found
        return found

    def _a_star(self, exact: bool) -> list[_Change] | PlanRefused:
        number = itertools.count()  # equal ones in the order in which they were found
        best = {self.begin: 0.0}
        came: dict[Slots, tuple[Slots, _Change]] = {}
        heap = [(0.0, 0.0, next(number), self.begin)]
        looked = 0
        while heap and looked < LOOKED_AT:
            _, _, _, on = heapq.heappop(heap)
            if on == self.end:
                return self._back(came)
            looked += 1
            for change in self.changes(on):
                after = (on | change.starts) - change.drains
                took = best[on] + self.cost(on, change)
                if took < best.get(after, float("inf")) - 1e-9:
                    best[after] = took
                    came[after] = on, change
                    steps = len(after ^ self.end)
                    first = took + self._to_go(after) if exact else steps
                    heapq.heappush(heap, (first, took, next(number), after))
        return self._refusal(bool(heap))

    def _back(self, came: Mapping[Slots, tuple[Slots, _Change]]) -> list[_Change]:
        changes: list[_Change] = []
        at = self.end
        while at != self.begin:
            at, change = came[at]
            changes.append(change)
        return changes[::-1]

    def cost(self, on: Slots, change: _Change) -> float:
        """Seconds of the wave; a gap counts as what it does to those who wait."""
        times = [self.site.models[slot[0]].start_s for slot in change.starts]
        times += [self.drain_s(on, slot) for slot in change.drains]
        gaps = sum(
            self.site.models[slot[0]].start_s * (LIVE_GAP if self.live[slot[0]] else IDLE_GAP)
            for slot in change.gaps
            if any(slot[0] == model for model, _ in self.end)
        )
        return max(times) + gaps

    def drain_s(self, on: Slots, slot: Slot) -> float:
        """Seconds of the drain of one instance that holds as much as the others of its model."""
        alike = sum(one[0] == slot[0] for one in on)
        return self.site.drain_s + self.site.leave_s(slot[0], self.live[slot[0]] / alike)

    def _to_go(self, on: Slots) -> float:
        starts = (self.site.models[slot[0]].start_s for slot in self.end - on)
        drains = (self.site.drain_s for _ in on - self.end)
        return max((*starts, *drains), default=0.0)

    # -- why not

    def _note(self, on: Slots, seed: _Change) -> None:
        (slot,) = seed.starts | seed.drains
        short = self.missing(on | seed.starts, on - seed.drains)
        if self._short is None or (short, slot) < self._short[:2]:
            self._short = short, slot, "start in" if seed.starts else "leave"

    def _refusal(self, bound: bool) -> PlanRefused:
        found = f"no way was found in {LOOKED_AT} looks" if bound else "there is no way"
        gap = "" if self.site.allow_gap else " and no request waits for a start"
        if self._short is None:
            return PlanRefused(f"{found}{gap}: the only instance of a model has live requests")
        short, (model, unit), what = self._short
        return PlanRefused(
            f"{found} in which each state is legal{gap}: "
            f"model {model} can't {what} unit {unit}, {short / GIB:.3g} GiB are missing"
        )


# -- where live tokens go


class _Spread:
    """Live tokens on units, and the moves that make room for more: a flow's augmenting paths."""

    def __init__(
        self,
        put: Mapping[Slot, int],
        own: Mapping[Slot, int],
        room: Mapping[str, int],
        closed: Collection[Slot] = (),
    ) -> None:
        """put: of each slot, what it holds beyond its own part of the unit.

        own: what of that part is free. room: of each unit, beyond its instances' own parts; below
        0: that much must go. closed: slots that take nothing.
        """
        self.put = dict(put)
        self.own = dict(own)
        self.room = dict(room)
        self.closed = closed
        self._here = dict(put)
        """What of `put` isn't only on its way."""
        self.moves: list[tuple[Slot, Slot, int]] = []
        """Moves from slot to slot, each with room for it once those before it are done."""
        self.sent: list[tuple[Slot, Slot, int]] = []
        """Moves that `send` was asked for, with room for them after all moves."""

    def send(self, origin: Slot, size: int, early: bool = False) -> int:
        """Find room for bytes of origin's model with others of it; how many found none.

        early: they go at once, and leave room behind.
        """
        while size > 0:
            open_ = [slot for slot in self.put if slot[0] == origin[0] and slot not in self.closed]
            path = self._path(sorted(open_, key=self._takes, reverse=True))
            if path is None:
                break
            part = self._along(path, size)
            size -= part
            if early:
                self.moves.append((origin, path[0], part))
                self._here[path[0]] += part
                self.room[origin[1]] += part
            else:
                self.sent.append((origin, path[0], part))
        return size

    def shed(self, unit: str) -> int:
        """Let tokens leave until the unit isn't overfull; by how much it still is."""
        while self.room[unit] < 0:
            path = self._path([("", unit)])
            if path is None:
                break
            self.room[unit] += self._along(path, -self.room[unit])
        return max(0, -self.room[unit])

    def _path(self, entries: Sequence[Slot]) -> list[Slot] | None:
        """The shortest way from one of `entries` to room: a slot with room, or one of whose unit
        others leave (every second slot) for a next one, and so on."""
        paths = [[slot] for slot in entries]
        seen = set(entries)
        for path in paths:  # grows meanwhile
            if self._takes(path[-1]) > 0:
                return path
            for leave in self.put:
                if leave[1] == path[-1][1] and self.put[leave] > 0:
                    for to in self.put:
                        if to[0] == leave[0] and to not in seen and to not in self.closed:
                            seen.add(to)
                            paths.append([*path, leave, to])
        return None

    def _takes(self, slot: Slot) -> int:
        return self.own.get(slot, 0) or self.room[slot[1]]

    def _along(self, path: Sequence[Slot], most: int) -> int:
        """Push bytes along a path, the last ones first; how many."""
        end = path[-1]
        size = min([most, self._takes(end), *(self.put[leave] for leave in path[1::2])])
        pairs = list(zip(path[1::2], path[2::2], strict=True))
        for leave, to in reversed(pairs):
            self.put[leave] -= size
            self._leave(leave, to, size)
        for entered in path[:-1:2]:
            if entered[0]:
                self.put[entered] += size
        if self.own.get(end, 0):
            self.own[end] -= size
        else:
            self.put[end] += size
            self.room[end[1]] -= size
        return size

    def _leave(self, leave: Slot, to: Slot, size: int) -> None:
        """What is there moves; what is only on its way goes elsewhere from the beginning."""
        part = min(size, self._here[leave])
        if part:
            self.moves.append((leave, to, part))
            self._here[leave] -= part
            self._here[to] += part
        rest = size - part
        for at, (origin, meant, many) in enumerate(self.sent):
            turned = min(rest, many) if meant == leave else 0
            if turned:
                self.sent[at] = origin, leave, many - turned
                self.sent.append((origin, to, turned))
                rest -= turned
            if not rest:
                break


class _Stuck(Exception):
    """A change has room once it is done, and none on the way."""


# -- waves


class _Leases:
    """The quotas of all instances while a plan is carried out on paper; every change is a wave."""

    def __init__(self, search: _Search) -> None:
        self.search = search
        self.site = search.site
        self.of = dict(search.now)
        self.waves: list[PlanWave] = []
        self._parted = dict.fromkeys(self.site.models, 0)
        """Bytes of requests that wait in a gap."""

    def carry_out(self, change: _Change) -> None:
        """Starts and drains, and before them what they need."""
        spread = self._spread(change, early=False) or self._spread(change, early=True)
        if spread is None:
            raise _Stuck
        quotas: dict[Slot, int] = {}
        if self.site.elastic:
            touched = {slot[1] for slot in change.starts}
            touched |= {slot[1] for one in spread.moves for slot in one[:2]}
            touched |= {to[1] for _, to, _ in spread.sent}
            if spread.moves:
                self._quotas(self._tight(touched))
            for one in spread.moves:
                self._move(*one)
            quotas = self._shared(touched, change, spread)
            self._quotas({slot: quota for slot, quota in quotas.items() if slot in self.of})
        steps = [
            self._drained(slot, slot in change.gaps, spread.sent) for slot in sorted(change.drains)
        ]
        steps += [self._started(slot, quotas.get(slot)) for slot in sorted(change.starts)]
        self.waves.append(PlanWave(tuple(steps)))
        for _, to, size in spread.sent:
            self._hold(to, size)

    def finish(self) -> None:
        """Quotas and shares as the target has them. What is held beyond one is lent: it stays until
        others of the unit want it."""
        target = self.search.target
        self._quotas(
            {slot: target[slot].quota for slot in self.of},
            {slot: target[slot].share for slot in self.of},
        )

    # -- what a change needs

    def _least(self, slot: Slot) -> int:
        return self.search.least(slot)

    def _spread(self, change: _Change, early: bool) -> _Spread | None:
        """The slot that tokens go to for it; None: the way there is too narrow.

        early: what drains begins to move before all else.
        """
        site = self.site
        room = dict.fromkeys(site.units, 0)
        if site.elastic:
            room = site.rooms({*self.of, *change.starts})
        put: dict[Slot, int] = {}
        own: dict[Slot, int] = {}
        for slot in sorted({*self.of, *change.starts}):
            used = self.of[slot].used if slot in self.of else 0
            beyond = max(0, used - self._least(slot)) if site.elastic else 0
            if site.elastic:
                room[slot[1]] -= self._least(slot) + beyond
            if slot in self.of:
                put[slot] = beyond
                own[slot] = max(0, self._least(slot) - used)
        spread = _Spread(put, own, room, change.drains)
        short = sum(spread.shed(unit) for unit in sorted(room))
        for slot in sorted(change.drains - change.gaps):
            beyond = spread.put[slot]
            if early and beyond:
                spread.put[slot] = 0
                beyond = spread.send(slot, beyond, early=True)
                spread.put[slot] = beyond
        left = {slot: self.of[slot].used - put[slot] + spread.put[slot] for slot in change.drains}
        spread.put.update(dict.fromkeys(change.drains, 0))
        short += sum(spread.send(slot, left[slot]) for slot in sorted(change.drains - change.gaps))
        return None if short else spread

    def _tight(self, units: Collection[str]) -> dict[Slot, int]:
        """Quotas of just what is held there."""
        return {
            slot: max(one.used, self._least(slot))
            for slot, one in self.of.items()
            if slot[1] in units
        }

    def _shared(self, units: Collection[str], change: _Change, spread: _Spread) -> dict[Slot, int]:
        """Quotas there for all who are there or come: what each will hold, and an equal part of
        what is left."""
        coming = Counter[Slot]()
        for _, to, size in spread.sent:
            coming[to] += size
        quotas: dict[Slot, int] = {}
        rooms = self.site.rooms({*self.of, *change.starts})
        for unit in units:
            there = sorted(slot for slot in {*self.of, *change.starts} if slot[1] == unit)
            need = {
                slot: max(self._least(slot), (self.of[slot].used if slot in self.of else 0)
                          + coming[slot])
                for slot in there
            }  # fmt: skip
            part = (rooms[unit] - sum(need.values())) // len(there)
            quotas |= {slot: size + part for slot, size in need.items()}
        return quotas

    # -- the steps

    def _quotas(
        self, wanted: Mapping[Slot, int], shares: Mapping[Slot, float] | None = None
    ) -> None:
        """Shrink quotas in one wave, and grow others in the next."""
        shrink, grow = list[PlanStep](), list[PlanStep]()
        for slot, quota in sorted(wanted.items()):
            lease = self.of[slot]
            share = lease.share if shares is None else shares[slot]
            if (quota, share) != (lease.quota, lease.share):
                step = PlanStep("quota", *slot, 0.0, quota=quota, share=share)
                (grow if quota > lease.quota else shrink).append(step)
                self.of[slot] = lease._replace(quota=quota, share=share)
        self.waves += [PlanWave(tuple(one)) for one in (shrink, grow) if one]

    def _move(self, origin: Slot, to: Slot, size: int) -> None:
        """Quota goes along. Moves between other units are in the same wave."""
        took = self.site.leave_s(origin[0], size)
        step = PlanStep("move", *origin, took, size, to=((to[1], size),))
        lease = self.of[origin]
        used = lease.used - size
        self.of[origin] = lease._replace(used=used, quota=max(used, self._least(origin)))
        self._hold(to, size)
        last = self.waves[-1].steps if self.waves else ()
        others = {unit for one in last for unit in (one.unit, *(at for at, _ in one.to))}
        if last and last[0].kind == "move" and not others & {origin[1], to[1]}:
            self.waves[-1] = PlanWave((*last, step))
        else:
            self.waves.append(PlanWave((step,)))

    def _drained(self, slot: Slot, gap: bool, sent: Sequence[tuple[Slot, Slot, int]]) -> PlanStep:
        used = self.of.pop(slot).used
        if gap:
            self._parted[slot[0]] += used
            return PlanStep("gap", *slot, self.site.drain_s)
        to = Counter[str]()
        for origin, there, size in sent:
            if origin == slot and size:
                to[there[1]] += size
        took = self.site.drain_s + self.site.leave_s(slot[0], used)
        return PlanStep("drain", *slot, took, used, to=tuple(sorted(to.items())))

    def _started(self, slot: Slot, quota: int | None) -> PlanStep:
        model = self.site.models[slot[0]]
        lease = PlacedLease(
            self._least(slot) if quota is None else quota,
            share=self.search.target.get(slot, PlacedLease(0)).share,
        )
        self.of[slot] = lease
        back = min(self._parted[slot[0]], lease.quota)
        self._parted[slot[0]] -= back
        self._hold(slot, back)
        return PlanStep("start", *slot, model.start_s, model.held, lease.quota, lease.share)

    def _hold(self, slot: Slot, size: int) -> None:
        lease = self.of[slot]
        used = lease.used + size
        self.of[slot] = lease._replace(used=used, quota=max(lease.quota, used))
