"""The server's HTTP API under /kvmig/v2: the catalogue, what runs, users and keys.

Who may call is said in `kvmig.fleet.callers`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar, cast
from urllib.parse import quote

import anyio.to_thread
import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvmig.accounts.keys import KeyGrant, KeyIndex
from kvmig.accounts.people import LoginRefused
from kvmig.asgi.plain_paths import PlainPaths
from kvmig.asgi.problems import as_problem, invalid, problem
from kvmig.asgi.strict_body import StrictBody
from kvmig.core.errors import ConfigError
from kvmig.core.shown_secrets import shown_text
from kvmig.core.storage_reads import StorageReads, StorageSilent
from kvmig.fleet.accounts_api import accounts_api
from kvmig.fleet.api_paths import PREFIX, routes_at
from kvmig.fleet.based_on import alias_of, alias_there, order_based_on, order_based_on_values
from kvmig.fleet.callers import who_calls, who_lists, who_reads
from kvmig.fleet.catalogue import CatalogueReader
from kvmig.fleet.controller import ModelController
from kvmig.fleet.evaluate import FitVerdict
from kvmig.fleet.files_api import catalogue_api, files_api
from kvmig.fleet.fit_suggestions import changes, suggestion
from kvmig.fleet.gguf_sizes import gguf_sizes
from kvmig.fleet.identity_provider import IdentityProvider, ProviderAway
from kvmig.fleet.live_api import MOST_STREAMS, live_api
from kvmig.fleet.live_view import LiveView
from kvmig.fleet.login_api import login_api
from kvmig.fleet.managed_model import ManagedModel
from kvmig.fleet.model_files import ModelFiles
from kvmig.fleet.model_rows import ModelRow
from kvmig.fleet.model_shapes import heads_of
from kvmig.fleet.names_api import names_api
from kvmig.fleet.pages.app import fleet_pages
from kvmig.fleet.pages.provider_login import ProviderLogins
from kvmig.fleet.pages.sessions import FleetSessions
from kvmig.fleet.placement_controller import DesiredPlacement, PlacementController
from kvmig.fleet.places_api import places_api
from kvmig.fleet.process_logs import last_lines
from kvmig.fleet.retention import UsageRetention, prune
from kvmig.fleet.rollout_api import (
    RolloutBody,
    at_next_start,
    rollout_api,
    standing,
    terms_of,
)
from kvmig.fleet.settings import FleetSettings
from kvmig.fleet.shown_specs import (
    restored_fleet,
    restored_spec,
    shown_change,
    shown_revision,
    shown_spec,
)
from kvmig.fleet.spec import NAME, PATH, FleetFile, ModelSpec, fleet_of, spec_of
from kvmig.fleet.store import FleetStore, NameTaken, NotThere, OrderActor
from kvmig.fleet.tables import StoreError
from kvmig.fleet.units import ManagedUnit
from kvmig.fleet.usage_api import usage_api
from kvmig.fleet.workers_api import FleetWorkers, workers_api
from kvmig.pages.live_feed import LiveFeed
from kvmig.pages.rendering import PREFIX as PAGES
from kvmig.pages.session import PageSessions
from kvmig.placement.executor import ReplaceFailed
from kvmig.sources.origins import check_installed
from kvmig.sources.source import is_remote, parse_source

LOG_LINES = 1000
BY_RATES = OrderActor("rates of requests")
"""The actor of a placement that was planned again."""

RevisionQuery = Annotated[
    int | None,
    Query(description="Refuse it unless this is the model's revision; none: don't."),
]
WeightsQuery = Annotated[
    str | None,
    Query(description="Refuse it unless these are its weights now, as JSON; none: don't."),
]

Body = dict[str, Any]
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@dataclass(eq=False)
class ApiBackend:
    """What the routes work on."""

    settings: FleetSettings
    store: FleetStore
    thread: Executor
    """One thread, the store's."""
    models: ModelController
    changed: Callable[[], Awaitable[None]]
    """Call to be awaited after every change of the catalogue or of keys."""
    check: Callable[[ModelSpec, bool], Awaitable[None]]
    """Lets a model's engine read its flags, and maybe say its sizes; raises ConfigError."""
    keys: Callable[[], KeyIndex]
    """Keys that let calls in now."""
    metrics: Callable[[], Awaitable[bytes]]
    """The whole fleet's, as Prometheus reads them."""
    files: ModelFiles
    catalogue: CatalogueReader
    provider: IdentityProvider | None = None
    """Vouches for people who log in."""
    reads: StorageReads = field(default_factory=StorageReads)
    """Threads that read users' files."""
    unsure: Callable[[], object] = lambda: None
    """Called when the store has failed: what was to change may be changed, and not be known."""
    replacer: PlacementController = field(init=False)
    workers: FleetWorkers = field(init=False)
    live: LiveView = field(init=False)
    feed: LiveFeed = field(init=False)
    """The live picture of the page."""
    retention: UsageRetention = field(init=False)

    def __post_init__(self) -> None:
        self.replacer = PlacementController(self.models, self._keep_placement)
        database = self.store.database
        self.live = LiveView(self.models, time.time)
        self.feed = LiveFeed(lambda: self.live.observe(MOST_STREAMS))
        self.workers = FleetWorkers(self.models, self.stored, self.store, time.time)
        self.retention = UsageRetention(
            lambda *args: self.stored(prune, database, *args), time.time
        )

    async def stored(
        self, call: Callable[Parameters, Result], *args: Parameters.args, **kw: Parameters.kwargs
    ) -> Result:
        """The result of one of the store's methods, on its thread. Raises what it raises."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self.thread, lambda: call(*args, **kw))
        except StoreError:
            self.unsure()
            raise

    async def _keep_placement(self, wanted: DesiredPlacement) -> None:
        """Store a placement that was planned again."""
        await self.stored(self.store.set_placement, msgspec.to_builtins(wanted), BY_RATES)

    async def row(self, name: str) -> ModelRow:
        """The model's row. Raises NotThere."""
        return await self.stored(self.store.model, name)

    async def read_spec(self, given: Body) -> ModelSpec:
        """A model's specification, whose folders are looked at. Raises ConfigError,
        StorageSilent."""
        name = given.get("name")
        whose = f"model {name}" if isinstance(name, str) and NAME.fullmatch(name) else "model ?"
        return await self.reads.read(whose, "", partial(spec_of, given))

    async def read_fleet(self, given: Any, folder: str) -> FleetFile:
        """The same of a whole file. folder: what its relative paths mean; empty: there are none."""
        read = partial(fleet_of, given, Path(folder) if folder else None)
        return await self.reads.read("the fleet's file", "", read)

    async def known_specs(self) -> dict[str, ModelSpec]:
        """The models of the catalogue as they are, by name."""
        return {row.name: row.spec for row in await self.stored(self.store.models)}

    async def checked(self, specs: Sequence[ModelSpec], *, alone: bool = False) -> None:
        """Let engines read the flags of models that are new or start otherwise; all must fit here.

        alone: whether there will be no other models. Raises ConfigError, StoreError,
        StorageSilent.
        """
        for one in specs:
            check_installed(parse_source(one.source))
            self.models.workers.check(one)
            if one.engine == "command" and not self.settings.allow_commands:
                raise ConfigError(
                    f"model {one.name}: engine is 'command', must be vllm or transformers: this"
                    " fleet runs no commands (kvmig up --allow-commands)"
                )
        memory = self.models.memory
        on_gpus = memory.devices.there
        rows = await self.stored(self.store.models)
        before = {row.name: self.files.resolved(row.spec) for row in rows}
        known = {name: started_as(spec) for name, spec in before.items()}
        specs = list(map(self.files.resolved, specs))
        await asyncio.gather(*map(memory.devices.folders.learn, specs))
        for one in () if on_gpus else specs:
            memory.check(one)
        # The engine reads the flags together with the files, once these are here.
        here = [one for one in specs if not is_remote(one.source)]
        new = [one for one in here if known.get(one.name) != started_as(one)]
        await asyncio.gather(*(self.check(one, on_gpus) for one in new))
        for one in specs if on_gpus else ():  # what it takes of them is known now
            memory.check(one)
        then = ({} if alone else before) | {one.name: one for one in specs}
        for unit in {one.unit for one in specs if one.unit}:
            self.models.units.check(unit, [one for one in then.values() if one.unit == unit])

    def shown(self, row: ModelRow) -> Body:
        """A model as the API shows it."""
        files = self.files.of_model(row.spec.source)
        shown = model_json(row, self.models.shown(row.name), self.models)
        return shown | {"files": msgspec.to_builtins(files)}


