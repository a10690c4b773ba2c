"""Which models may start alongside those that run, and which of these make room for them. Pure.

A model's instances need memory of their nodes, and GPUs where the nodes have some.

The model that has waited longest starts first. If it doesn't fit, idle models end for it, the
least valuable first. A model never ends while it answers or a request waits for it, nor before it
has been there for some time: otherwise two models that are used in turn would only start and end.
A later model may start earlier only where it takes nothing that the first one will need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from kvmig.core.devices import in_gib
from kvmig.fleet import device_room
from kvmig.fleet.device_room import DeviceNeed, Strategy
from kvmig.fleet.place_choice import (
    PlaceExplanation,
    choose_places,
    explained,
    places_on,
    with_places,
)
from kvmig.fleet.room_moves import MovableInstance, RoomPlan, make_room
from kvmig.fleet.worker_filters import TINY, admits, most_on, refused_node
from kvmig.fleet.worker_nodes import (
    LOCAL,
    NO_AMOUNTS,
    InstanceNeed,
    InstancePlace,
    NodeRoom,
    Rooms,
    WorkerNode,
    room_now,
    with_amounts,
)
from kvmig.launcher.ray_resources import amounts

GIB = 1 << 30
STAY = 4.0
"""Times as long as its start took, that a model stays at least: a fifth of the time at most is
spent on starts."""
STAY_S = 10.0
"""The same where no start was seen."""


@dataclass(frozen=True, slots=True)
class HostCapacity:
    """Memory, in bytes."""

    total: int
    """Bytes that all models together may take."""
    available: int
    """Bytes that are free on the host now."""


@dataclass(frozen=True, slots=True)
class SharedHold:
    """What the models of a unit hold together, until the last of them has ended."""

    unit: str
    models: frozenset[str]
    """Models that run, and models that wait for their start."""
    held: Mapping[str, int]
    """Bytes of each GPU."""
    resources: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Amounts of what else they take together, by nodes."""


@dataclass(frozen=True, slots=True)
class ResidentModel:
    """A model whose deployment is there, or ordered."""

    name: str
    claim: int
    """Bytes that it takes."""
    since: float
    """When it was ordered, or began to serve."""
    stay_s: float
    """Seconds that it stays from then on."""
    ready: bool = True
    """Whether it has taken them already."""
    idle_s: float = 0.0
    priority: int = 0
    """Smaller ones stay longer."""
    kept: bool = False
    """Whether it must not end now: it answers, or a request waits for it."""
    pinned: bool = False
    """Whether it is never to end: it has a least number of instances."""
    leaving: bool = False
    """Whether it ends already."""
    parked: bool = False
    """Whether it takes only what it can't give back; such end first, also if they are wanted."""
    held: Mapping[str, int] = field(default_factory=dict)
    """Bytes that it takes of each GPU."""
    shared: SharedHold | None = None
    """What it shares with others of its unit; None: it is in none."""
    on: Mapping[str, int] = field(default_factory=dict)
    """The bytes of `claim` by nodes; empty: all of them are of the local one."""

    resources: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Amounts of what else it takes, by nodes."""

    @property
    def claims(self) -> Mapping[str, int]:
        """The bytes that it takes of each node's memory."""
        return self.on or {LOCAL: self.claim}


