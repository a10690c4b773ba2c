"""Routes of workers: which there are, and orders about them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

import msgspec
from fastapi import APIRouter
from msgspec.structs import replace
from pydantic import Field

from kvmig.asgi.strict_body import StrictBody
from kvmig.core.clock import TimeSource
from kvmig.core.errors import ConfigError
from kvmig.fleet.api_paths import routes_at
from kvmig.fleet.based_on import check_values
from kvmig.fleet.controller import ModelController
from kvmig.fleet.store import FleetStore, NameTaken, NotThere, OrderActor
from kvmig.fleet.worker_drain import InstanceOnWorker, drain_view
from kvmig.fleet.worker_nodes import LOCAL
from kvmig.fleet.workers import NO_REPORT, FleetWorker, WorkerWish
from kvmig.fleet.workers_table import order_worker, read_workers

Body = dict[str, Any]
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Change = Callable[[WorkerWish], WorkerWish]

LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,62})")
LABELS = "letters, digits and . _ / -, at most 63, the first a letter or a digit"
MOST_LABELS = 64
MOST_S = 7 * 86400.0


class StoreThread(Protocol):
    """Runs calls of the database on the store's thread."""

    async def __call__(
        self, call: Callable[Parameters, Result], *args: Parameters.args, **kw: Parameters.kwargs
    ) -> Result: ...


class WorkerBasis(StrictBody):
    """A worker as an order was made from it; null: not compared."""

    labels: dict[str, str] | None = Field(default=None, max_length=MOST_LABELS)
    cordoned: bool | None = None
    draining: bool | None = None


class WorkerOrderBody(StrictBody):
    """What an order was made from."""

    based_on: WorkerBasis | None = Field(
        default=None, description="Refuse it unless the worker is so now; null: don't."
    )


class LabelsBody(WorkerOrderBody):
    """Labels of a worker; null removes one."""

    labels: dict[str, str | None] = Field(max_length=MOST_LABELS)


class WorkerDrainBody(WorkerOrderBody):
    """Move all instances away."""

    deadline_s: float | None = Field(
        default=None,
        ge=0,
        le=MOST_S,
        allow_inf_nan=False,
        description="What has not moved then goes on elsewhere by recompute; null: as long as each "
        "deployment gives a drain.",
    )


class FleetWorkers:
    """The workers with their orders, for the routes."""

    def __init__(
        self,
        models: ModelController,
        stored: StoreThread,
        store: FleetStore,
        wall: TimeSource,
    ) -> None:
        """wall: Unix time."""
        self.wall = wall
        self._models = models
        self._stored = stored
        self._store = store

    async def recall(self) -> None:
        """Take what the database has. Raises StoreError."""
        database = self._store.database
        self._models.workers.take_wishes(
            await self._stored(read_workers, database, self._store.set_aside)
        )

    def rows(self) -> list[Body]:
        """Every worker."""
        pool = self._models.workers
        found = pool.workers() if pool.there else [self._local()]
        return [self._row(one) for one in found]

    def row(self, name: str) -> Body:
        """One worker. Raises NotThere."""
        for one in self.rows():
            if one["name"] == name:
                return one
        raise NotThere(f"there is no worker {name!r:.100}")

    async def order(
        self,
        name: str,
        change: Change,
        action: str,
        actor: OrderActor,
        body: WorkerOrderBody | None = None,
    ) -> Body:
        """Store a change of what is wanted of a worker, and return the worker. body: what the order
        was made from. Raises NotThere, NameTaken, ConfigError, StoreError."""
        node = self.row(name)["node"]
        if not self._models.workers.there:
            raise NameTaken(
                f"worker {name} is this host, the only one: `kvmig up --ray` serves from several"
            )
        now = self.wall()
        based_on = {} if body is None or body.based_on is None else basis_of(body.based_on)

        def ordered(wish: WorkerWish) -> WorkerWish:
            wanted = values_of(wish)
            check_values(f"worker {name}", based_on, {one: wanted[one] for one in based_on})
            return replace(change(wish), node=node or wish.node)

        await self._stored(order_worker, self._store.database, name, ordered, action, actor, now)
        await self.recall()
        unseen = FleetWorker(name, state="unknown", why=NO_REPORT)
        found = {one.name: one for one in self._models.workers.workers()}
        return self._row(found.get(name, unseen))

    def _local(self) -> FleetWorker:
        host = self._models.memory.host()
        return FleetWorker(
            LOCAL,
            state="ready",
            memory_total=host.total,
            memory_free=host.available,
            devices=self._models.memory.devices.watch.inventory.devices,
        )

    def _row(self, worker: FleetWorker) -> Body:
        here = self._models.instances_on(worker.node) if worker.node or worker.name == LOCAL else []
        return worker_json(worker, here, self.wall())


