"""Orders about a deployment's instances, as the server gives them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvmig.core.clock import TimeSource
from kvmig.core.errors import StartupError
from kvmig.fleet.autoscale import ScalingOrder
from kvmig.fleet.deployments import DeploymentWatcher, OrderUnanswered
from kvmig.fleet.device_budget import DeviceBudget
from kvmig.fleet.flag_rolls import RolledStart, RollStep
from kvmig.fleet.leaving_instances import LeavingStep
from kvmig.fleet.managed_model import ManagedModel
from kvmig.fleet.model_places import ModelPlaces
from kvmig.fleet.model_workers import WorkerDeadline
from kvmig.fleet.place_choice import PlaceExplanation
from kvmig.fleet.worker_nodes import InstancePlace
from kvmig.fleet.worker_pool import WorkerPool

PAUSE_S = 10.0
"""Pause after an order about instances that was refused, or that has failed."""
TRIES = 3
"""How often an order of a roll-out is given that has no answer."""
NO_DEADLINES: Mapping[str, WorkerDeadline] = {}


class InstanceOrders:
    """Carries out what was decided about the number of a model's instances."""

    def __init__(
        self,
        places: ModelPlaces,
        workers: WorkerPool,
        devices: DeviceBudget,
        note: Callable[[ManagedModel, str], None],
        wall: TimeSource,
    ) -> None:
        """note: called with what people may want to know of a model. wall: Unix time."""
        self._places = places
        self._workers = workers
        self._devices = devices
        self._note = note
        self._wall = wall

    async def set_instances(
        self,
        model: ManagedModel,
        watched: DeploymentWatcher,
        order: ScalingOrder,
        places: Sequence[InstancePlace],
        why: Sequence[PlaceExplanation],
        staying: Sequence[str],
        first: Mapping[str, WorkerDeadline] = NO_DEADLINES,
    ) -> None:
        """Carry out one step. Another instance takes the place of a failed one later.

        places: of the instances that are added. staying: the instances of which one may be drained,
        first: those of them that go before the others, with their deadlines.
        """
        try:
            if order.failed:
                for instance in order.failed:
                    self._note(model, f"instance {instance} has failed, and is taken out")
                    model.additions.fail(f"instance {instance} has failed")
                    await watched.drain(instance)
            elif places:
                vllm = model.wanted.spec.vllm
                start = RolledStart(vllm=vllm) if vllm else None
                await self._add(model, watched, places, why, start)
            else:
                await _drain_one(watched, staying, first)
        except StartupError as error:
            self._note(model, f"instances: {error}")
            if places:
                model.additions.fail(str(error))
            else:
                await asyncio.sleep(PAUSE_S)
        finally:
            model.places.coming, model.nodes.coming = (), ()

    async def _add(
        self,
        model: ManagedModel,
        watched: DeploymentWatcher,
        places: Sequence[InstancePlace],
        why: Sequence[PlaceExplanation],
        start: RolledStart | None,
    ) -> None:
        reasons = iter(why)
        add = watched.add if start is None else partial(watched.add, start=start)
        if not (self._workers.there or places[0].gpus):
            for name in sorted(await add(len(places))):
                self._keep_reason(model, name, next(reasons, None))
            return
        for place in places:
            node = self._workers.node_id(place.node)
            for name in await add(1, self._devices.ids(place.gpus), node):
                if place.gpus:
                    model.places.by_instance[name] = place.gpus
                if node:
                    model.nodes.by_instance[name] = node
                self._keep_reason(model, name, next(reasons, None))
            model.places.coming = model.places.coming[1:]
            model.nodes.coming = model.nodes.coming[1:]

    async def roll_instance(
        self,
        model: ManagedModel,
        watched: DeploymentWatcher,
        step: RollStep,
        places: Sequence[InstancePlace],
        why: Sequence[PlaceExplanation],
    ) -> None:
        """Let one instance be started as something else; places: of one that is added for that.
        Only what the deployment refuses, or never answers, stops a roll-out."""
        try:
            if step.instance:
                self._note(model, f"instance {step.instance} starts again with {step.start}")
                await self._restart(model, watched, step)
                model.rolled_last = step
            else:
                await self._add(model, watched, places, why, step.start)
        except StartupError as error:
            self._note(model, f"instances: {error}")
            model.cant_roll = (step.start, str(error))
            await asyncio.sleep(PAUSE_S)
        finally:
            model.places.coming, model.nodes.coming = (), ()

    async def _restart(
        self, model: ManagedModel, watched: DeploymentWatcher, step: RollStep
    ) -> None:
        """Give the order again as long as it isn't carried out for want of an answer."""
        for _ in range(TRIES - 1):
            try:
                await watched.restart(step)
            except OrderUnanswered as error:
                self._note(model, f"instance {step.instance}: {error}; it is asked again")
            else:
                return
        await watched.restart(step)

    def _keep_reason(self, model: ManagedModel, name: str, why: PlaceExplanation | None) -> None:
        if why is not None:
            self._places.history.keep(model.deployment, name, self._wall(), why)

    async def empty_workers(
        self,
        model: ManagedModel,
        watched: DeploymentWatcher,
        step: LeavingStep,
        deadlines: Mapping[str, WorkerDeadline],
    ) -> None:
        """Take instances from workers that are drained, or were lost. deadlines: of those that are
        drained, by instances' names."""
        try:
            for instance in step.kept:
                self._note(model, f"instance {instance} serves again: its worker stays")
                await watched.stop_drain(instance)
                model.departing.pop(instance, None)
            for instance in step.removed:
                self._note(model, f"instance {instance} is taken out: its worker leaves")
                await watched.drain(instance)
            for instance in step.drained:
                self._note(model, f"instance {instance} is drained: its worker leaves")
                model.departing[instance] = deadlines[instance].until
                await watched.drain(instance, deadlines[instance].seconds)
            for instance in step.renewed:
                self._note(model, f"instance {instance} has another deadline for its drain")
                model.departing[instance] = deadlines[instance].until
                await watched.set_deadline(instance, deadlines[instance].seconds)
        except StartupError as error:
            self._note(model, f"instances: {error}")
            await asyncio.sleep(PAUSE_S)


async def _drain_one(
    watched: DeploymentWatcher, staying: Sequence[str], first: Mapping[str, WorkerDeadline]
) -> None:
    """Drain the instance whose requests move fastest; the last one stays."""
    serving = [one for one in watched.told.data if one.state == "serving" and one.id in staying]
    if len(serving) > 1:
        goes = min(serving, key=lambda one: (one.id not in first, one.blocks_used, one.running))
        await watched.drain(goes.id, first[goes.id].seconds if goes.id in first else None)