@dataclass(frozen=True, slots=True)
class WaitingModel:
    """A model that would start now, or wake."""

    name: str
    claim: int
    """Bytes more than it takes already, all of its instances together."""
    since: float
    need: DeviceNeed | None = None
    """What its instances want of GPUs; None: nothing, or they have their GPUs already."""
    instances: int = 1
    more: Mapping[str, int] = field(default_factory=dict)
    """Bytes more that it takes of GPUs that it has."""
    wakes_on: Mapping[str, int] = field(default_factory=dict)
    """The bytes of `claim` by nodes of a model that wakes where it is; empty: it starts."""
    engine: str = ""
    selector: Mapping[str, str] = field(default_factory=dict)
    """Labels that its nodes have."""
    source: str = ""
    """The source of its files."""
    strategy: Strategy | None = None
    """The strategy of its specification; None: that of the fleet counts."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Amounts of what else each instance takes, by Ray's names."""
    workers: Sequence[str] = ()
    """The workers of its instances, as a placement names them; empty: they are chosen."""
    patience_s: float = 0.0
    """Seconds that others may move for it before its start; 0: none moves for it."""

    @property
    def of_instance(self) -> InstanceNeed:
        """What one instance of a model that starts wants of its node."""
        wants = () if self.need is None else (self.need,)
        each = -(-self.claim // self.instances)
        return InstanceNeed(
            self.name, each, wants, self.engine, self.selector, self.source, self.resources
        )


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """What was decided."""

    refused: Mapping[str, str] = field(default_factory=dict)
    """Reasons why waiting models don't start now. All others start."""
    barred: frozenset[str] = frozenset()
    """Waiting models that no node would take now, with any room."""
    never: Mapping[str, str] = field(default_factory=dict)
    """Reasons why waiting models can't start at all."""
    yielding: frozenset[str] = frozenset()
    """Models that are evicted for others."""
    places: Mapping[str, tuple[InstancePlace, ...]] = field(default_factory=dict)
    """Places of the instances of models that start."""
    explained: Mapping[str, tuple[PlaceExplanation, ...]] = field(default_factory=dict)
    """Why they are there."""
    rooms: Rooms = field(default_factory=dict)
    """What is left then, whether or not a model waits for it."""
    waits: bool = False
    """Whether a model waits for room."""
    moves: RoomPlan | None = None
    """Moves of instances that make room for the one that waits longest, where none may end."""

    def spare(self, node: str = LOCAL) -> int:
        """Bytes of a node's memory that no model takes or waits for."""
        return 0 if self.waits or node not in self.rooms else self.rooms[node].memory


def no_plan(names: Iterable[str]) -> CapacityPlan:
    """A plan by which none of these models starts and nothing ends: none could be made."""
    refused = dict.fromkeys(names, "the server could not plan this round")
    return CapacityPlan(refused, waits=True)


def free(host: HostCapacity, residents: Iterable[ResidentModel]) -> int:
    """Bytes that the next one may take. Those that are not ready take theirs yet."""
    every = list(residents)
    claimed = sum(one.claim for one in every)
    coming = sum(one.claim for one in every if not one.ready)
    return _free(host.total, host.available, claimed, coming)


def _free(total: int, available: int, claimed: int, coming: int) -> int:
    return max(0, min(total - claimed, available - coming))


def too_large(name: str, claim: int, total: int) -> str:
    """What is wrong with a model that can never start; empty: nothing."""
    if claim <= total:
        return ""
    return (
        f"model {name} needs {claim} bytes of memory, {claim - total} more than the {total} that"
        " all models may take"
    )


def why_not_parked(more: int, free_bytes: int) -> str:
    """Why a model ends where it would be parked; empty: it is parked.

    more: bytes of the host that it would take in addition. free_bytes: those that no model has or
    waits for.
    """
    if more <= max(0, free_bytes):
        return ""
    return (
        f"parked it would need {more / GIB:.1f} GiB of the host, {free_bytes / GIB:.1f} GiB is free"
    )


def plan(
    nodes: Sequence[WorkerNode],
    waiting: Iterable[WaitingModel],
    residents: Sequence[ResidentModel],
    now: float,
    strategy: Strategy = "spread",
    movable: Sequence[MovableInstance] = (),
    moving: Set[str] = frozenset(),
) -> CapacityPlan:
    """Which models start, wait (and why) or end. now: seconds of the clock of all `since`.

    nodes: their GPUs with the claims of the residents. movable: instances that may move so that
    others have room. moving: nodes that instances move from or to already, for the one that waits
    longest; none move besides, and no later one starts there.
    """
    decision = _Decision(_Site(nodes, residents, strategy), now, movable, moving)
    for one in sorted(waiting, key=lambda one: (one.since, one.name)):
        decision.take(one)
    return decision.made()


class _Decision:
    """What is decided so far, model by model."""

    def __init__(
        self, site: _Site, now: float, movable: Sequence[MovableInstance], moving: Set[str]
    ) -> None:
        self._site, self._now, self._movable, self._moving = site, now, movable, moving
        self._left = site.left
        self._going: list[_Started] = []
        self._refused: dict[str, str] = {}
        self._barred: set[str] = set()
        self._never: dict[str, str] = {}
        self._explained: dict[str, tuple[PlaceExplanation, ...]] = {}
        self._yielding: frozenset[str] = frozenset()
        self._moves: RoomPlan | None = None
        self._ahead: _RoomAhead | None = None

    def take(self, one: WaitingModel) -> None:
        """Decide about a model that waits; those that have waited longer come before."""
        room = self._left if self._ahead is None else self._ahead.beside(self._left, one)
        if (places := _places(room, one, self._site.strategy_of(one))) is not None:
            self._start(one, places)
        elif nowhere := _taken_nowhere(one, self._site):
            self._refused[one.name] = nowhere
            self._barred.add(one.name)
        elif wrong := _too_large(one, self._site):
            if self._site.may_grow:
                self._refused[one.name] = _no_room(one, self._left)
            else:
                self._never[one.name] = wrong
        else:
            self._wait(one)

    def made(self) -> CapacityPlan:
        """The whole decision."""
        return CapacityPlan(
            self._refused,
            frozenset(self._barred),
            self._never,
            self._yielding,
            {one.name: places for one, places in self._going if places},
            self._explained,
            self._left,
            self._ahead is not None,
            self._moves,
        )

    def _start(self, one: WaitingModel, places: tuple[InstancePlace, ...]) -> None:
        if places:
            strategy = self._site.strategy_of(one)
            self._explained[one.name] = explained(self._left, one.of_instance, places, strategy)
        self._left = _with_model(self._left, one, places)
        if self._ahead is not None:
            self._ahead.take(one, places)
        self._going.append((one, places))

    def _wait(self, one: WaitingModel) -> None:
        site, left, first = self._site, self._left, self._ahead is None
        for_good = not _fits(site.beside_pinned, one)
        doing = self._making_room(one, for_good=for_good) if first else ""
        if for_good and not doing:  # nobody waits for its turn
            moves = self._moving or self._moves is not None
            rest = "; instances move now" if moves else ", the rest is taken for good"
            self._refused[one.name] = f"{_no_room(one, left)}{rest}"
            return
        ahead = 0 if self._ahead is None else self._ahead.models
        self._refused[one.name] = _why(one, left, ahead, doing)
        if self._ahead is None:
            moving = self._moving if self._moves is None else self._moves.nodes
            self._ahead = _RoomAhead(site, one.since, self._going, moving)
        self._ahead.keep(one)

    def _making_room(self, one: WaitingModel, *, for_good: bool) -> str:
        """Find out who ends or moves for the model that waits longest; empty: none does."""
        if not for_good:
            stay = {one.name, *(other.name for other, _ in self._going)}
            others = [other for other in self._site.residents if other.name not in stay]
            self._yielding = _yielding(one, self._site, self._left, others, self._now)
            if self._yielding:
                return "idle models end"
        if not self._moving:
            self._moves = _moves_for(one, self._left, self._movable)
        return "instances move" if self._moving or self._moves is not None else ""


# -- rooms

NOTHING: Mapping[str, Mapping[str, float]] = {}
_Started = tuple[WaitingModel, tuple[InstancePlace, ...]]
"""A model that starts or wakes now, and the places of its instances."""


def _waking(one: WaitingModel) -> bool:
    """Whether its instances are on their nodes already."""
    return bool(one.more or one.wakes_on)


def _is_fixed(one: WaitingModel) -> bool:
    """Whether a placement says where its instances are."""
    return bool(one.workers) or (one.need is not None and bool(one.need.at))


def _wakes_on(one: WaitingModel) -> Mapping[str, int]:
    return one.wakes_on or {LOCAL: one.claim}


def _places(
    rooms: Rooms, one: WaitingModel, strategy: Strategy
) -> tuple[InstancePlace, ...] | None:
    """Places for its instances, none if it wakes; None: there is no room for all of them."""
    if one.workers:
        return places_on(rooms, one.of_instance, one.workers)
    if not _waking(one):
        return choose_places(rooms, one.of_instance, one.instances, strategy)
    for name, size in _wakes_on(one).items():
        if size and (name not in rooms or rooms[name].memory < size):
            return None
    short = any(_free_on(rooms, gpu) < size for gpu, size in one.more.items())
    return None if short else ()


def _free_on(rooms: Rooms, gpu: str) -> int:
    return next((room.devices[gpu] for room in rooms.values() if gpu in room.devices), 0)


def _with_model(
    rooms: Rooms, one: WaitingModel, places: tuple[InstancePlace, ...]
) -> dict[str, NodeRoom]:
    """What is left once the model has started at these places, or woken."""
    if not _waking(one):
        return with_places(rooms, one.of_instance, places)
    taken = {name: -size for name, size in _wakes_on(one).items()}
    whose = {gpu: name for name, room in rooms.items() for gpu in one.more if gpu in room.devices}
    return {**rooms, **_given(rooms, taken, {gpu: -size for gpu, size in one.more.items()}, whose)}


def _given(
    rooms: Rooms,
    memory: Mapping[str, int],
    held: Mapping[str, int],
    whose: Mapping[str, str],
    resources: Mapping[str, Mapping[str, float]] = NOTHING,
) -> dict[str, NodeRoom]:
    """The nodes that have more once this is given back. memory, resources: by nodes; held: bytes by
    GPUs."""
    devices: dict[str, dict[str, int]] = {}
    for gpu, size in held.items():
        if (name := whose.get(gpu)) is not None and size:
            if name not in devices:
                devices[name] = dict(rooms[name].devices)
            devices[name][gpu] += size
    found = {}
    for name in {*memory, *devices, *resources}:
        if (room := rooms.get(name)) is not None:
            size = room.memory + memory.get(name, 0)
            more = with_amounts(room.resources, resources.get(name, NO_AMOUNTS))
            left = devices.get(name, room.devices)
            found[name] = NodeRoom(room.node, size, left, room.counts, more)
    return found


def _negative(amounts: Mapping[str, float]) -> dict[str, float]:
    return {name: -amount for name, amount in amounts.items()}


def _fits(rooms: Rooms, one: WaitingModel, *, anywhere: bool = False) -> bool:
    """Whether its instances have room. anywhere: also where a node takes none of them now."""
    if _waking(one) or _is_fixed(one):
        return _places(rooms, one, "pack") is not None
    need, missing = one.of_instance, one.instances
    for room in rooms.values():
        if anywhere or admits(room.node, need):
            missing -= most_on(room, need, one.need, missing)
            if missing <= 0:
                return True
    return False


class _Site:
    """The nodes, as they are and as they would be without models."""

    def __init__(
        self, nodes: Sequence[WorkerNode], residents: Sequence[ResidentModel], strategy: Strategy
    ) -> None:
        self.nodes, self.residents, self._strategy = nodes, residents, strategy
        claimed, coming = Counter[str](), Counter[str]()
        for one in residents:
            claimed.update(one.claims)
            coming.update({} if one.ready else one.claims)
        self.left: Rooms = {
            one.name: room_now(
                one, _free(one.total, one.available, claimed[one.name], coming[one.name])
            )
            for one in nodes
        }
        """What is free now."""

    @property
    def may_grow(self) -> bool:
        """Whether other nodes may come."""
        return [one.name for one in self.nodes] != [LOCAL]

    def strategy_of(self, one: WaitingModel) -> Strategy:
        """The strategy by which the model's nodes are chosen."""
        return one.strategy or self._strategy

    @cached_property
    def whose(self) -> Mapping[str, str]:
        """The nodes of GPUs."""
        return {gpu.id: one.name for one in self.nodes for gpu in one.devices}

    @cached_property
    def whole(self) -> Rooms:
        """What there is, taken or not."""
        return {
            one.name: NodeRoom(one, one.total, one.sizes, one.counts, one.resources)
            for one in self.nodes
        }

    def beside(self, staying: Iterable[ResidentModel]) -> dict[str, NodeRoom]:
        """What is free while these stay, and all others have ended."""
        empty = {
            one.name: NodeRoom(one, one.total, one.usable, one.counts, one.resources)
            for one in self.nodes
        }
        if not (every := list(staying)):
            return empty
        taken = Counter[str]()
        resources: dict[str, Mapping[str, float]] = {}
        shared = {one.shared.unit: one.shared for one in every if one.shared is not None}
        for one in every:
            taken.subtract(one.claims)
        amounts_of = [one.resources for one in every] + [one.resources for one in shared.values()]
        for found in amounts_of:
            for name, taken_there in found.items():
                before = resources.get(name, NO_AMOUNTS)
                resources[name] = with_amounts(before, _negative(taken_there))
        held = {gpu: -size for gpu, size in _held(every, lambda shared: True).items()}
        return empty | _given(empty, taken, held, self.whose, resources)

    @cached_property
    def beside_pinned(self) -> Rooms:
        """What is free while those stay that never end."""
        return self.beside(one for one in self.residents if one.pinned)


def _held(models: Sequence[ResidentModel], counts: Callable[[SharedHold], bool]) -> Counter[str]:
    """Bytes that they hold of each GPU. counts: which units' shared bytes are among them."""
    shared = {one.shared.unit: one.shared for one in models if one.shared is not None}
    held: Counter[str] = Counter()
    for sizes in (
        *(one.held for one in models),
        *(one.held for one in shared.values() if counts(one)),
    ):
        held.update(sizes)
    return held


class _RoomAhead:
    """What those need that wait, once the others have ended; later ones start in what is left.

    Those are not counted on to end that are pinned, or have come since the first one waits.
    """

    def __init__(
        self, site: _Site, first: float, started: Iterable[_Started], moving: Set[str]
    ) -> None:
        """first: since when the first one waits. started: models that have started before it.
        moving: nodes with instances that move for it."""
        self._moving = moving
        staying = [one for one in site.residents if one.pinned or one.since >= first]
        self._rooms: Rooms | None = site.beside(staying)
        for one, places in started:
            self._rooms = _with_model(self._rooms, one, places)
        self._waiting: list[WaitingModel] = []
        """The models without a place yet: that takes a look at all nodes, once a later one asks."""
        self.models = 0
        """How many wait."""

    def keep(self, one: WaitingModel) -> None:
        """Keep room for one that waits; where there is none, no later one starts."""
        self.models += 1
        self._waiting.append(one)

    def take(self, one: WaitingModel, places: tuple[InstancePlace, ...]) -> None:
        """Take note of a later one that starts."""
        if self._rooms is not None:  # else it wakes, and takes nothing more
            self._rooms = _with_model(self._rooms, one, places)

    def beside(self, left: Rooms, one: WaitingModel) -> Rooms:
        """What a later one may have: on nodes with room for one of its instances at least."""
        for other in self._waiting:
            if self._rooms is not None:
                places = _places(self._rooms, other, "pack")
                kept = None if places is None else _with_model(self._rooms, other, places)
                self._rooms = kept
        self._waiting.clear()
        if self._rooms is None:
            return {}
        need = one.of_instance
        found = {}
        for name, room in left.items():
            if name in self._moving:
                continue
            if _waking(one) or (admits(room.node, need) and most_on(room, need, one.need, 1)):
                ahead = self._rooms[name]
                found[name] = replace(
                    room,
                    memory=min(room.memory, ahead.memory),
                    devices={
                        gpu: min(size, ahead.devices[gpu]) for gpu, size in room.devices.items()
                    },
                    resources={
                        one: min(amount, ahead.resources.get(one, 0.0))
                        for one, amount in room.resources.items()
                    },
                )
        return found


# -- who ends


def _yielding(
    one: WaitingModel,
    site: _Site,
    left: Rooms,
    residents: Iterable[ResidentModel],
    now: float,
) -> frozenset[str]:
    """The models whose end makes room for it; none if not enough may end."""
    every = list(residents)
    chosen = [other for other in every if other.leaving]
    idle = sorted(
        (other for other in every if not other.leaving and (other.parked or _may_end(other, now))),
        key=lambda other: (not other.parked, -other.priority, -other.idle_s, other.name),
    )
    room = _RoomMade(one, site, left)
    for other in chosen:
        room.end(other)
    for other in idle:
        if room.enough:
            break
        room.end(other)
        chosen.append(other)
    if not room.enough:
        return frozenset(other.name for other in every if other.leaving)
    for other in [each for each in reversed(chosen) if not each.leaving]:  # the most valuable first
        room.end(other, back=True)
        if room.enough:
            chosen.remove(other)
        else:
            room.end(other)
    return frozenset(other.name for other in chosen)


class _RoomMade:
    """Whether a model that has no room gets some by the end of others, one after the other."""

    def __init__(self, one: WaitingModel, site: _Site, left: Rooms) -> None:
        self._one, self._site = one, site
        self._rooms = dict(left)
        self._need = one.of_instance
        self._ended: set[str] = set()
        self._counts = not (_waking(one) or _is_fixed(one))
        """Whether it is enough to count the instances that have room on each node."""
        self._on = {name: self._most_on(room) for name, room in left.items() if self._counts}
        self._most = sum(self._on.values())

    def end(self, other: ResidentModel, *, back: bool = False) -> None:
        """End another model; back: it doesn't end after all."""
        shared = other.shared
        before = shared is not None and shared.models <= self._ended
        (self._ended.discard if back else self._ended.add)(other.name)
        after = shared is not None and shared.models <= self._ended
        held, resources = other.held, other.resources
        if shared is not None and before != after:  # the last of its unit
            held = Counter(held) + Counter(shared.held)
            resources = {
                name: with_amounts(
                    resources.get(name, NO_AMOUNTS), shared.resources.get(name, NO_AMOUNTS)
                )
                for name in {*resources, *shared.resources}
            }
        sign = -1 if back else 1
        memory = {name: sign * size for name, size in other.claims.items()}
        of_gpus = {gpu: sign * size for gpu, size in held.items()}
        if back:
            resources = {name: _negative(it) for name, it in resources.items()}
        given = _given(self._rooms, memory, of_gpus, self._site.whose, resources)
        for name, room in given.items():
            if self._counts:
                most = self._most_on(room)
                self._most += most - self._on[name]
                self._on[name] = most
            self._rooms[name] = room

    @property
    def enough(self) -> bool:
        """Whether all of its instances have room."""
        if self._counts:
            return self._most >= self._one.instances
        return _fits(self._rooms, self._one)

    def _most_on(self, room: NodeRoom) -> int:
        if not admits(room.node, self._need):
            return 0
        return most_on(room, self._need, self._one.need, self._one.instances)


def _moves_for(
    one: WaitingModel, left: Rooms, movable: Sequence[MovableInstance]
) -> RoomPlan | None:
    """The moves that make room for a model; None: there are none."""
    if _waking(one):
        return None
    return make_room(left, one.of_instance, movable, one.patience_s, one.instances)


def _may_end(one: ResidentModel, now: float) -> bool:
    in_use = one.kept or one.pinned or one.leaving or not one.ready
    return not in_use and now - one.since >= one.stay_s


# -- reasons


def _too_large(one: WaitingModel, site: _Site) -> str:
    """What is wrong with a model that can never start; empty: nothing."""
    if _waking(one) or one.workers or _fits(site.whole, one, anywhere=True):
        return ""
    alone = len(site.nodes) == 1
    size = one.claim if alone else one.of_instance.memory
    if wrong := too_large(one.name, size, max((node.total for node in site.nodes), default=0)):
        return wrong
    if one.need is None:
        return f"model {one.name} has {one.instances} instances: there is no room for all of them"
    by_name = sorted(site.nodes, key=lambda node: node.name)
    devices = [gpu for node in by_name for gpu in node.devices]
    if wrong := device_room.too_large(f"model {one.name}", one.need, devices):
        return wrong
    least = f"model {one.name} has {one.instances} instances, each of which needs"
    return f"{least} {device_room.wanted(one.need)}: the GPUs here don't hold them all"


def _taken_nowhere(one: WaitingModel, site: _Site) -> str:
    """The reason why no node takes the model now; empty: one does, if it has room. It names no
    node."""
    need = one.of_instance
    if one.workers:
        return _not_on_workers(one, site)
    if _waking(one) or any(admits(node, need) for node in site.nodes):
        return ""
    if not site.nodes:
        return "no room: there is no worker"
    first = {node.name: refused_node(node, need)[0].filter for node in site.nodes}
    sought = sum(first[one.name] == "files" and need.source in one.sought for one in site.nodes)
    if sought:
        return f"its files are looked for on {sought} of {len(first)} workers"
    why = Counter(first.values())
    said = ", ".join(f"{count} {WORDS[name]}" for name, count in sorted(why.items()))
    return f"no room: no worker takes it now: of {len(site.nodes)}, {said}"


def _not_on_workers(one: WaitingModel, site: _Site) -> str:
    """The reason why a worker that a placement names takes none of its instances."""
    nodes = {node.name: node for node in site.nodes}
    if any(name not in nodes for name in one.workers):
        return "no room: a worker that the placement names is not there"
    there = [nodes[name] for name in one.workers]
    refused = ((node, refused_node(node, one.of_instance)) for node in there)
    node, why = next(((it, found[0].filter) for it, found in refused if found), (None, ""))
    if node is not None and why == "files" and one.of_instance.source in node.sought:
        return "its files are looked for on a worker that the placement names"
    return f"no room: a worker that the placement names is {WORDS[why]}" if why else ""


WORDS = {
    "ready": "not ready",
    "cordon": "cordoned",
    "labels": "without its labels",
    "engine": "without its engine",
    "files": "without its files",
}


def _why(one: WaitingModel, left: Rooms, ahead: int, doing: str) -> str:
    """Names no other model: a client may not know of it."""
    room = _no_room(one, left)
    if ahead:
        return f"{room}, and {ahead} that came first wait too"
    return f"{room}; {doing} for it" if doing else f"{room}, and no model may end yet"


def _no_room(one: WaitingModel, left: Rooms) -> str:
    if _waking(one):
        return _no_room_to_wake(one, left)
    need = one.of_instance
    rooms = [
        room
        for name, room in left.items()
        if admits(room.node, need) and (not one.workers or name in one.workers)
    ]
    size = one.claim if len(left) == 1 else need.memory
    most = max((room.memory for room in rooms), default=0)
    for name, amount in need.resources.items():
        free = max((max(0.0, room.resources.get(name, 0.0)) for room in rooms), default=0.0)
        if amount > free + TINY:
            return f"no room: it needs {amounts({name: amount})}, {amounts({name: free})} is free"
    without_gpus = one.need is not None and any(_holds_all(room, need, size) for room in rooms)
    if size <= most and need.resources and not without_gpus:
        return f"no room: no worker has {in_gib(size)} and {amounts(need.resources)} free"
    if size <= most and one.need is not None:
        devices = {gpu: free for room in rooms for gpu, free in room.devices.items()}
        groups = [group for room in rooms for group in room.node.groups]
        return device_room.no_room(one.need, devices, groups)
    return f"no room: it needs {size / GIB:.1f} GiB, {most / GIB:.1f} GiB is free"


def _holds_all(room: NodeRoom, need: InstanceNeed, size: int) -> bool:
    """Whether a node has room apart from its GPUs' memory. size: bytes."""
    enough = (room.resources.get(name, 0.0) + TINY >= it for name, it in need.resources.items())
    return room.memory >= size and all(enough)


def _no_room_to_wake(one: WaitingModel, left: Rooms) -> str:
    for name, size in _wakes_on(one).items():
        most = left[name].memory if name in left else 0
        if size > most:
            return f"no room: it needs {size / GIB:.1f} GiB, {most / GIB:.1f} GiB is free"
    if not one.more:  # there is room, which those need that came first
        size = sum(_wakes_on(one).values())
        return f"no room: it needs {size / GIB:.1f} GiB, which are kept"
    gpu, size = max(one.more.items(), key=lambda more: more[1] - _free_on(left, more[0]))
    return device_room.no_room(DeviceNeed(size), {gpu: _free_on(left, gpu)}, ())
