"""Instances that move so that another model has room: which may, and how it is done.

Another instance starts at the new place first; then the old one is drained: its requests move. Of a
model of which several move, all new ones serve before an old one is drained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvmig.core.background import BackgroundTasks
from kvmig.core.clock import TimeSource
from kvmig.core.errors import StartupError
from kvmig.fleet.deployments import DeploymentWatcher
from kvmig.fleet.device_budget import DeviceBudget
from kvmig.fleet.managed_model import ManagedModel
from kvmig.fleet.model_places import ModelPlaces
from kvmig.fleet.place_choice import PlaceExplanation
from kvmig.fleet.room_moves import MovableInstance, RoomMove, RoomPlan, make_room
from kvmig.fleet.worker_nodes import InstancePlace, Rooms

START_S = 10.0
"""Assumed start time of an instance whose model has not been seen to start."""
AGAIN_S = 300.0
"""A model's instances move for others at most once in this time."""
FAILED_AGAIN_S = 30.0
"""The same after a move that has failed; twice as long after each further one."""
PAUSE_S = 10.0
"""Pause after a move that has failed."""


def patience_s(model: ManagedModel) -> float:
    """Seconds that instances of others may move for it, before those who wait give up."""
    return model.wanted.spec.instances.start_timeout_s - (model.start_s or 0.0)


class _OrderedMove(NamedTuple):
    """A move with all that its order needs."""

    move: RoomMove
    node: str
    """Id of the new node; empty: there is one host."""
    why: PlaceExplanation


