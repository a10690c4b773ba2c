"""A llumlet: one instance's engine, its load reports, and its side of every migration."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import msgspec

from kvmig.controlplane.fronts import FrontendRegistry, OwnershipTable
from kvmig.controlplane.headroom import measured_headroom
from kvmig.controlplane.messages import (
    URGENT,
    AbortRequests,
    CallDone,
    ClusterMessage,
    Discard,
    EngineCall,
    Fence,
    Fenced,
    ListedRequests,
    ListRequests,
    LoadReport,
    Migrate,
    Migrated,
    MoveSession,
    OrderDone,
    OrderRefused,
    Outputs,
    Overrun,
    PairedDestination,
    Pairs,
    Resolved,
    SetGuarantee,
    SetState,
    Submit,
    Welcome,
)
from kvmig.controlplane.migration_host import MigrationHost
from kvmig.controlplane.mover import MigrationDriver
from kvmig.controlplane.own_memory import FIRST_S, LAST_S, OwnMemory
from kvmig.controlplane.parking import EngineParking
from kvmig.controlplane.policy import policy_of
from kvmig.controlplane.reporter import CHANGE_PERIOD_S, LoadReporter
from kvmig.controlplane.session_turns import SessionTurns
from kvmig.core.background import BackgroundTasks
from kvmig.core.clock import monotonic
from kvmig.core.config import ClusterConfig
from kvmig.core.errors import (
    ConfigError,
    MigrationRefused,
    PeerBehind,
    StartupError,
    TransportError,
)
from kvmig.core.start_times import StartTimes
from kvmig.engines.base import EmittedTokens, EndedRequest, Frame, Frames, ServingEngine
from kvmig.engines.gate import ComputeShares
from kvmig.kvtransfer.measured import slot_bytes
from kvmig.kvtransfer.messages import PeerMessage
from kvmig.kvtransfer.report import MigrationReport
from kvmig.kvtransfer.transports.base import StagingPool
from kvmig.kvtransfer.transports.select import open_staging, site_of
from kvmig.rpc.codec import REFUSED
from kvmig.rpc.messages import VERSION, Hello, RpcMessage
from kvmig.rpc.zmq_sockets import RpcServer
from kvmig.sharing.lease_ledger import MemberClaim
from kvmig.sharing.member import UnitMember

log = logging.getLogger(__name__)


class Llumlet:
    """Make, start and close it inside one event loop."""

    def __init__(
        self,
        instance: str,
        cluster: str,
        secret: bytes,
        config: ClusterConfig,
        engine: ServingEngine,
    ) -> None:
        self.instance = instance
        self._cluster = cluster
        self._member: UnitMember | None = None
        self._config = config
        self._engine = engine
        self._server = RpcServer(
            secret, "llumlet", instance, ClusterMessage | PeerMessage, host=config.control_host
        )
        self._fronts = FrontendRegistry()
        self._parking = EngineParking(engine)
        self._memory = OwnMemory(engine.layout)
        self.likeness = ""
        """What engines must be equal in, in words (`EnginePlugin.likeness`)."""
        self._layout = replace(engine.layout, weights="").fingerprint
        self.times = StartTimes()
        """How long its process took to start."""
        self._came = asyncio.Event()
        """Something has come since the engine was last looked at."""
        self._overrun: set[bytes] = set()
        """Front ends that were too slow, and don't know yet what it cost them."""
        self._tracking = OwnershipTable()
        self._stagings: dict[str, StagingPool] = {}
        if not engine.unmovable:
            self._stagings = open_staging(
                config.migration.transport,
                cluster,
                instance,
                config.migration.staging_buffers,
                slot_bytes(config.migration.chunk_bytes, engine.layout),
                site_of(
                    config.migration,
                    engine.layout.gpu,
                    self._server.refusals,
                    self._server.host,
                ),
            )
        self._host = MigrationHost(
            instance,
            secret,
            engine,
            config.migration,
            self._stagings,
            self._server,
            self._fronts,
            self._tracking,
            self._on_exit,
        )
        self._migrations = self._host.migrations
        self._mover = MigrationDriver(
            engine.requests,
            self._migrations.moving,
            self._tracking.arrived,
            self._migrate,
            policy_of(config.scheduler).victims,
            at_once=config.migration.max_migrations,
        )
        self._session_turns = SessionTurns(
            lambda move_id: self._migrations.cancel_request(move_id, "busy")
        )
        self._failed: asyncio.Future[BaseException | None] = asyncio.Future()
        self._tasks = BackgroundTasks(f"llumlet {instance}")
        self._headroom: dict[int, float] = {}
        self._told_weights = engine.layout.weights
        self._knows_prefixes: set[bytes] = set()
        """Connected front ends that were sent all marks that are held."""
        self._untold = 0
        """See `LoadReport`."""
        self._reporter = LoadReporter(
            config.heartbeat_interval_ms, config.faults.step_timeout_s, monotonic()
        )

    @property
    def endpoint(self) -> str:
        """The endpoint for front ends, the scheduler and peers."""
        return self._server.endpoint

    async def start(self) -> None:
        """Step the engine, warm it up, then take messages. Raises StartupError if it fails."""
        self._engine.connect(self._on_outputs, self._on_call_done, self._on_exit)
        await self._join_unit()
        await self._warm_up()
        await self._migrations.get_ready()
        self._headroom = await measured_headroom(self._engine, self._config.priorities)
        await self._look_at_memory()
        for loop in (self._receive, self._report, self._mover.run, self._watch_memory):
            self._tasks.start(self._for_ever(loop))

    async def _join_unit(self) -> None:
        """Raises StartupError."""
        unit, sharing = self._config.unit, self._engine.sharing
        if unit is None or isinstance(sharing, str):
            return
        room, patience_s = sharing.room, unit.patience_s
        claim = MemberClaim(unit.model, room.floor, room.capacity, room.granule, unit.guarantee)
        self._member = UnitMember(
            unit.path,
            f"{self._cluster}.{self.instance}",
            claim,
            lambda: sharing.use,
            sharing.watch,
            lambda quota, limit: sharing.resize(quota, limit, patience_s),
            None if unit.shares is None else ComputeShares(*unit.shares),
        )
        if unit.shares is not None:
            await sharing.gated(self._member.gate)
        await self._member.join()
        self._tasks.start(self._for_ever(self._member.run))

    async def _for_ever(self, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a loop; if it ends, the instance ends, since it could no longer serve."""
        try:
            await loop()
        except Exception as error:
            self._on_exit(error)
            raise

    async def _warm_up(self) -> None:
        warming = asyncio.ensure_future(self._engine.warm_up())
        try:
            await asyncio.wait((warming, self._failed), return_when=asyncio.FIRST_COMPLETED)
            if not warming.done():
                raise StartupError(f"the engine failed while it warmed up: {self._failed.result()}")
            warming.result()
        finally:
            warming.cancel()

    async def failed(self) -> BaseException | None:
        """Wait until the engine has stopped by itself; its error."""
        return await asyncio.shield(self._failed)

    async def close(self, timeout_s: float) -> None:
        """Give running migrations up, stop the engine, free everything."""
        await self._migrations.close(timeout_s)
        await self._tasks.close()
        if self._member is not None:
            self._member.close()
        await self._host.close()
        self._server.close()
        await self._engine.close(timeout_s)
        for staging in self._stagings.values():
            staging.close()

    # -- messages

    async def _receive(self) -> None:
        async for sender, message, payload in self._server.messages():
            try:
                self._handle(sender, message, payload)
            except TransportError as error:
                log.warning("%s: %s", type(message).__name__, error)
            except REFUSED as error:
                self._server.refusals.count(error)
                log.warning("%s: %s", type(message).__name__, error)

    def _handle(self, sender: bytes, message: RpcMessage, payload: list[memoryview]) -> None:
        self._came.set()
        match message:
            case Hello():
                self._greet(sender, message)
            case Submit():
                self._submit(sender, message, payload)
            case AbortRequests():
                self._abort(message.request_ids)
            case Discard():
                self._discard(message)
            case EngineCall():
                self._call(sender, message, payload)
            case ListRequests():
                self._tasks.start(self._list(sender, message.call_id))
            case Migrate() | MoveSession():
                self._begin_move(sender, message, payload)
            case Fence():
                self._tasks.start(self._fence(sender, message))
            case Resolved():
                self._host.resolved(message)
            case Pairs() | SetState():
                self._obey(message)
            case SetGuarantee():
                self._tasks.start(self._set_guarantee(sender, message))
            case _:
                self._migrations.receive(sender, message, payload)

    def _greet(self, sender: bytes, hello: Hello) -> None:
        if hello.role in ("gateway", "guest"):
            if self._fronts.has(hello.name):  # that its old connection is lost shows only now
                self._front_lost(sender)
            self._overrun.discard(sender)
            self._fronts.join(hello.name, sender, guest=hello.role == "guest")
            self._server.send(sender, self._welcome())
        elif hello.role in ("scheduler", "launcher"):
            self._fronts.listen(sender)

    def _welcome(self) -> Welcome:
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return Welcome(
            VERSION.major,
            self.instance,
            self._engine.describe(),
            VERSION.minor,
            self._engine.layout.weights,
            os.getpid(),
            socket.gethostname(),
            tuple(filter(None, gpus.split(","))),
            self.times,
            self._engine.layout.block_bytes,
        )

    def _obey(self, order: Pairs | SetState) -> None:
        """What the scheduler and the launcher want."""
        if isinstance(order, Pairs):
            self._mover.set(order.pairs)
        else:
            self._reporter.wanted = order.state

    async def _set_guarantee(self, sender: bytes, order: SetGuarantee) -> None:
        done = OrderDone(order.call_id, (self.instance,))
        try:
            await self._guarantee(order.size)
        except OrderRefused as error:
            done = OrderDone(order.call_id, (), error.refusal, str(error))
        self._report_if_due()  # who asked sees it with the answer
        self._send(sender, done)

    async def _guarantee(self, size: int) -> None:
        """Set the reservation in the unit. Raises OrderRefused."""
        if self._member is None:
            alone = self._engine.sharing if self._config.unit else "it runs without --unit"
            raise OrderRefused("conflict", f"instance {self.instance} is in no unit: {alone}")
        try:
            await self._member.guarantee(size)
        except (ConfigError, TransportError) as error:
            raise OrderRefused("conflict", f"instance {self.instance}: {error}") from error

    def _submit(self, sender: bytes, message: Submit, payload: list[memoryview]) -> None:
        gateway = self._fronts.name(sender)
        known = message.output_token_ids
        self._tracking.begin(message.request_id, 0, len(known), gateway)
        self._engine.submit(self._fronts.number(sender), message.request_id, payload, known)

    def _abort(self, request_ids: list[str]) -> None:
        self._engine.abort(request_ids)
        for request_id in request_ids:
            self._migrations.cancel_request(request_id, "aborted_by_client")
            self._tracking.end(request_id)
            endpoint = self._tracking.went_to(request_id)
            if endpoint is not None:
                with contextlib.suppress(TransportError):  # the request is gone with it
                    self._host.send_to(endpoint, AbortRequests([request_id]))

    def _discard(self, message: Discard) -> None:
        track = self._tracking.get(message.request_id)
        if track is not None and track.epoch == message.epoch:
            self._engine.abort([message.request_id])
            self._tracking.end(message.request_id)

    async def _list(self, sender: bytes, call_id: int) -> None:
        states = await self._engine.requests()
        self._send(sender, ListedRequests(call_id, states, self._tracking.gateways()))

    async def _fence(self, sender: bytes, message: Fence) -> None:
        try:
            committed = await self._migrations.fence(message.request_id, message.epoch)
        except TimeoutError:
            log.warning(
                "request %s: its front end no longer waits for a commit", message.request_id
            )
            return
        self._send(sender, Fenced(message.call_id, committed))

    # -- migrations

    def _begin_move(
        self, sender: bytes, order: Migrate | MoveSession, payload: list[memoryview]
    ) -> None:
        if isinstance(order, Migrate):
            self._tasks.start(self._migrate(order.request_id, order, sender))
        else:
            self._tasks.start(self._move_session(sender, order, payload))

    async def _migrate(
        self, request_id: str, order: PairedDestination | Migrate, asker: bytes = b""
    ) -> MigrationReport:
        """Move a request and report the outcome to all front ends; `asker` has given the order."""
        by_hand = order if isinstance(order, Migrate) else None
        why = "by-hand" if isinstance(order, Migrate) else order.why
        track = self._tracking.get(request_id)
        gateway = track.gateway if track else ""
        epoch = track.epoch if track else 0
        self._untold += 1
        try:
            with self._session_turns.request_moves():
                report = await self._migrations.migrate(
                    request_id,
                    order.destination,
                    order.endpoint,
                    gateway=gateway,
                    epoch=epoch,
                    urgent=why in URGENT,
                    after_prompt=why == "prompt",
                    inexact=self._config.scheduler.inexact_moves
                    or bool(by_hand and by_hand.inexact),
                )
            ended = Migrated(0, msgspec.structs.replace(report, why=why), gateway, epoch)
            if by_hand:
                self._send(asker, msgspec.structs.replace(ended, call_id=by_hand.call_id))
            self._tell(ended, but=asker)
        finally:
            self._untold -= 1
        return ended.report

    async def _move_session(
        self, sender: bytes, order: MoveSession, payload: list[memoryview]
    ) -> None:
        """Move a session that has no request now, and report to the front end that asked."""
        request_id, front = order.request_id, self._fronts.name(sender)
        frames = [bytes(frame) for frame in payload]
        try:
            if order.patience_ms:
                async with self._session_turns.session_moves(request_id, order.patience_ms / 1e3):
                    report = await self._carry_session(order, front, frames)
            else:
                report = await self._carry_session(order, front, frames)
        except Exception as error:
            if not isinstance(error, MigrationRefused):
                log.exception("%s failed", request_id)
                error = MigrationRefused("error", repr(error))
            report = MigrationReport(
                id=request_id,
                request_id=request_id,
                source=self.instance,
                destination=order.destination,
                state="aborted",
                reason=error.reason,
                detail=error.detail,
            )
        report = msgspec.structs.replace(report, why="drain" if order.patience_ms else "by-hand")
        self._send(sender, Migrated(order.call_id, report, front))

    async def _carry_session(
        self, order: MoveSession, front: str, frames: list[bytes]
    ) -> MigrationReport:
        """Raises MigrationRefused."""
        request_id = order.request_id
        try:
            ended = EndedRequest(frames, order.output_token_ids, order.shared_tokens)
            await self._engine.hold_session(request_id, ended)
            if order.patience_ms:
                self._session_turns.check_turn()
            return await self._migrations.migrate(
                request_id,
                order.destination,
                order.endpoint,
                gateway=front,
                inexact=self._config.scheduler.inexact_moves or order.inexact,
                idle=True,
            )
        finally:
            await self._engine.resume(request_id)  # what is held still, if anything is

    # -- what the engine gives

    def _on_outputs(self, client: int, emitted: list[EmittedTokens], frames: list[Frame]) -> None:
        if emitted:  # an engine that waits for memory has outputs, too: its statistics
            self._came.set()
        sender = self._fronts.client(client)
        spans = self._tracking.spans(emitted)
        strays: list[str] = []
        for entry, span in zip(emitted, spans, strict=True):
            self._migrations.stepped(entry.request_id, entry.tokens)
            if entry.finished:
                self._migrations.cancel_request(entry.request_id, "finished")
            elif span.epoch < 0:
                strays.append(entry.request_id)
        if strays and client:
            # They were aborted while the engine was about to commit them, and didn't know them yet.
            self._engine.abort(strays)
        if self._engine.layout.weights != self._told_weights:
            self._report_if_due()  # who gets the first tokens of new weights knows by whom they are
        if sender is not None:
            self._send(sender, Outputs(spans), frames)

    def _on_call_done(
        self, client: int, call_id: int, error: str | None, frames: list[Frame]
    ) -> None:
        sender = self._fronts.client(client)
        if sender is not None:
            self._send(sender, CallDone(call_id, error), frames)

    def _call(self, sender: bytes, call: EngineCall, payload: list[memoryview]) -> None:
        if call.method in ("park", "unpark"):
            self._tasks.start(self._park(sender, call.call_id, call.method == "park"))
            return
        client = self._fronts.number(sender)
        try:
            self._engine.call(client, call.call_id, call.method, payload)
        except Exception as error:  # of arguments that it can't read
            log.exception("%s failed", call.method)
            self._on_call_done(client, call.call_id, repr(error), [])

    async def _park(self, sender: bytes, call_id: int, parks: bool) -> None:
        error = None
        try:
            await self._parking.set_parked(parks)
            self._memory.forget_peak()
        except Exception as refused:  # noqa: BLE001 - told to whoever asked
            error = str(refused) or repr(refused)
        self._report_if_due()  # who asked sees it with the answer
        self._send(sender, CallDone(call_id, error), [])

    def _on_exit(self, error: BaseException | None) -> None:
        if not self._failed.done():
            self._failed.set_result(error)

    # -- load reports

    async def _report(self) -> None:
        while True:
            self._report_if_due()
            load = self._engine.load()
            if load.waiting or load.prefill_blocks:
                self._mover.look_again()
            self._tell_overrun()
            await self._pause()

    async def _pause(self) -> None:
        """Wait until the next look at the engine."""
        load = self._engine.load()
        busy = load.running or self._overrun or self._migrations.moving()
        pause_s = self._reporter.pause_s(monotonic(), bool(busy), self._came.is_set())
        self._came.clear()
        if pause_s <= CHANGE_PERIOD_S:
            await asyncio.sleep(pause_s)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._came.wait()

    def _report_if_due(self) -> None:
        now, step_s = monotonic(), self._engine.step_s()
        state = self._reporter.state(now, step_s, self._failed.done())
        if state == "failed":  # if it hangs for good: the launcher starts another one
            self._on_exit(TimeoutError(f"a step has been running for {step_s:.0f} s"))
        load, weights = self._engine.load(), self._engine.layout.weights
        moving = (self._migrations.incoming, self._migrations.outgoing)
        shared = None if self._member is None else self._member.state
        promised = shared and (shared.guarantee, shared.asked)
        news = (*moving, weights, promised, self._untold, self._parking.parked)
        if not self._reporter.is_due(now, state, load, *news):
            return
        self._told_weights = weights
        report = LoadReport(
            self.instance,
            self._reporter.seq,
            load,
            *moving,
            state=state,
            staging_used=self._migrations.staging_used,
            bandwidth=self._migrations.blocks_s,
            headroom=self._headroom,
            refused=self._server.refusals.counts(),
            unmovable=self._engine.unmovable,
            weights=weights,
            numerics=self._engine.numerics,
            shared=shared,
            untold=self._untold,
            parked=self._parking.parked,
            beside_kv=self._memory.beside_kv,
            likeness=f"{self._config.engine} {self.likeness}; {self._layout}",
        )
        # Front ends first: none shall send a request to an instance that the launcher ends.
        self._report_to_fronts(report)
        for sender in self._fronts.listeners():
            self._send(sender, report)

    def _report_to_fronts(self, report: LoadReport) -> None:
        """Send the report, and which prompts' beginnings have come and gone; a front end that has
        just connected gets all that are held."""
        held = self._engine.held_marks
        if held is not None:
            report = msgspec.structs.replace(report, prefixes=held.news())
        whole = None
        for sender in self._fronts.gateways():
            if held is None or sender in self._knows_prefixes:
                self._send(sender, report)
                continue
            if whole is None:
                whole = msgspec.structs.replace(report, prefixes=held.whole())
            self._knows_prefixes.add(sender)
            self._send(sender, whole)

    async def _watch_memory(self) -> None:
        pause_s = FIRST_S
        while True:
            await asyncio.sleep(pause_s)
            await self._look_at_memory()
            pause_s = min(2 * pause_s, LAST_S)

    async def _look_at_memory(self) -> None:
        if self._parking.parked:
            return  # on a GPU, its weights are in the host's memory meanwhile
        try:
            await asyncio.to_thread(self._memory.measure)
        except OSError as error:  # then a fleet goes on with what it assumes
            log.warning("%s takes an unknown amount of memory: %s", self.instance, error)

    # -- helpers

    def _tell(self, message: RpcMessage, but: bytes = b"") -> None:
        for sender in self._fronts.gateways():
            if sender != but:
                self._send(sender, message)

    def _send(self, sender: bytes, message: RpcMessage, frames: Frames = ()) -> None:
        """Send to a front end or the scheduler; one that is gone is forgotten."""
        try:
            self._server.send(sender, message, frames)
        except PeerBehind as error:
            if self._fronts.is_gateway(sender):  # to others the next report says the same
                log.warning("%s", error)
                self._overrun.add(sender)
                self._front_lost(sender)
        except TransportError as error:
            log.info("%s", error)
            self._front_lost(sender)

    def _tell_overrun(self) -> None:
        """Report lost outputs to front ends that were too slow, once they read again."""
        for sender in list(self._overrun):
            try:
                self._server.send(sender, Overrun())
            except PeerBehind:
                continue
            except TransportError as error:
                log.info("%s", error)
            self._overrun.discard(sender)

    def _front_lost(self, sender: bytes) -> None:
        self._knows_prefixes.discard(sender)
        gateway = self._fronts.leave(sender)
        request_ids = [] if gateway is None else self._tracking.requests_of(gateway)
        if request_ids:  # nobody hears them any more
            log.warning("front end %s is gone, and its %d requests", gateway, len(request_ids))
            self._abort(request_ids)