def make_app(backend: ApiBackend, sessions: PageSessions | None = None) -> FastAPI:
    """The application. sessions: of the page's people; None: those that they log in to."""

    async def actor(request: Request) -> OrderActor:
        return who_calls(request, backend.keys(), time.time())

    app = FastAPI(
        title="kvmig",
        docs_url=None,
        redoc_url=None,
        openapi_url=f"{PREFIX}/openapi.json",
        redirect_slashes=False,  # behind HTTPS it would lead to HTTP
    )
    app.add_middleware(PlainPaths)
    for kind, status in STATUS.items():
        app.add_exception_handler(kind, answer_with(status))
    app.add_exception_handler(RequestValidationError, refuse_input)
    app.add_exception_handler(HTTPException, as_problem)

    async def reader(request: Request) -> str | None:
        return who_reads(request, backend.keys(), time.time())

    async def holder(request: Request) -> KeyGrant | None:
        return who_lists(request, backend.keys(), time.time())

    caller, database = Depends(actor), backend.store.database
    for api in (
        fleet_api(backend, caller),
        usage_api(database, backend.stored, backend.retention, caller, Depends(reader)),
        accounts_api(
            backend.store, backend.stored, backend.changed, backend.keys, caller, Depends(reader)
        ),
        rollout_api(backend, caller, time.time),
        models_api(backend, caller),
        names_api(backend.store, backend.stored, backend.models, Depends(holder)),
        files_api(backend.files, caller),
        catalogue_api(backend.catalogue, caller),
        placement_api(backend, caller),
        places_api(backend.models, backend.row, caller),
        workers_api(backend.workers, caller),
        live_api(backend.live, database, backend.stored, caller),
        login_api(backend.provider, backend.store, backend.stored, backend.changed),
    ):
        app.router.routes += api.routes
    tls = backend.settings.certificate is not None
    own = FleetSessions(backend.keys, lambda: backend.store.pepper, time.time, tls=tls)
    logins = None
    if (provider := backend.provider) is not None:
        scheme = backend.settings.scheme
        logins = ProviderLogins(
            provider, backend.store, backend.stored, backend.changed, own, scheme
        )
    pages = fleet_pages(app, PREFIX, backend.keys, backend.feed, own, sessions, logins)
    app.mount(PAGES, pages)
    return app