class InstanceMover:
    """The moves of all models' instances. Make it inside a running event loop."""

    def __init__(
        self,
        models: Mapping[str, ManagedModel],
        places: ModelPlaces,
        devices: DeviceBudget,
        orders: BackgroundTasks,
        clock: TimeSource,
        note: Callable[[ManagedModel, str], None],
        wall: TimeSource,
    ) -> None:
        """orders: where moves run. clock: steady. note: called with what people may want to know of
        a model. wall: Unix time."""
        self._models = models
        self._places = places
        self._devices = devices
        self._orders = orders
        self._clock = clock
        self._note = note
        self._wall = wall

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes that instances move from or to now."""
        moves = (one for model in self._models.values() for one in model.moving)
        return frozenset(name for one in moves for name in (one.node, one.to_node))

    def settle(self) -> None:
        """Forget moves that are over. A drain may take long where a request can't move: after some
        time it holds up no other move."""
        now = self._clock()
        for model in self._models.values():
            if model.moving and not model.is_ordering:
                leaves = {one.id for one in model.instance_rows if one.state == "draining"}
                there = leaves & {one.instance for one in model.moving}
                if not there or now >= model.moves_at:
                    model.moving = ()

    def lines(self) -> list[str]:
        """What moves now, and what for. It names models: for admins only."""
        return [
            f"{model.wanted.name}/{one.instance} moves from {self._words(one.node, one.gpus)} to"
            f" {self._words(one.to_node, one.to_gpus)} to make room: {_waits_for(model, one)}"
            for model in self._models.values()
            for one in model.moving
        ]

    def _words(self, node: str, gpus: Sequence[str]) -> str:
        return ", ".join((node, *map(self._places.title, gpus)))

    def movable(self) -> list[MovableInstance]:
        """The instances that may move now; none while one does."""
        if self.nodes:
            return []
        now = self._clock()
        return [
            one
            for model in self._models.values()
            if _may_move(model, now) and not self._places.leaves(model)
            for one in _movable_of(model, self._places)
        ]

    def moves_for(self, model: ManagedModel, rooms: Rooms, instances: int) -> RoomPlan | None:
        """Moves that would make room for this number of instances of a model; None: there are
        none."""
        need = self._places.need(model)
        movable = [one for one in self.movable() if one.need.model != need.model]
        return make_room(rooms, need, movable, patience_s(model), instances)

    def begin(self, found: RoomPlan, rooms: Rooms) -> None:
        """Begin moves that make room. rooms: what is free before them."""
        models = [self._models.get(one.model) for one in found.moves]
        if any(one is None or one.life.state != "serving" for one in models):
            return  # one has ended since, or begun to
        lacking = [
            self._places.workers.lacking_files(self._models[one.model], [one.to_node])
            for one in found.moves
        ]
        if any(lacking):
            return  # their files come there first
        for name in dict.fromkeys(one.model for one in found.moves):
            model = self._models[name]
            assert model.watched is not None
            moves = tuple(one for one in found.moves if one.model == name)
            ordered = [self._ordered(model, one, rooms) for one in moves]
            model.moving, model.moves_at = moves, self._clock() + AGAIN_S
            model.places.coming = tuple(one.to_gpus for one in moves if one.to_gpus)
            model.nodes.coming = tuple(one.node for one in ordered if one.node)
            work = self._move(model, model.watched, ordered)
            model.ordering = self._orders.start(work, f"moves of {name}")

    def _ordered(self, model: ManagedModel, move: RoomMove, rooms: Rooms) -> _OrderedMove:
        self._note(model, f"instance {move.instance} moves so that another model has room")
        place = InstancePlace(move.to_node, move.to_gpus)
        why = self._places.explain_move(model, place, rooms)
        return _OrderedMove(move, self._places.node_id(move.to_node), why)

    async def _move(
        self, model: ManagedModel, watched: DeploymentWatcher, ordered: Sequence[_OrderedMove]
    ) -> None:
        """Carry moves out."""
        names: list[str] = []
        try:
            for one in ordered:
                name = await self._add(model, watched, one)
                names.append(name)
            for name in names:
                await watched.wait_serving(name, model.wanted.spec.instances.start_timeout_s)
            for one in ordered:
                await watched.drain(one.move.instance)
                del names[0]  # it has taken the place of this one
            model.failed_moves = 0
        except StartupError as error:
            which = ", ".join(one.move.instance for one in ordered)
            self._note(model, f"instance {which} has not moved: {error}")
            pause_s = min(FAILED_AGAIN_S * 2**model.failed_moves, AGAIN_S)
            model.failed_moves += 1
            model.moves_at = self._clock() + pause_s
            await self._take_back(model, watched, names)
            await asyncio.sleep(PAUSE_S)
            model.moving = ()
        finally:
            model.places.coming, model.nodes.coming = (), ()

    async def _add(self, model: ManagedModel, watched: DeploymentWatcher, one: _OrderedMove) -> str:
        """Start an instance at the new place; its name."""
        gpus = one.move.to_gpus
        (name,) = await watched.add(1, self._devices.ids(gpus), one.node)
        if gpus:
            model.places.by_instance[name] = gpus
            model.places.coming = model.places.coming[1:]
        if one.node:
            model.nodes.by_instance[name] = one.node
            model.nodes.coming = model.nodes.coming[1:]
        self._places.history.keep(model.deployment, name, self._wall(), one.why)
        return name

    async def _take_back(
        self, model: ManagedModel, watched: DeploymentWatcher, names: Sequence[str]
    ) -> None:
        """Drain instances that were started in vain."""
        for name in names:
            try:
                await watched.drain(name)
            except StartupError as error:
                self._note(model, f"instance {name} stays: {error}")


def _waits_for(model: ManagedModel, move: RoomMove) -> str:
    """What the move of an instance waits for."""
    row = next((one for one in model.instance_rows if one.id == move.instance), None)
    if row is None:
        return "it has ended"
    if row.state == "draining":
        return f"its {row.running + row.waiting} requests leave"
    return "another instance starts there first"


def _may_move(model: ManagedModel, now: float) -> bool:
    spec, rows = model.wanted.spec, model.instance_rows
    return (
        model.life.state == "serving"
        and not (model.unit or model.agents or model.former or model.is_ordering or model.rolls)
        and model.is_newest
        and spec.instances.target_kind != "freeness"
        and now >= model.moves_at
        and len(rows) == model.desired
        and all(row.state == "serving" for row in rows)
    )


def _movable_of(model: ManagedModel, places: ModelPlaces) -> Iterator[MovableInstance]:
    need, kv = places.need(model), places.kv_bytes(model.wanted.spec)
    for row in model.instance_rows:
        gpus = model.places.gpus_of(row)
        node = places.worker_of(model, row)
        if row.unmovable or not node or bool(gpus and need.wants) != bool(need.wants):
            continue
        gpus = gpus if need.wants else ()  # on workers Ray gives them out
        each = model.places.size_of(row.id) if gpus else 0
        whole = each * len(gpus) if gpus else need.memory
        share = row.blocks_used / row.blocks_total if row.blocks_total else 0.0
        used = min(whole, int(share * (kv or whole)))
        start_s = START_S if model.start_s is None else model.start_s
        place = InstancePlace(node, gpus, each)
        yield MovableInstance(row.id, place, need, start_s, min(whole, kv or used), used)
