"""`python -m kvmig.fleet.server [FOLDER] ANNOUNCED SUPERVISOR HEARTBEAT`: decides for a fleet.

It keeps the catalogue and the accounts, and every model as they and its requests want it. It is in
no stream's path: without it warm models and known keys go on, and the supervisor starts another
one, which asks what runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import secrets
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, get_args

import msgspec
import uvicorn
import uvloop

from kvmig.accounts.allowances import TokenGrant, TokenRequest
from kvmig.accounts.keys import BAD_KEY, KeyGrant, KeyIndex, is_forgotten, limited_by
from kvmig.accounts.limits import SpendBucket
from kvmig.accounts.usage import HandOver
from kvmig.asgi.uvicorn_task import OwnedServer
from kvmig.core.background import BackgroundTasks, cancel_tasks, keep_running
from kvmig.core.clock import monotonic
from kvmig.core.errors import ConfigError, StartupError
from kvmig.core.heap import keep_small
from kvmig.core.model_sizes import decode_sizes
from kvmig.core.storage_reads import StorageReads
from kvmig.fleet.account_metrics import quota_uses
from kvmig.fleet.api import ApiBackend, make_app
from kvmig.fleet.catalogue import CatalogueReader
from kvmig.fleet.cluster_watch import ClusterWatch
from kvmig.fleet.controller import ModelController
from kvmig.fleet.deployment_words import words
from kvmig.fleet.device_budget import DeviceBudget
from kvmig.fleet.device_sizes import forget_others, remember, remembered
from kvmig.fleet.device_watch import DeviceWatch
from kvmig.fleet.disk import disks_of
from kvmig.fleet.figure_rows import forget_engines, store_figure, stored_figures
from kvmig.fleet.host_memory import MemoryBudget
from kvmig.fleet.identity_provider import IdentityProvider
from kvmig.fleet.init_link import InitLink
from kvmig.fleet.late_reload import LateReload
from kvmig.fleet.leadership import LeaderRow
from kvmig.fleet.ledger import sums, take
from kvmig.fleet.managed_model import CatalogEntry
from kvmig.fleet.metrics import FleetMetrics
from kvmig.fleet.model_files import ModelFiles
from kvmig.fleet.model_folders import WatchedFolders
from kvmig.fleet.model_shapes import engine_of
from kvmig.fleet.orders import (
    CheckFlags,
    FlagsChecked,
    LeaveLead,
    News,
    Order,
    StartDeployment,
    StepDown,
)
from kvmig.fleet.pepper import fleet_word, keep_key
from kvmig.fleet.placement_controller import DesiredPlacement as Placed
from kvmig.fleet.quotas import QuotaSocket, give_back, grant, idle_sources, left, sweep
from kvmig.fleet.read_ahead import WeightsReader, weights_folder
from kvmig.fleet.relay_links import stand_by
from kvmig.fleet.rollout import RolloutPlan
from kvmig.fleet.rollout_controller import RunningRollout, sources_of
from kvmig.fleet.rollout_figures import figures_of
from kvmig.fleet.rollout_table import StoredRollout, finish_rollout, keep_step
from kvmig.fleet.settings import ServerLaunch
from kvmig.fleet.spec import Engine, ModelSpec
from kvmig.fleet.spool_merger import SpoolMerger
from kvmig.fleet.standby import LeaderHeartbeat, host_name, leave_lead
from kvmig.fleet.store import FleetStore
from kvmig.fleet.tables import FleetDatabase, StoreError
from kvmig.fleet.worker_folders import WorkerFolders
from kvmig.fleet.worker_pool import WorkerPool
from kvmig.process.child import (
    StartAnnouncement,
    announce,
    leave,
    quiet,
    say,
    send_heartbeats,
    until_stopped,
)
from kvmig.process.child_main import announce_failure, run_child
from kvmig.process.sockets import take_path
from kvmig.proxy import messages
from kvmig.proxy.control_link import ProxyLinks
from kvmig.proxy.messages import (
    AliasTable,
    Down,
    FleetSnapshot,
    LeadingHost,
    ModelRoute,
    ModelWanted,
    ProxyDemand,
    ProxyMetrics,
    ProxyNews,
    QuotaLeft,
    RouteChanges,
    SpentLimits,
)

CHECK_S = 180.0
"""Timeout of a check of flags: their engine's libraries may have to be loaded first."""
KNOWN_S = 3.0
"""Wait for proxies to apply a change before its order is answered."""
LOOK_S = 1.0
"""Wait for the reports of deployments that an earlier server started."""
DONE_S = 2.0
"""Pause before it is stored again that a roll-out is done, which could not be stored."""
JUDGE_S = 1.0
"""Pause between two looks at the calls of models that roll out."""
API_END_S = 5
"""Time for calls of the API to end where the server does. A check of flags may take minutes."""
SWEEP_S = 60.0
"""Pause between two looks for tokens that were granted to calls that have ended."""

