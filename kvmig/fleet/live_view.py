"""What runs in a fleet now, looked at for people, and what they order about single instances.

A look asks each deployment for its requests, at most once in LOOK_S, however many people look; the
rest the server has in memory. Without a look nothing is asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvmig.core.api_records import InstanceRow, RequestRow
from kvmig.core.clock import TimeSource, monotonic
from kvmig.core.devices import DeviceRecord
from kvmig.core.errors import StartupError
from kvmig.core.live_records import (
    LiveDevice,
    LiveFleet,
    LiveInstance,
    LiveModel,
    LiveMove,
    LiveStream,
    MoveRecord,
)
from kvmig.fleet.controller import ModelController
from kvmig.fleet.device_metrics import records_of
from kvmig.fleet.device_room import DeviceMemory
from kvmig.fleet.managed_model import ManagedModel
from kvmig.fleet.store import NameTaken, NotThere
from kvmig.fleet.worker_nodes import LOCAL

LOOK_S = 0.9
"""Time for which a look counts; a little less than a second, at which people look again."""
ANSWER_S = 2.0
"""Timeout of a deployment's list of its requests."""
MOST_MOVES = 50

log = logging.getLogger(__name__)

Streams = Mapping[str, Sequence[RequestRow] | None]
"""Requests by deployment; None: it did not list them."""
Result = TypeVar("Result")