def worker_json(worker: FleetWorker, instances: list[InstanceOnWorker], now: float) -> Body:
    """A worker as the API shows it. now: Unix time."""
    drain = drain_view(worker, instances, now)
    return {
        "name": worker.name,
        "node": worker.node,
        "address": worker.address,
        "host": worker.host,
        "state": worker.state,
        "why": worker.why,
        "refuses": worker.refusal,
        "labels": dict(worker.labels),
        "cordoned": worker.cordoned,
        "drain": None if drain is None else msgspec.to_builtins(drain),
        "memory_bytes": worker.memory_total,
        "memory_free_bytes": worker.memory_free,
        "gpus": [
            {
                "gpu": str(one),
                "uuid": one.uuid,
                "total_bytes": one.total,
                "free_bytes": one.free,
                "whose": one.whose(),
            }
            for one in worker.devices
        ],
        "resources": dict(worker.resources),
        "free_resources": dict(worker.free_resources),
        "engines": list(worker.engines),
        "fork_servers": dict(worker.fork_servers),
        "files": {
            "folder": worker.files.root,
            "shared": worker.files.shared,
            "free_bytes": worker.files.free_bytes,
            "why": worker.files.why,
            "models": msgspec.to_builtins(worker.files.folders),
        },
        "instances": msgspec.to_builtins(instances),
    }


def basis_of(body: WorkerBasis) -> Body:
    """What an order was made from."""
    return body.model_dump(exclude_none=True)


def values_of(wish: WorkerWish) -> Body:
    """What orders change of a worker, as `WorkerBasis` has it."""
    return {
        "labels": dict(wish.labels),
        "cordoned": wish.cordoned,
        "draining": wish.drained_at is not None,
    }


def labelled(given: dict[str, str | None]) -> Change:
    """A change of labels. Raises ConfigError."""
    for name, value in given.items():
        if LABEL.fullmatch(name) is None:
            raise ConfigError(f"labels has the name {name!r:.100}, must be {LABELS}")
        if value and LABEL.fullmatch(value) is None:
            raise ConfigError(f"labels.{name} is {value!r:.100}, must be empty, or {LABELS}")

    def change(wish: WorkerWish) -> WorkerWish:
        every = {**wish.labels, **given}
        kept = {name: value for name, value in every.items() if value is not None}
        if len(kept) > MOST_LABELS:
            raise ConfigError(f"labels has {len(kept)}, must be at most {MOST_LABELS}")
        return replace(wish, labels=kept)

    return change


def cordoned(wish: WorkerWish) -> WorkerWish:
    """The change of `cordon`."""
    return replace(wish, cordoned=True)


def uncordoned(wish: WorkerWish) -> WorkerWish:
    """The change of `uncordon`: the drain ends, too."""
    return replace(wish, cordoned=False, drained_at=None, drain_until=None)


def drained(now: float, deadline_s: float | None) -> Change:
    """The change of `drain`. now: Unix time."""
    until = None if deadline_s is None else now + deadline_s

    def change(wish: WorkerWish) -> WorkerWish:
        since = now if wish.drained_at is None else wish.drained_at
        return replace(wish, cordoned=True, drained_at=since, drain_until=until)

    return change


def workers_api(workers: FleetWorkers, caller: Any) -> APIRouter:
    """The routes. caller: who calls."""
    api = routes_at("/workers")

    @api.get("")
    async def list_workers(_: OrderActor = caller) -> Body:
        """The workers: the nodes of the Ray cluster, or this host alone."""
        return {"data": workers.rows()}

    @api.get("/{name}")
    async def show_worker(name: str, _: OrderActor = caller) -> Body:
        """One worker with its instances, its GPUs, and how far its drain is."""
        return workers.row(name)

    @api.post("/{name}/labels")
    async def label_worker(name: str, body: LabelsBody, actor: OrderActor = caller) -> Body:
        """Set or remove labels of a worker."""
        return await workers.order(name, labelled(body.labels), "label", actor, body)

    @api.post("/{name}/cordon")
    async def cordon_worker(
        name: str, body: WorkerOrderBody | None = None, actor: OrderActor = caller
    ) -> Body:
        """Start no new instance on a worker; those that run there stay."""
        return await workers.order(name, cordoned, "cordon", actor, body)

    @api.post("/{name}/uncordon")
    async def uncordon_worker(
        name: str, body: WorkerOrderBody | None = None, actor: OrderActor = caller
    ) -> Body:
        """Start instances on a worker again; its drain ends, and what still serves there stays."""
        return await workers.order(name, uncordoned, "uncordon", actor, body)

    @api.post("/{name}/drain")
    async def drain_worker(
        name: str, body: WorkerDrainBody | None = None, actor: OrderActor = caller
    ) -> Body:
        """Cordon a worker and move its instances: others start elsewhere, then streams move."""
        deadline_s = None if body is None else body.deadline_s
        change = drained(workers.wall(), deadline_s)
        return await workers.order(name, change, "drain", actor, body)

    return api