log = logging.getLogger(__name__)


class FleetServer:
    """The fleet's server; make it inside a running event loop, `start` it, then `close` it."""

    def __init__(self, launch: ServerLaunch, to_init: socket.socket) -> None:
        """to_init: the server's end of the socket to the supervisor; closed with this."""
        self._settings = settings = launch.settings
        self._running = launch.running
        pepper, host = settings.path("pepper"), host_name(settings)
        self._store = FleetStore(settings.database_url, pepper, host=host)
        self._store.database.door = launch.door
        self._ledger = self._store.database
        """The database of usage and grants. All servers change that of PostgreSQL."""
        if self._ledger.path is None:
            self._ledger = FleetDatabase(settings.database_url, leads=False)
        self._thread = ThreadPoolExecutor(1, "store")
        self._set_aside = self._store.set_aside
        self._merger = SpoolMerger(
            settings,
            self._ledger,
            self._thread,
            self._set_aside,
            lambda deployment: self._models.is_over(deployment),  # noqa: PLW0108  it is made below
            self._tell_spent,
        )
        self._version = 0
        self._grants: dict[str, KeyGrant] = {}
        self._grants_by_id: dict[str, KeyGrant] = {}
        self._left: dict[str, QuotaLeft] = {}
        """What is left of quotas, by `Quota.id`."""
        self._keys = KeyIndex(b"")
        self._keys_version = 0
        self._heard = asyncio.Event()
        """Set when a proxy has reported, or has gone."""
        self._aliases: Mapping[str, Mapping[str, int]] = {}
        self._reloading = asyncio.Lock()
        workers = WorkerPool.of_fleet(settings, monotonic, time.time)
        self._watch = workers.device_watch() or DeviceWatch(settings.path("run", "init.pid"))
        reads = StorageReads()
        self._model_folders = WatchedFolders(reads)
        devices = DeviceBudget(
            self._watch, settings.gpu_placement, workers.uses_gpus, self._model_folders
        )
        memory = MemoryBudget(settings.memory, devices, workers.memory if settings.ray else None)
        self._cluster = ClusterWatch(settings.ray, workers.take_report, workers.wish)
        self._models = ModelController(
            settings,
            self._order,
            self._tell_routes,
            memory,
            wall=time.time,
            measured=lambda spec: self._learned.start(self._remember(spec)),
            missing=lambda source: self._files.missing(source),  # noqa: PLW0108  it is made below
            workers=workers,
            keep=self._keep_step,
            term=lambda: self._store.database.token,
        )
        self._files = ModelFiles(
            settings,
            self._store.database,
            lambda *args: self._backend.stored(*args),  # noqa: PLW0108  it is made below
            self._take_files,
            self._models.folders,
            monotonic,
            time.time,
            workers.files_on,
            reads,
            self._model_folders.is_silent,
        )
        self._folders = WorkerFolders(
            workers, self._files, self._models.folders, settings.files_bytes, reads
        )
        self._learned = BackgroundTasks("sizes of models")
        self._weights = WeightsReader(reads=reads)
        self._init = InitLink(to_init, self._hear_init)
        self._init.may_order = self._may_order
        self._disks = disks_of(settings.path(), self._store.database.path)
        self._figures: dict[str, str] = {}
        """Metrics of proxies."""
        self._metrics = FleetMetrics(
            self._models,
            self._figures.values,
            lambda field: self._backend.stored(sums, self._store.database, (field,)),
            set_aside=lambda: self._set_aside.count,
            free=self._disks.free,
            behind_s=lambda: self._merger.behind_s,
            quotas=lambda: quota_uses(self._grants.values(), self._left, time.time()),
        )
        self._links = ProxyLinks(str(settings.links), self._first, self._hear)
        self._quotas = QuotaSocket(str(settings.quotas), self._grant, self._take)
        self._since = monotonic()
        self._buckets: dict[str, SpendBucket] = {}
        """Buckets of limits of tokens per minute, by `Limited.id`."""
        self._backend = ApiBackend(
            settings,
            self._store,
            self._thread,
            self._models,
            self._changed,
            self.check,
            lambda: self._keys,
            self._metrics.text,
            self._files,
            CatalogueReader(settings.catalogue, monotonic, reads),
            IdentityProvider(settings.login, monotonic, time.time) if settings.login else None,
            reads,
        )
        self._late = LateReload(self._learned, self.reload, self._backend.workers.recall)
        self._backend.unsure = self._late.begin
        self._checks: dict[str, asyncio.Future[FlagsChecked]] = {}
        """Flags that are being checked."""
        self._turning: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._counting: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._judging: asyncio.Task[None] | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._joining: asyncio.Task[None] | None = None
        """Task that watches the workers; None: there is one host."""
        self._spoolless: set[str] = set()
        """Front ends that had grants and no spool at the last look."""
        self._keeping: asyncio.Task[None] | None = None
        """Task that deletes old rows; None: rows of the ledger stay."""
        self._http: uvicorn.Server | None = None
        self._heartbeat: LeaderHeartbeat | None = None
        """The sign of life for standbys; None: there can be no standby."""
        self.retiring = asyncio.Event()
        """Set when another server is to lead."""
        self._deposed = False
        """Whether another server leads already."""
        self._leads = True

    async def start(self) -> None:
        """Return once calls are taken; a standby's are once no other server leads.

        Raises KvmigError; `close` it then, too.
        """
        stored = self._backend.stored
        await self._lead()
        await self._watch.look_first()
        path = self._settings.path("admin-key")
        if await stored(self._store.first_admin_key, partial(keep_key, path)) is not None:
            say(f"the first admin's key is in {path}")
        self._keys = KeyIndex(self._store.pepper)
        await self._backend.workers.recall()
        await self._files.start()
        await self._folders.start(fleet_word(self._store.pepper), self._store.database.token)
        await self._recall_sizes()  # by the folders of files that were downloaded
        await self.reload()
        if (wanted := await stored(self._store.placement)) is not None:
            try:
                placed = msgspec.convert(wanted, Placed)
            except msgspec.ValidationError as error:  # the database keeps it; nothing is placed
                self._set_aside.add("placement", "of the database", error)
            else:
                on_workers = bool(self._settings.ray)
                if any(bool(one.worker) != on_workers for one in placed.placement.units):
                    log.warning("the placement rests: its units are on workers only with --ray")
                else:
                    await self._backend.replacer.reach_placement(placed)
        await self._quotas.open()
        self._init.listen()  # what runs is judged by the catalogue
        await self._models.wait_first_round(LOOK_S)  # until then proxies go on with what they know
        await self._links.open()
        self._turning = self._keep_on(self._models.run, "models")
        self._watching = self._keep_on(self._watch.run, "GPUs")
        self._counting = self._keep_on(self._merger.run, "usage")
        self._sweeping = self._keep_on(self._sweep, "grants")
        self._judging = self._keep_on(self._judge, "roll-outs")
        self._fetching = self._keep_on(self._files.run, "model files")
        self._reading = self._keep_on(self._model_folders.run, "folders of models")
        if self._settings.ray:
            self._joining = self._keep_on(self._cluster.run, "workers")
        if days := self._settings.keep_usage_days:
            self._keeping = self._keep_on(lambda: self._backend.retention.run(days), "retention")
        await self._serve(take_path(str(self._settings.api)))

    async def _lead(self) -> None:
        """Take the database. Raises StoreError."""
        if self._settings.standby:
            merger = SpoolMerger(
                self._settings,
                self._ledger,
                self._thread,
                self._set_aside,
                lambda deployment: deployment not in self._running,
            )
            await stand_by(self._settings, merger, self._led_by, self._open)
        else:
            await self._open()
        self._deposed = False
        self.retiring.clear()
        database = self._store.database
        if database.path is None:
            self._heartbeat = LeaderHeartbeat(
                self._settings, database.token, self._led_by, self._init.give_orders
            )
            self._heartbeat.start()

    @property
    def deposed(self) -> bool:
        """Whether another server leads in place of this one."""
        return self._deposed

    async def _open(self) -> None:
        """Raises StoreError."""
        await self._backend.stored(self._store.open)

    def _led_by(self, leader: LeaderRow) -> None:
        """Another host's server leads."""
        self._deposed = True
        token, name = self._store.database.token, leader.host or "another server"
        self._init.step_down(StepDown(name, leads=leader.token, term=token))
        self.retiring.set()

    async def _recall_sizes(self) -> None:
        """Take what earlier servers knew of models' sizes. Raises StoreError."""
        stored, database = self._backend.stored, self._store.database
        memory = self._models.memory
        rows, _, rollouts = await stored(self._store.catalogue)
        known = [row.spec for row in rows] + [one.base_spec for one in rollouts.values()]
        await stored(forget_others, database, [self._files.resolved(spec) for spec in known])
        for one in await stored(remembered, database):
            memory.devices.recall(one)
        await stored(forget_engines, database, [engine_of(one) for one in get_args(Engine)])
        memory.figures.recall(await stored(stored_figures, database))

    async def _serve(self, sock: socket.socket) -> None:
        app = make_app(self._backend)
        config = uvicorn.Config(app, http="httptools", log_level="warning", access_log=False)
        config.timeout_graceful_shutdown = API_END_S
        self._http = OwnedServer(config)
        self._serving = asyncio.create_task(self._http.serve([sock]), name="http")
        while not self._http.started:
            if self._serving.done():
                raise StartupError("its HTTP server has stopped")
            await asyncio.sleep(0.01)

    async def _sweep(self) -> None:
        """Take back, every SWEEP_S, what was granted to calls that have ended, until cancelled."""
        while True:
            await asyncio.to_thread(self._disks.warn_full_disks)
            try:
                if found := await self._backend.stored(sweep, self._ledger):
                    log.warning("%d calls that had ended were granted tokens: taken back", found)
                await self._sweep_sources()
            except StoreError as error:
                log.warning("grants of ended calls stay for now: %s", error)
            await asyncio.sleep(SWEEP_S)

    async def _sweep_sources(self) -> None:
        """Give back what is granted to front ends that have no spool, at two looks: such are gone.

        Their questions may have waited here longer than they lived. Raises StoreError.
        """
        idle = await self._backend.stored(idle_sources, self._ledger)
        spools = self._merger.sources
        gone, self._spoolless = self._spoolless & (idle - spools), idle - spools
        if gone:
            calls = await self._backend.stored(give_back, self._ledger, gone)
            log.warning("%d calls of front ends that are gone had grants: taken back", calls)

    async def _tell_spent(self, tokens: Mapping[str, int]) -> None:
        """Let proxies know what was used of limits. tokens: by keys' ids. Raises StoreError."""
        keys = [self._grants_by_id[one] for one in tokens if one in self._grants_by_id]
        if not keys:
            return
        owed = {}
        now = monotonic()
        for key in keys:
            for whose in limited_by(key):
                if (tpm := whose.limits.tpm) is not None:
                    before = SpendBucket(tpm, level=tpm, at=self._since)
                    bucket = self._buckets.setdefault(whose.id, before)
                    bucket.per_minute = tpm
                    bucket.spend(tokens[key.key_id], now)
                    owed[whose.id] = bucket.level
        changed = await self._backend.stored(left, self._ledger, keys, time.time())
        self._left.update(changed)
        if owed or changed:
            self._links.send_to_all(SpentLimits(owed=owed, left=changed))

    async def _grant(self, ask: TokenRequest) -> TokenGrant:
        """See `QuotaSocket`."""
        key = self._grants_by_id.get(ask.key)
        if key is None:
            return TokenGrant(ask.number, 0, BAD_KEY.message)
        return await self._backend.stored(grant, self._ledger, key, ask)

    async def _take(self, handed: HandOver) -> None:
        """See `QuotaSocket`."""
        tokens = await self._backend.stored(take, self._ledger, handed)
        await self._tell_spent(tokens)

    async def ended(self) -> None:
        """Return, or raise, when something that must go on has ended."""
        assert self._turning is not None
        assert self._serving is not None
        assert self._counting is not None
        assert self._sweeping is not None
        assert self._fetching is not None
        tasks = [self._turning, self._serving, self._counting, self._sweeping, self._fetching]
        tasks += [one for one in (self._keeping, self._joining) if one is not None]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        done.pop().result()

    async def retire(self) -> None:
        """Lead no more. Calls that run on this host are granted tokens and counted until `close`:
        call it where another server is to lead."""
        await self._end_leading()
        await self._leave_database()

    async def close(self) -> None:
        """End all but the deployments, which run on."""
        await cancel_tasks(self._counting)
        retired = not self._leads
        await self._end_leading()
        if retired:
            await self._merger.merge_all()  # what its last calls have used
        await self._links.close()
        await self._quotas.close()
        self._init.close()
        await self._leave_database()
        if self._ledger is not self._store.database:
            await self._backend.stored(self._ledger.close)
        self._thread.shutdown()

    async def _end_leading(self) -> None:
        """End what decides; without effect for one that has ended it."""
        if not self._leads:
            return
        self._leads = False
        self._backend.retention.close()
        await self._backend.feed.close()
        await self._backend.catalogue.close()
        await cancel_tasks(
            self._turning,
            self._sweeping,
            self._judging,
            self._keeping,
            self._watching,
            self._fetching,
            self._reading,
            self._joining,
        )
        await self._files.close()
        if self._http is not None:
            self._http.should_exit = True
        for one in self._checks.values():
            if not one.done():
                one.set_exception(StoreError("the server ends"))
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)
        if self._backend.provider is not None:
            await self._backend.provider.close()
        await self._backend.replacer.close()
        await self._models.close()
        self._late.close()
        await self._learned.close()
        await self._weights.close()

    async def _leave_database(self) -> None:
        """Let another server have it; without effect for one that has left it."""
        if (heartbeat := self._heartbeat) is not None:
            await heartbeat.close()
            self._heartbeat = None
        if heartbeat is not None and self.retiring.is_set() and not self._deposed:
            try:
                await self._backend.stored(leave_lead, self._store.database)
            except StoreError as error:  # a standby waits for the silence then
                log.warning("the database is not left in order: %s", error)
        await self._backend.stored(self._store.close)

    async def reload(self) -> None:
        """Take the catalogue and the keys as the database has them now. Raises StoreError."""
        await self._reload_keys()  # first: a revoked key lets nobody in while the rest is read
        async with self._reloading:  # or what was read first might be taken last
            await self._reload_catalogue()

    async def _take_files(self) -> None:
        """Let models start from files that have just become whole. Raises StoreError."""
        if self._models.memory.devices.there:
            await self._learn_sizes()
        await self.reload()

    async def _learn_sizes(self) -> None:
        """Know what models take of GPUs whose files came after they were added."""
        for row in await self._backend.stored(self._store.models):
            spec = self._files.resolved(row.spec)
            if spec.source == row.spec.source or self._models.memory.devices.sizes(spec):
                continue
            try:
                await self.check(spec, True)
            except (ConfigError, StoreError) as error:  # its start says it again
                log.warning("the size of model %s is not known: %s", spec.name, error)

    async def _reload_catalogue(self) -> None:
        rows, aliases, rollouts = await self._backend.stored(self._store.catalogue)
        named = {name: {row.name: 1} for row in rows for name in row.spec.aliases}
        if (every := {**named, **aliases}) != self._aliases:
            self._aliases = self._backend.live.aliases = every
            self._links.send_to_all(AliasTable(version=self._next(), aliases=every))
        guard = self._models.faults.guard
        with guard("files of models"):
            await self._files.take_models(sources_of(rows, rollouts, self._files.resolved))
        specs = [*(row.spec for row in rows), *(one.base_spec for one in rollouts.values())]
        specs = list(map(self._files.resolved, specs))
        with guard("files on workers"):
            await self._folders.take_models(specs)
        with guard("folders of models"):
            await self._model_folders.take_models(specs)
        self._models.take_catalogue(
            CatalogEntry(
                row.model_id,
                row.name,
                row.revision,
                row.on,
                self._files.resolved(row.spec),
                self._resolved(rollouts.get(row.model_id)),
            )
            for row in rows
        )

    def _resolved(self, stored: StoredRollout | None) -> StoredRollout | None:
        """The same with the folder of what it began from, where that was downloaded."""
        if stored is None:
            return None
        return msgspec.structs.replace(stored, base_spec=self._files.resolved(stored.base_spec))

    async def _changed(self) -> None:
        """Take what an order changed, and wait until all proxies know it; what is stored and can't
        be read now is taken later."""
        try:
            await self.reload()
        except StoreError as error:
            log.warning("what was ordered takes effect once the database answers: %s", error)
            await self._late.settle(KNOWN_S)
        version, proxies = self._version, self._settings.proxies
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KNOWN_S):
                while not self._models.reports.known_to_all(version, proxies):
                    self._heard.clear()
                    await self._heard.wait()

    async def _reload_keys(self) -> None:
        stored = self._backend.stored
        keys = await stored(self._store.key_changes, self._keys_version)
        self._keys_version = keys.version
        now = time.time()
        forgotten = [one.prefix for one in self._grants.values() if is_forgotten(one, now)]
        removed = (*keys.revoked, *forgotten)
        self._keys.update(keys.granted, removed)
        for prefix in removed:
            if (gone := self._grants.pop(prefix, None)) is not None:
                del self._grants_by_id[gone.key_id]
        self._grants.update((one.prefix, one) for one in keys.granted)
        self._grants_by_id.update((one.key_id, one) for one in keys.granted)
        if keys.granted or removed:
            self._links.send_to_all(
                messages.KeyUpdates(version=self._next(), changed=keys.granted, removed=removed)
            )
            changed = await stored(left, self._ledger, keys.granted, now)
            self._left.update(changed)
            self._links.send_to_all(SpentLimits(left=changed))

    # -- proxies

    def _next(self) -> int:
        self._version += 1
        return self._version

    def _first(self) -> Sequence[Down]:
        """The messages that a proxy needs when it connects."""
        now = monotonic()
        owed = {whose: bucket.now(now) for whose, bucket in self._buckets.items()}
        snapshot = FleetSnapshot(
            version=self._version,
            pepper=self._store.pepper,
            keys=tuple(self._grants.values()),
            routes=tuple(self._models.routes()),
            aliases=self._aliases,
        )
        own = self._store.database
        leading = LeadingHost(term=own.token, door=own.door)
        return snapshot, SpentLimits(owed=owed, left=self._left), leading

    def _tell_routes(self, changed: Sequence[ModelRoute], gone: Sequence[str]) -> int:
        routes = RouteChanges(version=self._next(), changed=tuple(changed), removed=tuple(gone))
        self._links.send_to_all(routes)
        return self._version

    def _order(self, order: Order) -> None:
        self._init.order(msgspec.structs.replace(order, term=self._store.database.token))
        if isinstance(order, StartDeployment) and (folder := weights_folder(order)):
            self._weights.begin(folder)

    def _may_order(self) -> bool:
        """Whether no other server leads yet; one that stood still has to ask first."""
        return self._heartbeat is None or self._heartbeat.proof.holds(monotonic())

    def _hear_init(self, news: News) -> None:
        if isinstance(news, LeaveLead):
            self.retiring.set()
        elif not isinstance(news, FlagsChecked):
            self._models.take_news(news)
        elif (checking := self._checks.pop(news.check, None)) and not checking.done():
            checking.set_result(news)

    async def check(self, spec: ModelSpec, sizes: bool = False) -> None:
        """Let the engine's own parser read a model's flags. Raises ConfigError, StoreError.

        sizes: whether to learn what the model takes of memory, too.
        """
        if not spec.library:
            return  # its command is nobody's to read
        name = secrets.token_hex(4)
        checking = self._checks[name] = asyncio.get_running_loop().create_future()
        own = (
            *words(spec, name, self._settings),
            *self._models.workers.words(spec, ()),
        )
        self._order(CheckFlags(name, spec.engine, own, sizes=sizes))
        try:
            async with asyncio.timeout(CHECK_S):
                found = await checking
        except TimeoutError as error:
            raise StoreError(f"model {spec.name}: its flags can't be checked now") from error
        finally:
            self._checks.pop(name, None)
        if found.wrong:
            raise ConfigError(f"model {spec.name}: {found.wrong}")
        if (known := decode_sizes(found.sizes)) is not None:
            self._models.memory.devices.learn(spec, known)
            await self._remember(spec)

    async def _remember(self, spec: ModelSpec) -> None:
        """Keep what is known of a model's sizes for the next server."""
        memory, database = self._models.memory, self._store.database
        try:
            await self._backend.stored(remember, database, memory.devices.to_remember(spec))
            for one in memory.figures.take_new():
                await self._backend.stored(store_figure, database, one)
        except StoreError as error:
            log.warning("the sizes of model %s are not stored: %s", spec.name, error)

    def _keep_step(self, model_id: str, plan: RolloutPlan, done: bool) -> None:
        self._learned.start(self._store_step(model_id, plan, done), "a roll-out's step")

    async def _store_step(self, model_id: str, plan: RolloutPlan, done: bool) -> None:
        """Store how far a roll-out is, for the next server."""
        while True:
            try:
                await self._backend.stored(
                    finish_rollout if done else keep_step, self._store.database, model_id, plan
                )
                return
            except StoreError as error:
                log.warning("a roll-out's step is not stored: %s", error)
            if not done:
                return  # the next server takes this step once more
            await asyncio.sleep(DONE_S)  # or the next change would begin from what is no more

    async def _judge(self) -> None:
        """Compare the calls of old and new deployments, every JUDGE_S, until cancelled."""
        while True:
            await asyncio.sleep(JUDGE_S)
            for one in self._models.rollouts.both():
                with self._models.faults.guard("judging", self._models.shown(one.name)):
                    await self._judge_rollout(one)

    async def _judge_rollout(self, one: RunningRollout) -> None:
        try:
            found = [
                await self._backend.stored(
                    figures_of, self._ledger, self._settings.spools / each, one.since
                )
                for each in (one.old, one.new)
            ]
        except StoreError as error:
            log.warning(
                "the calls of model %s's roll-out are not compared now: %s", one.name, error
            )
        else:
            self._models.rollouts.judge(one, *found)

    def _keep_on(
        self, work: Callable[[], Coroutine[Any, Any, object]], name: str
    ) -> asyncio.Task[None]:
        """Start work that has no end by itself; an unforeseen error is counted, and doesn't end
        it."""
        failed = partial(self._models.faults.take_fault, name)
        return asyncio.create_task(keep_running(work, name, failed=failed), name=name)

    def _hear(self, proxy: str, message: ProxyNews | None) -> None:
        match message:
            case ModelWanted():
                self._models.take_want(message)
            case ProxyDemand():
                self._models.take_demand(proxy, message)
                self._heard.set()
            case ProxyMetrics(text):
                self._figures[proxy] = text
            case None:
                self._figures.pop(proxy, None)
                self._models.reports.forget(proxy)
                self._heard.set()


