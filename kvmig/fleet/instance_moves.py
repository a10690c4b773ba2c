"""An instance that moves so that another model has room: which may, and how it is done.

Another instance starts at the new place first; then the old one is drained: its requests move.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping

from kvmig.core.background import BackgroundTasks
from kvmig.core.clock import Clock
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
PAUSE_S = 10.0
"""Pause after a move that has failed."""


def patience_s(model: ManagedModel) -> float:
    """Seconds that instances of others may move for it, before those who wait give up."""
    return model.wanted.spec.instances.start_timeout_s - (model.start_s or 0.0)


class InstanceMover:
    """The moves of all models' instances. Make it inside a running event loop."""

    def __init__(
        self,
        models: Mapping[str, ManagedModel],
        places: ModelPlaces,
        devices: DeviceBudget,
        orders: BackgroundTasks,
        clock: Clock,
        note: Callable[[ManagedModel, str], None],
        wall: Clock,
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
        moves = (model.moving for model in self._models.values())
        return frozenset(name for one in moves if one for name in (one.node, one.to_node))

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

    def moves_for(self, model: ManagedModel, rooms: Rooms) -> RoomPlan | None:
        """Moves that would make room for another instance of a model; None: there are none."""
        need = self._places.need(model)
        movable = [one for one in self.movable() if one.need.model != need.model]
        return make_room(rooms, need, movable, patience_s(model))

    def begin(self, found: RoomPlan, rooms: Rooms) -> None:
        """Begin moves that make room. rooms: what is free before them."""
        if any(self._models[one.model].life.state != "serving" for one in found.moves):
            return  # one has begun to end since
        for move in found.moves:
            model = self._models[move.model]
            assert model.watched is not None
            model.moving, model.moved_at = move, self._clock()
            model.places.coming = (move.to_gpus,) if move.to_gpus else ()
            node = self._places.node_id(move.to_node)
            model.nodes.coming = (node,) if node else ()
            self._note(model, f"instance {move.instance} moves so that another model has room")
            place = InstancePlace(move.to_node, move.to_gpus)
            why = self._places.explain_move(model, place, rooms)
            work = self._move(model, model.watched, move, node, why)
            model.ordering = self._orders.start(work, f"move of {move.model}")

    async def _move(
        self,
        model: ManagedModel,
        watched: DeploymentWatcher,
        move: RoomMove,
        node: str,
        why: PlaceExplanation,
    ) -> None:
        """Carry a move out. node: the id of the new node; empty: there is one host."""
        try:
            (name,) = await watched.add(1, self._devices.ids(move.to_gpus), node)
            if move.to_gpus:
                model.places.by_instance[name] = move.to_gpus
            if node:
                model.nodes.by_instance[name] = node
            model.places.coming, model.nodes.coming = (), ()
            self._places.history.keep(model.deployment, name, self._wall(), why)
            try:
                await watched.wait_serving(name, model.wanted.spec.instances.start_timeout_s)
            except StartupError:
                await watched.drain(name)
                raise
            await watched.drain(move.instance)
        except StartupError as error:
            self._note(model, f"instance {move.instance} has not moved: {error}")
            await asyncio.sleep(PAUSE_S)
        finally:
            model.places.coming, model.nodes.coming, model.moving = (), (), None


def _may_move(model: ManagedModel, now: float) -> bool:
    spec, rows = model.wanted.spec, model.instance_rows
    return (
        model.life.state == "serving"
        and not (model.unit or model.former or model.is_ordering or model.rolls)
        and model.is_newest
        and spec.instances.target_kind != "freeness"
        and now - model.moved_at >= AGAIN_S
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