def fleet_api(backend: ApiBackend, caller: Any) -> APIRouter:
    """Routes of the fleet as a whole. caller: who calls."""
    api, store, models = routes_at(), backend.store, backend.models
    settings = backend.settings

    @api.get("/status")
    async def status(_: OrderActor = caller) -> Body:
        """The fleet at a glance."""
        return {
            "address": settings.url,
            **({} if settings.certificate is None else {"certificate": settings.certificate.cert}),
            "models": len(await backend.stored(store.models)),
            "proxies": models.reports.connected,
            "starts": models.starts,
            "memory_bytes": models.memory.host().total,
            "claimed_bytes": models.claimed,
            "gpus": [
                {
                    "gpu": one.title,
                    "uuid": one.id,
                    "total_bytes": one.total,
                    "free_bytes": one.free,
                    "others_bytes": one.others,
                    "models": one.claims,
                }
                for one in models.places.devices()
            ],
            "units": [unit_json(one) for one in models.units.every()],
            "data": backend.settings.data,
        }

    @api.get("/metrics", response_class=Response)
    async def metrics(_: OrderActor = caller) -> Response:
        """Metrics of all models, proxies and the server, as Prometheus reads them."""
        return Response(await backend.metrics(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @api.post("/apply")
    async def apply(body: ApplyBody, actor: OrderActor = caller) -> Body:
        """Change the catalogue to what a fleet's file describes."""
        fleet = await backend.read_fleet(body.fleet, body.folder)
        fleet = restored_fleet(fleet, await backend.known_specs())
        terms = terms_of(body.rollout)
        await backend.checked(fleet.models, alone=body.prune)
        with models.rollouts.order([one.name for one in fleet.models], terms) as terms:
            order = partial(
                store.apply, fleet, actor, dry_run=body.dry_run, prune=body.prune, terms=terms
            )
            changes = await backend.stored(order_based_on, store, body.based_on, order)
            if not body.dry_run:
                await backend.changed()
        later = [] if body.dry_run else at_next_start(models, changes)
        shown = [shown_change(msgspec.to_builtins(one)) for one in changes]
        return {"data": shown, "at_next_start": later}

    @api.post("/evaluate")
    async def evaluate(body: Body, worker: str = "", _: OrderActor = caller) -> Body:
        """Compute in bytes whether one instance of a model fits now, and where; start nothing.

        The specification as a fleet's file has it, whether or not the catalogue has the model. Of
        files that are not here only headers are fetched. worker: the only one that may get it.
        """
        spec = await backend.read_spec(body)
        kept = (await backend.known_specs()).get(spec.name)
        return await evaluate_model(backend, restored_spec(spec, kept), worker)

    @api.get("/aliases")
    async def list_aliases(_: OrderActor = caller) -> Body:
        """Names that stand for models by weights; a model's own other names are in its spec."""
        return {"data": (await backend.stored(store.fleet)).aliases}

    @api.put("/aliases/{name:path}")
    async def set_alias(name: str, body: AliasBody, actor: OrderActor = caller) -> Body:
        """Set an alias: the models that a name stands for, each with its share of the requests."""
        order = partial(store.set_alias, name, body.targets, actor)
        look = partial(alias_of, store, name)
        what = f"alias {name}"
        await backend.stored(order_based_on_values, what, look, body.based_on, order)
        await backend.changed()
        return {"name": name, "targets": body.targets}

    @api.delete("/aliases/{name:path}")
    async def remove_alias(
        name: str, based_on: WeightsQuery = None, actor: OrderActor = caller
    ) -> Body:
        """Remove an alias."""
        known = None if based_on is None else weights_of(based_on)
        order, look = partial(store.set_alias, name, {}, actor), partial(alias_there, store, name)
        await backend.stored(order_based_on_values, f"alias {name}", look, known, order)
        await backend.changed()
        return {"name": name}

    @api.get("/audit")
    async def audit(
        limit: Annotated[int, Query(ge=1, le=1000)] = 100, _: OrderActor = caller
    ) -> Body:
        """Changes with their authors, newest first."""
        rows = await backend.stored(store.audit, None, limit)
        return {"data": [shown_change(msgspec.to_builtins(row)) for row in rows]}

    backing_up = asyncio.Lock()

    @api.post("/backup")
    async def backup(body: BackupBody, _: OrderActor = caller) -> Body:
        """Copy the database to a path on the server's disk."""
        async with backing_up:  # the store's thread goes on with orders meanwhile
            await asyncio.to_thread(store.backup, Path(body.path))
        return {"path": body.path}

    return api


async def evaluate_model(backend: ApiBackend, spec: ModelSpec, worker: str = "") -> Body:
    """What one instance would take, and where it fits; if nowhere, after which changes. Raises
    ConfigError, StoreError, StorageSilent."""
    spec = backend.files.resolved(spec)
    if is_remote(spec.source):  # the headers of its files say what the whole files would
        heads = await backend.files.heads(spec.source)
        spec = msgspec.structs.replace(spec, source=f"{PATH}{heads}")
    folders = backend.models.memory.devices.folders
    await folders.learn(spec)
    found = await fit_of(backend, spec, worker)
    suggestions, attention = [], heads_of(folders.facts_of(spec))
    for changed in () if found.fits else changes(spec, found, attention):
        try:
            fit = await fit_of(backend, changed, worker)
        except ConfigError:  # the engine refuses this change
            continue
        if fit.fits:
            suggestions.append(suggestion(spec, changed, fit))
    found = msgspec.structs.replace(found, suggestions=tuple(suggestions))
    return cast("Body", msgspec.to_builtins(found))


async def fit_of(backend: ApiBackend, spec: ModelSpec, worker: str) -> FitVerdict:
    """The evaluation of a specification whose files, or their headers, are here. Raises
    ConfigError, StoreError, StorageSilent."""
    devices = backend.models.memory.devices
    if devices.sizes(spec) is None:
        await backend.check(spec, True)
    if devices.sizes(spec) is None:  # of an engine that says nothing of such files
        read = partial(gguf_sizes, spec.folder)
        sizes = await backend.reads.read(f"model {spec.name}", spec.folder, read)
        if sizes is not None:
            devices.learn(spec, sizes)
    return backend.models.places.evaluate(spec, worker)


def models_api(backend: ApiBackend, caller: Any) -> APIRouter:
    """Routes of the catalogue. A name may hold slashes, so what follows it comes first here."""
    api, store, models = routes_at("/models"), backend.store, backend.models

    @api.get("")
    async def list_models(_: OrderActor = caller) -> Body:
        """The models of the catalogue."""
        return {"data": [backend.shown(row) for row in await backend.stored(store.models)]}

    @api.post("", status_code=HTTPStatus.CREATED)
    async def add_model(body: Body, actor: OrderActor = caller) -> Body:
        """Add a model to the catalogue. The body is its specification as a fleet's file has it."""
        spec = restored_spec(await backend.read_spec(body), None)
        await backend.checked([spec])
        row = await backend.stored(store.add_model, spec, actor)
        await backend.changed()
        return backend.shown(row)

    @api.post("/{name:path}/scale")
    async def scale(name: str, body: ScaleBody, actor: OrderActor = caller) -> Body:
        """Set the least and the greatest number of instances."""
        based_on = {} if body.based_on is None else {name: body.based_on}
        order = partial(store.scale, name, actor, least=body.min, most=body.max)
        row = await backend.stored(order_based_on, store, based_on, order)
        await backend.changed()
        return backend.shown(row)

    @api.post("/{name:path}/switch")
    async def switch(name: str, body: SwitchBody, actor: OrderActor = caller) -> Body:
        """Switch a model on or off; when it is switched off, its requests end first."""
        row = await backend.stored(store.switch, name, actor, on=body.on)
        await backend.changed()
        return backend.shown(row)

    @api.post("/{name:path}/wake")
    async def wake(name: str, _: OrderActor = caller) -> Body:
        """Start a model now, also after a failed start."""
        row = await backend.row(name)
        if not row.on:
            raise NameTaken(f"model {name} is off")
        models.wake(name)
        return backend.shown(row)

    @api.get("/{name:path}/logs")
    async def logs(
        name: str, lines: Annotated[int, Query(ge=1, le=LOG_LINES)] = 50, _: OrderActor = caller
    ) -> Body:
        """The last lines that a model's processes have printed."""
        await backend.row(name)
        path = backend.settings.log(quote(name, safe=""))
        return {"data": await anyio.to_thread.run_sync(last_lines, path, lines)}

    @api.delete("/{name:path}")
    async def remove_model(
        name: str, based_on: RevisionQuery = None, actor: OrderActor = caller
    ) -> Body:
        """Remove a model from the catalogue; its requests end first."""
        revisions = {} if based_on is None else {name: based_on}
        order = partial(store.remove_model, name, actor)
        await backend.stored(order_based_on, store, revisions, order)
        await backend.changed()
        return {"name": name}

    @api.get("/{name:path}")
    async def show_model(name: str, _: OrderActor = caller) -> Body:
        """A model with its revisions and the decisions about it."""
        row = await backend.row(name)
        events = [msgspec.to_builtins(one) for one in models.events if one.model == name]
        revisions = await backend.stored(store.revisions, name)
        shown = [shown_revision(msgspec.to_builtins(one)) for one in revisions]
        more = {"events": events, "revisions": shown}
        return backend.shown(row) | more

    return api


def placement_api(backend: ApiBackend, caller: Any) -> APIRouter:
    """Routes of the placement: which instances are in which units."""
    api, store, replacer = routes_at("/placement"), backend.store, backend.replacer

    @api.get("")
    async def show(_: OrderActor = caller) -> Body:
        """The desired placement and its status."""
        return cast("Body", msgspec.to_builtins(replacer.standing()))

    @api.put("")
    async def want(body: PlacementBody, actor: OrderActor = caller) -> Body:
        """Move the running models to a placement while they serve; 409 while another move to a
        placement is under way. The answer is the plan, in words."""

        async def keep(wanted: DesiredPlacement) -> None:
            await backend.stored(store.set_placement, msgspec.to_builtins(wanted), actor)

        kept = None if body.dry_run else keep
        return {"plan": await replacer.accept_placement(body.placement, kept, body.replan)}

    @api.delete("")
    async def drop(actor: OrderActor = caller) -> Body:
        """Want none: instances stay where they are, and come and go by their models' own rules."""
        await replacer.drop_placement(lambda: backend.stored(store.set_placement, None, actor))
        return {}

    return api


def weights_of(text: str) -> dict[str, int]:
    """Weights of models, as JSON. Raises ConfigError."""
    try:
        return msgspec.json.decode(text, type=dict[str, int])
    except msgspec.DecodeError as error:
        raise ConfigError(
            f'based_on is {text!r:.100}, must be JSON such as {{"MODEL": 1}}: {error}'
        ) from error


def started_as(spec: ModelSpec) -> tuple[object, ...]:
    """What decides a deployment's command line."""
    own = spec.engine, spec.source, spec.flags, spec.adapters, spec.instances
    return (*own, spec.tensor_parallel or spec.workers, spec.unit, spec.vllm)


# -- what comes


class ApplyBody(StrictBody):
    """A fleet's file."""

    fleet: Any = Field(description="What the file holds.")
    folder: str = Field(default="", description="What relative paths in it mean; empty: nothing.")
    dry_run: bool = False
    prune: bool = False
    rollout: RolloutBody | None = Field(
        default=None, description="How changed models roll out; null: at once."
    )
    based_on: dict[str, int] = Field(
        default={}, description="Refuse it unless these are the revisions of these models."
    )


class ScaleBody(StrictBody):
    """How many instances."""

    min: int
    max: int
    based_on: int | None = Field(
        default=None, description="Refuse it unless this is the model's revision; null: don't."
    )


class PlacementBody(StrictBody):
    """A placement: the unit of each instance."""

    placement: Body = Field(
        description="As the file that `python -m kvmig.placement --out` writes."
    )
    dry_run: bool = Field(default=False, description="Only plan.")
    replan: Body | None = Field(
        default=None,
        description="Plan again for the rates at which requests come: `device` and `models` as the"
        " files of `python -m kvmig.placement` have them, and maybe `objective`, `horizon_s`,"
        " `span_s` and `change`. null: never.",
    )


class SwitchBody(StrictBody):
    """Whether the model serves."""

    on: bool


class AliasBody(StrictBody):
    """What an alias stands for."""

    targets: dict[str, int] = Field(min_length=1, description="Weights of models.")
    based_on: dict[str, int] | None = Field(
        default=None,
        description="Refuse it unless these are its weights now, none for a new name; null: don't.",
    )


class BackupBody(StrictBody):
    """The path of the copy."""

    path: str = Field(min_length=1, max_length=4096)


# -- what goes out


def model_json(row: ModelRow, model: ManagedModel | None, models: ModelController) -> Body:
    """A model as the API shows it."""
    now = {"state": "zero", "why": "", "serving": 0, "running": 0, "held": 0, "start_s": None}
    if model is not None:
        front = models.rollouts.front(row.name) or model
        now = {
            "state": front.life.state,
            "why": front.life.why,
            "serving": front.ready,
            "running": models.reports.running(row.name),
            "held": models.reports.held(row.name),
            "start_s": front.start_s,
        }
    held = Counter[str]()
    for one in models.rollouts.deployments(row.name):
        held.update(one.held)
    titles = {one.id: one.title for one in (models.places.devices() if held else ())}
    return {
        "name": row.name,
        "revision": row.revision,
        "on": row.on,
        "spec": shown_spec(msgspec.to_builtins(row.spec)),
        "stale": model is not None
        and model.note is not None
        and (model.former or not model.is_newest),
        "rollout": msgspec.to_builtins(standing(models, row.name)),
        "gpus": [
            {"gpu": titles.get(uuid, uuid), "uuid": uuid, "bytes": size}
            for uuid, size in held.items()
        ],
        "no_room": [] if model is None else models.places.reasons(model),
        **now,
    }


def unit_json(unit: ManagedUnit) -> Body:
    """A unit as the API shows it. leased_bytes: None while its agent doesn't answer."""
    return {
        "name": unit.name,
        "gpus": unit.gpus,
        "worker": unit.worker,
        "models": sorted(unit.models),
        "arena_bytes": unit.arena,
        "leased_bytes": unit.leased,
        "why": unit.waits,
    }


# -- what is wrong


STATUS: dict[type[Exception], HTTPStatus] = {
    ConfigError: HTTPStatus.BAD_REQUEST,
    NotThere: HTTPStatus.NOT_FOUND,
    NameTaken: HTTPStatus.CONFLICT,
    StoreError: HTTPStatus.SERVICE_UNAVAILABLE,
    StorageSilent: HTTPStatus.SERVICE_UNAVAILABLE,
    ReplaceFailed: HTTPStatus.SERVICE_UNAVAILABLE,
    LoginRefused: HTTPStatus.FORBIDDEN,
    ProviderAway: HTTPStatus.BAD_GATEWAY,
}


def answer_with(status: HTTPStatus) -> Callable[[Request, Exception], Awaitable[Response]]:
    """A handler of exceptions whose message is for the caller."""

    async def answer(_: Request, error: Exception) -> Response:
        return problem(status, shown_text(str(error)))

    return answer


async def refuse_input(request: Request, error: Exception) -> Response:
    """A handler of bodies and queries that don't fit."""
    assert isinstance(error, RequestValidationError)
    return invalid(error, ["those of /kvmig/v2/openapi.json"])