async def run(launch: ServerLaunch, announced: int, init: int, heartbeat: int) -> None:
    """Serve until the supervisor ends, or wants an end. Raises KvmigError."""
    server = FleetServer(launch, socket.socket(fileno=init))
    stopped = asyncio.create_task(until_stopped())
    try:
        starting = asyncio.create_task(server.start(), name="start")
        await asyncio.wait((stopped, starting), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            await cancel_tasks(starting)
            return
        starting.result()
        gc.freeze()  # or garbage waits until there is a quarter as much of it as of libraries
        gc.collect()
        if server.deposed:  # init would let clients in, and has passed over its order to step down
            raise StartupError("another host's server has taken over while this one started")
        announce(announced, StartAnnouncement(endpoint="server"))
        beating = asyncio.create_task(send_heartbeats(heartbeat), name="heartbeats")
        trimming = asyncio.create_task(keep_running(keep_small, "heap"), name="heap")
        ended = asyncio.create_task(server.ended())
        retiring = asyncio.create_task(server.retiring.wait())
        await asyncio.wait((stopped, ended, retiring), return_when=asyncio.FIRST_COMPLETED)
        retiring.cancel()
        if ended.done():
            ended.result()
        ended.cancel()
        server.retiring.set()  # a server that is stopped leaves the lead
        if not stopped.done():
            await server.retire()
            await stopped
        beating.cancel()
        trimming.cancel()
    finally:
        stopped.cancel()
        await server.close()


def main(words: Sequence[str]) -> int:
    """Launch document on stdin. words: descriptors, of where it announces that it is ready, of its
    end of the socket to the supervisor, and for `kvmig.process.child.send_heartbeats`.
    """
    form = "kvmig.fleet.server [FOLDER] ANNOUNCED SUPERVISOR HEARTBEAT"
    return run_child(words, form, ServerLaunch, _run, counts=(3,), report=_report)


def _run(launch: ServerLaunch, *descriptors: int) -> None:
    quiet("server")
    try:
        uvloop.run(run(launch, *descriptors))
    except OSError as error:
        raise StartupError(str(error)) from error


def _report(announced: int, error: Exception) -> None:
    announce_failure(announced, error, refused=isinstance(error, ConfigError))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