@dataclass(eq=False)
class LiveView:
    """What runs now, as the page shows it; make it inside a running event loop."""

    models: ModelController
    wall: TimeSource
    """Unix time."""
    clock: TimeSource = monotonic
    aliases: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Names that stand for models by weights, as the catalogue has them."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _streams: Streams = field(default_factory=dict, init=False)
    _looked_at: float = field(default=-LOOK_S, init=False)

    async def observe(self, most_streams: int) -> LiveFleet:
        """What runs now. most_streams: how many are listed; 0: no deployment is asked."""
        streams = await self._asked() if most_streams else {}
        return self._seen(streams, most_streams)

    def _deployments(self) -> list[ManagedModel]:
        """List the deployments of all models; a model that rolls out may have two."""
        found: list[ManagedModel] = []
        for one in self.models.every():
            beside = self.models.rollouts.beside(one.wanted.name)
            found += [one] if beside is None else [one, beside]
        return found

    async def _asked(self) -> Streams:
        async with self._lock:
            if self.clock() - self._looked_at >= LOOK_S:
                asked = [one for one in self._deployments() if one.serving]
                rows = await asyncio.gather(*map(self._requests, asked))
                names = [one.deployment for one in asked]
                self._streams = dict(zip(names, rows, strict=True))
                self._looked_at = self.clock()
            return self._streams

    async def _requests(self, model: ManagedModel) -> Sequence[RequestRow] | None:
        if model.watched is None:
            return ()
        try:
            return await model.watched.requests(ANSWER_S)
        except StartupError as error:
            log.info("streams of %s are not shown: %s", model.wanted.name, error)
            return None

    def _seen(self, streams: Streams, most: int) -> LiveFleet:
        every = self._deployments()
        listed = [
            LiveStream(model=one.wanted.name, deployment=one.deployment, row=row)
            for one in every
            for row in streams.get(one.deployment) or ()
        ]
        moves = [
            LiveMove(model=one.wanted.name, move=move)
            for one in every
            if one.watched is not None
            for move in one.watched.reports
        ]
        moves.sort(key=lambda one: one.move.ended_at, reverse=True)
        counts = Counter(one.model for one in listed)
        silent = {one.wanted.name for one in every if streams.get(one.deployment, ()) is None}
        return LiveFleet(
            at=self.wall(),
            models=tuple(self._model(one, counts) for one in self.models.every()),
            instances=tuple(self._instance(one, row) for one in every for row in one.instance_rows),
            streams=tuple(fair_part(listed, most)),
            moves=tuple(moves[:MOST_MOVES]),
            devices=self._devices(),
            unanswered=tuple(sorted(silent)),
        )

    def _model(self, one: ManagedModel, streams: Mapping[str, int]) -> LiveModel:
        name = one.wanted.name
        front = self.models.rollouts.front(name) or one
        beside = self.models.rollouts.beside(name)
        both = [each for each in (one, beside) if each is not None and not each.former]
        return LiveModel(
            name=name,
            state=front.life.state,
            why=front.life.why,
            serving=sum(each.ready for each in both),
            desired=sum(each.desired for each in both),
            running=sum(map(self.models.running, both)),
            held=self.models.reports.held(name),
            streams=streams.get(name, 0),
        )

    def _devices(self) -> tuple[LiveDevice, ...]:
        here = self.models.memory.devices.watch.inventory.devices
        records = records_of(here, self.models.workers.workers())
        return tuple(
            live_device(node.name, one, records.get(one.id))
            for node in self.models.places.nodes()
            for one in node.devices
        )

    def _instance(self, model: ManagedModel, row: InstanceRow) -> LiveInstance:
        places = self.models.places
        return LiveInstance(
            model=model.wanted.name,
            deployment=model.deployment,
            worker=places.worker_of(model, row),
            gpus=tuple(map(places.title, model.places.gpus_of(row))),
            row=row,
        )

    # -- orders

    async def drain(self, model: str, instance: str, deployment: str) -> None:
        """Let an instance's requests go elsewhere; then it ends. Raises NotThere, NameTaken."""
        one, row = self._find(model, instance, deployment)
        if row.state != "draining" and one.watched is not None:
            await refusing(one.watched.drain(instance))

    async def undrain(self, model: str, instance: str, deployment: str) -> None:
        """Let an instance that is drained serve again. Raises NotThere, NameTaken."""
        one, row = self._find(model, instance, deployment)
        if row.state == "draining" and one.watched is not None:
            await refusing(one.watched.stop_drain(instance))

    async def move(
        self, model: str, request_id: str, destination: str | None, deployment: str
    ) -> MoveRecord:
        """Move a request, and wait for the end. model: its name, or one that requests give for it.
        destination: None: the instance with the most room.

        Raises NotThere, NameTaken.
        """
        unanswered = ""
        for one in self._of_model(model, deployment, others=True):
            if one.watched is None or not one.serving:
                continue
            try:
                rows = await one.watched.requests(ANSWER_S)
            except StartupError as error:  # another deployment of the model may have it
                unanswered = str(error)
                continue
            if any(request_id in (row.id, row.call_id) for row in rows):
                return await refusing(one.watched.move(request_id, destination))
        if unanswered:
            raise NameTaken(f"model {model}: {unanswered}")
        raise NotThere(f"model {model} has no request {request_id!r:.200} now")

    def check(self, model: str, instance: str, deployment: str) -> None:
        """Raises NotThere for an instance that isn't there."""
        self._find(model, instance, deployment)

    def _of_model(self, name: str, deployment: str, *, others: bool = False) -> list[ManagedModel]:
        """List a model's deployments. others: or those of the models that requests mean by the
        name. Raises NotThere."""
        names = {name} if not others else {name, *self.aliases.get(name, ())}
        found = [
            one
            for one in self._deployments()
            if one.wanted.name in names
            or (others and name in (*one.wanted.spec.aliases, *one.wanted.spec.adapters))
        ]
        if not found:
            raise NotThere(f"there is no model {name!r:.200}")
        return [one for one in found if deployment in ("", one.deployment)]

    def _find(self, model: str, instance: str, deployment: str) -> tuple[ManagedModel, InstanceRow]:
        found = [
            (one, row)
            for one in self._of_model(model, deployment)
            for row in one.instance_rows
            if row.id == instance
        ]
        if not found:
            raise NotThere(f"model {model} has no instance {instance!r:.100}")
        if len(found) > 1:
            either = " or ".join(repr(one.deployment) for one, _ in found)
            raise NameTaken(
                f"model {model} has two instances {instance}, as it rolls out: deployment must be"
                f" {either}"
            )
        return found[0]


def live_device(node: str, one: DeviceMemory, record: DeviceRecord | None) -> LiveDevice:
    """A GPU of a node. record: what its driver says; None: nothing is known."""
    return LiveDevice(
        title=one.title,
        uuid=one.id,
        total_bytes=one.total,
        free_bytes=one.free,
        worker="" if node == LOCAL else node,
        others_bytes=one.others,
        models=dict(one.claims),
        busy=None if record is None else record.busy,
        watts=None if record is None else record.watts,
    )


async def refusing(order: Awaitable[Result]) -> Result:
    """The result of an order. Raises NameTaken with the words of a deployment that refuses."""
    try:
        return await order
    except StartupError as error:
        raise NameTaken(str(error)) from error


def fair_part(streams: Sequence[LiveStream], most: int) -> list[LiveStream]:
    """Choose at most that number of streams: each model's longest, in fair parts."""
    by_model: dict[str, list[LiveStream]] = {}
    for one in streams:
        by_model.setdefault(one.model, []).append(one)
    for found in by_model.values():
        found.sort(key=lambda one: one.row.tokens, reverse=True)
    chosen: list[LiveStream] = []
    waiting = sorted(by_model.values(), key=len)
    for at, found in enumerate(waiting):
        chosen += found[: (most - len(chosen)) // (len(waiting) - at)]
    return chosen
