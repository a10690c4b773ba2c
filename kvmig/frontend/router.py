"""The router of a front end: which instance gets a request, and whose tokens its client gets.

A token goes instance -> router -> streams -> sink; an order goes the other way, from the engine's
front half or the admin API to the router, and from there to an instance.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from functools import cache

from msgspec.structs import replace

from kvmig.accounts.allowances import TokenAllowance
from kvmig.asgi import answer_room
from kvmig.asgi.call import HttpCall, current_call, current_call_id
from kvmig.asgi.errors import (
    AlreadyMigrating,
    CallTimeout,
    InstanceLost,
    InstanceRemoved,
    MigrationDisabled,
    OrderFailed,
    RequestFinished,
    SameInstance,
    UnknownInstance,
    UnknownRequest,
)
from kvmig.controlplane.messages import (
    CallDone,
    Fence,
    Fenced,
    ListedRequests,
    ListRequests,
    LoadReport,
    Migrate,
    Migrated,
    OrderDone,
    Outputs,
    OutputSpan,
    Overrun,
    PauseAhead,
    Resolve,
    Resolved,
    SetGuarantee,
    Submit,
)
from kvmig.core.api_records import RequestRow
from kvmig.core.background import BackgroundTasks, cancel_tasks
from kvmig.core.clock import TimeSource, monotonic
from kvmig.core.config import ClusterConfig
from kvmig.core.errors import AnswerTooLarge, PeerError
from kvmig.engines.client_request import ClientRequest, PromptMarks
from kvmig.frontend.call_aborts import CallAborts
from kvmig.frontend.dispatch_turns import DispatchTurns
from kvmig.frontend.instances import InstanceConnection, InstancePool
from kvmig.frontend.inventory import (
    OthersRequest,
    find_other,
    others_requests,
    request_rows,
)
from kvmig.frontend.meter import UsageMeter
from kvmig.frontend.ownership import RequestOwnership
from kvmig.frontend.pending_calls import PendingCalls
from kvmig.frontend.ports import (
    DispatchOrder,
    OutputDecoder,
    OutputItem,
    OutputSink,
    RouterObserver,
)
from kvmig.frontend.quotas import Output, QuotaClient
from kvmig.frontend.request_traces import RequestTraces
from kvmig.frontend.requests import (
    LiveRequest,
    RequestTable,
    call_of,
    current_search,
    is_tenants_call,
    priority_of_call,
    sequences_of_call,
)
from kvmig.frontend.session_moves import SessionMoves
from kvmig.frontend.splice import StreamSplicer
from kvmig.frontend.streams import RequestStreams
from kvmig.kvtransfer.report import MigrationReport
from kvmig.rpc.codec import Frames, RefusalCounter
from kvmig.rpc.messages import RpcMessage

HOLD_S = 10.0
"""Longest wait for an old owner's tokens while the new one's are there."""
FENCE_TIMEOUT_S = 2.0
"""Longest wait for a destination's word on whether it committed."""
LIST_TIMEOUT_S = 2.0
"""Longest wait for an instance's list of requests."""
GUARANTEE_TIMEOUT_S = 10.0
"""Longest wait for an instance, which asks its unit's agent."""
RECENT = 1000
"""Reports of migrations that are kept."""

_NEVER_BEGAN = ("already_migrating", "unknown_request")
"""Reasons of migrations that are answered as errors, not recorded."""

log = logging.getLogger(__name__)


class FrontendRouter:
    """Engine-agnostic. Make, use and close it inside one running event loop."""

    def __init__(
        self,
        name: str,
        secret: bytes,
        config: ClusterConfig,
        sink: OutputSink,
        decode: OutputDecoder,
        *,
        observer: RouterObserver | None = None,
        meter: UsageMeter | None = None,
        quotas: QuotaClient | None = None,
        traces: RequestTraces | None = None,
        clock: TimeSource = monotonic,
        lost_after_s: float = 10.0,
        fence_timeout_s: float = FENCE_TIMEOUT_S,
    ) -> None:
        """name: of this front end; it counts what happens to its own requests.

        meter: counts what its calls use. quotas: pays for calls whose keys have one. traces: makes
        their spans; None: there are none.
        """
        self.fleet = InstancePool(name, secret, config, clock, lost_after_s, self)
        self.reports: deque[MigrationReport] = deque(maxlen=RECENT)
        """Reports of the last migrations, by hand or by policy, oldest first."""
        self.reported = 0
        """How many there have been."""
        self._name = name
        self._config = config
        self._observer = observer = observer or RouterObserver()
        self._clock = clock
        self._fence_timeout_s = fence_timeout_s
        self._table = RequestTable(meter, traces)
        self._traces = traces
        self._questions = PendingCalls(self.fleet.send)
        self.sessions = SessionMoves(
            self.fleet, self._questions, config, clock, self._running_sessions
        )
        self.aborts = CallAborts()
        """Orders to end calls, and what other front ends order."""
        self._table.on_ended = self.sessions.remember_request
        self._streams = RequestStreams(
            self._table, sink, decode, self.fleet, observer, clock, quotas
        )
        self._quotas = quotas
        if quotas is not None:
            quotas.release = lambda output: self._splice(*output)
            quotas.end = self._end_unpaid
        self._ownership = RequestOwnership(
            self._table,
            self.fleet,
            self._streams.fail,
            observer,
            clock,
            config.faults,
            config.scheduler.inexact_moves,
        )
        self._refusals = RefusalCounter()
        self._turns = DispatchTurns(self.fleet.queues, self._is_fresh)
        self._fences: dict[tuple[str, int], asyncio.Task[bool]] = {}
        """Destinations that are asked whether they committed: by run id and epoch."""
        self._tasks = BackgroundTasks("router")
        self._tasks.start(self._watch())

    async def close(self) -> None:
        """Disconnect from all; nothing is delivered any more."""
        await asyncio.gather(self._tasks.close(), cancel_tasks(*self._fences.values()))
        self._streams.close()
        await self.fleet.close()

    # -- instances come and go

    async def add_instance(
        self,
        instance: str,
        endpoint: str,
        timeout_s: float = 30.0,
        index: int | None = None,
        *,
        guest: bool = False,
    ) -> bytes:
        """Connect; returns the engine's description (`Welcome.engine`).

        index: its engine index; None: the number of instances added before, or that of an
        earlier one of its name. guest: it is another server's, see `InstancePool`. Raises
        InstanceLost, and ValueError if there is one of that name.
        """
        return await self.fleet.add(instance, endpoint, timeout_s, index, guest=guest)

    async def remove_instance(self, instance: str, *, crashed: bool = False) -> None:
        """Disconnect for good; requests that it still runs run again elsewhere.

        crashed: its process has died, maybe of one of them. Unknown ones are ignored.
        """
        if await self.fleet.remove(instance):
            reason = f"instance {instance} {'has died' if crashed else 'was removed'}"
            self._questions.lost(instance, reason, InstanceRemoved)
            self.sessions.forget(instance)
            self._ownership.removed(instance, reason, crashed=crashed)
            self._observer.gone(instance)

    def evacuate(self, instance: str, *, ends: bool = False) -> None:
        """Run the instance's requests elsewhere, by recompute.

        ends: a request whose weights no other instance has ends with an error.
        """
        self._ownership.evacuate(instance, ends=ends)

    async def call(
        self,
        method: str,
        payload: Frames = (),
        instances: Sequence[str] | None = None,
        timeout_s: float = 60.0,
    ) -> dict[str, list[memoryview]]:
        """Run an engine method on `instances` (default: all of this server that are connected), at
        once.

        Of all, one that is removed meanwhile has no answer: it is none of them any more. Raises
        CallFailed, CallTimeout, InstanceLost.
        """

        async def run(name: str) -> list[memoryview] | None:
            try:
                return await self._questions.run(name, method, payload, timeout_s)
            except InstanceRemoved:
                if instances is not None:
                    raise
                return None

        names = self.fleet.alive_here if instances is None else instances
        answers = await asyncio.gather(*map(run, names))
        found = zip(names, answers, strict=True)
        return {name: answer for name, answer in found if answer is not None}

    async def park(self) -> None:
        """Let all instances give their KV caches' memory back; those that have do nothing.

        Raises CallFailed, CallTimeout, InstanceLost; some may be parked then.
        """
        await self.call("park")

    async def unpark(self) -> None:
        """Let all that are parked compute as before, and show that they do. Raises as `park`."""
        await self.call("unpark")

    async def set_guarantee(self, instance: str, size: int) -> None:
        """What an instance gets back of its unit's KV cache whenever it wants it, bytes; 0: a fair
        part. Raises OrderFailed with the unit's own message, CallTimeout, InstanceLost."""
        try:
            self.fleet.endpoint(instance)
        except UnknownInstance as error:
            raise OrderFailed("unknown", str(error)) from error
        try:
            done, _ = await self._questions.call_instance(
                instance,
                lambda call_id: SetGuarantee(call_id, size),
                OrderDone,
                GUARANTEE_TIMEOUT_S,
                "SetGuarantee",
            )
        except InstanceRemoved as error:
            raise OrderFailed("unknown", str(error)) from error
        if done.refused:
            raise OrderFailed(done.refused, done.error)

    # -- requests

    def priority_of_call(self, asked: int) -> int:
        """See `requests.priority_of_call`."""
        return priority_of_call(asked)

    def is_tenants_call(self) -> bool:
        """See `requests.is_tenants_call`."""
        return is_tenants_call()

    def sequences_of_call(self) -> int:
        """See `requests.sequences_of_call`."""
        return sequences_of_call()

    async def submit(self, request: ClientRequest) -> str:
        """Send a new request to the instance that the policy picks, and return its name.

        Its payload is kept as long as it lives. Raises NoInstance, QuotaUsedUp, AnswerTooLarge.
        """
        # Dispatch asks for the marks, and so does the session's memory.
        marks = None if request.marks is None else cache(request.marks)
        call, search, allowance = current_call.get(), current_search.get(), None
        if call is not None:
            call.rendered()
            call.room.count_kept(0, request.prompt_logprobs, request.numbers)
            if call.room.full():
                raise AnswerTooLarge(answer_room.sentence())
        if self._quotas is not None and call is not None:
            prompt = search or request.external_id
            tokens, most = request.prompt_tokens, request.most_tokens
            if search is not None:  # whose first step has one beam, and its last one all
                tokens, most = tokens + search.width - 1, None
            allowance = await self._quotas.begin(call, prompt, tokens, most)
        arrived = self._clock()
        order = DispatchOrder(
            request.prompt_tokens,
            request.priority,
            Submit(request.request_id),
            request.payload,
            marks=marks,
            session=None if call is None else call.session,
            payer="" if call is None else call.payer,
        )
        await self.sessions.carry_ahead(order)
        if call is not None and call.tenant:
            await self._turns.wait(request.request_id, request.priority, call.tenant)
        instance = self.fleet.dispatch(order)
        self._table.add(
            LiveRequest(
                request_id=request.request_id,
                external_id=request.external_id,
                call_id=current_call_id() or call_of(request.external_id),
                splicer=StreamSplicer(instance),
                prompt_tokens=request.prompt_tokens,
                priority=request.priority,
                payload=request.payload,
                arrived=arrived,
                placed=self._clock(),
                call=call,
                allowance=allowance,
                search=search,
                whole=request.whole and search is None,
                logprobs=request.logprobs,
                marks=self._kept_marks(call, marks),
            )
        )
        return instance

    def _kept_marks(self, call: HttpCall | None, marks: PromptMarks | None) -> Sequence[int]:
        known = call is not None and call.session is not None and marks is not None
        return marks() if known and marks is not None else ()

    def _running_sessions(self) -> dict[int, int | None]:
        calls = (one.call for one in self._table if one.call is not None)
        return {one.session: one.session_name for one in calls if one.session is not None}

    async def abort(self, request_ids: Sequence[str], complete: bool = False) -> None:
        """End requests whose clients want no more. Unknown ids are ignored.

        complete: their clients have all that they wanted, up to a stop string.
        """
        requests = [self._table.live[one] for one in request_ids if one in self._table.live]
        for request in requests:
            if complete:
                self._streams.end(request)
            else:
                self._table.remove(request.request_id)
            self._streams.end_spread(request.request_id)
        self._ownership.abort(requests)

    def give_up(self, reason: str) -> None:
        """End all live requests, and those that wait for their turn: each client gets an error."""
        self._turns.give_up(reason)
        self._ownership.give_up(list(self._table), reason)

    def live(self) -> list[str]:
        """Ids of all requests that have not ended."""
        return list(self._table.live)

    @property
    def held(self) -> int:
        """Requests that wait for their turn to be sent to an instance."""
        return len(self._turns)

    async def requests(self) -> list[RequestRow]:
        """Rows of all live requests: ours in order of arrival, then those of other front ends.

        Instances that don't answer are left out.
        """
        told = await self._list_requests()
        ours = request_rows(self._table, {name: one.requests for name, one in told.items()})
        return [*ours, *(one.row for one in others_requests(told, self._name))]

    async def _list_requests(self) -> dict[str, ListedRequests]:
        """The requests of each fit instance; none of one that doesn't answer."""

        async def ask(instance: str) -> ListedRequests:
            try:
                told, _ = await self._questions.call_instance(
                    instance, ListRequests, ListedRequests, LIST_TIMEOUT_S, "ListRequests"
                )
            except (CallTimeout, InstanceLost) as error:
                log.warning("requests of instance %s are not listed: %s", instance, error)
                return ListedRequests(0, [])
            return told

        names = [name for name in self.fleet.alive if self.fleet.is_healthy(name)]
        return dict(zip(names, await asyncio.gather(*map(ask, names)), strict=True))

    # -- migrations by hand

    async def migrate(
        self,
        any_id: str,
        destination: str | None = None,
        timeout_s: float = 120.0,
        *,
        inexact: bool = False,
    ) -> MigrationReport:
        """Move a request, named by its own id or its call's, and wait for the report.

        destination: None: the one with the most room. inexact: also to an instance where its
        tokens may differ. Raises what `kvmig.asgi.errors` names when it can't start.
        """
        if not self._config.scheduler.migration:
            raise MigrationDisabled("migration is off: the server runs with --no-migration")
        if destination is not None:
            self.fleet.endpoint(destination)
        try:
            request = self._table.find(any_id)
        except UnknownRequest:
            found = find_other(others_requests(await self._list_requests(), self._name), any_id)
            if found is None:
                raise
            destination = destination or self.fleet.roomiest(found.row.instance, inexact)
            return await self._migrate_other(found, destination, timeout_s, inexact)
        source, run_id = request.instance, request.run_id
        if source is None:
            raise InstanceLost(f"request {any_id} has no instance now")
        if request.destination is not None and source != destination:
            raise AlreadyMigrating(f"request {any_id} is being moved to {request.destination}")
        destination = destination or self.fleet.roomiest(source, inexact)
        endpoint = self._check_places(any_id, source, destination)
        request.destination = destination
        try:
            answer, _ = await self._questions.call_instance(
                source,
                lambda call_id: Migrate(call_id, run_id, destination, endpoint, inexact),
                Migrated,
                timeout_s,
                "Migrate",
            )
        finally:
            if request.run_id == run_id:
                request.destination = None
        report = replace(answer.report, request_id=request.request_id)
        if report.reason == "already_migrating":
            raise AlreadyMigrating(f"request {any_id} is being moved already")
        if report.reason == "unknown_request" and request.request_id not in self._table.live:
            raise RequestFinished(f"request {any_id} has finished")
        return report

    async def _migrate_other(
        self, found: OthersRequest, destination: str, timeout_s: float, inexact: bool
    ) -> MigrationReport:
        """Move a request of another front end, which learns of it from the instances."""
        request_id, source = found.row.id, found.row.instance
        endpoint = self._check_places(request_id, source, destination)
        answer, _ = await self._questions.call_instance(
            source,
            lambda call_id: Migrate(call_id, found.run_id, destination, endpoint, inexact),
            Migrated,
            timeout_s,
            "Migrate",
        )
        if answer.report.reason == "already_migrating":
            raise AlreadyMigrating(f"request {request_id} is being moved already")
        if answer.report.reason == "unknown_request":
            raise RequestFinished(f"request {request_id} has finished")
        return replace(answer.report, request_id=request_id)

    def _check_places(self, any_id: str, source: str, destination: str) -> str:
        """The destination's endpoint, if both instances can take part."""
        if source == destination:
            raise SameInstance(f"request {any_id} runs on instance {destination} already")
        for instance in (source, destination):
            if instance not in self.fleet.alive:
                raise InstanceLost(f"instance {instance} is not connected")
        return self.fleet.endpoint(destination)

    # -- what comes from instances: see `Listener`

    def on_message(
        self, instance: InstanceConnection, message: RpcMessage, payload: list[memoryview]
    ) -> None:
        if instance.health is not None:
            instance.health.record_message()
        match message:
            case Outputs():
                for span, item in self._streams.deliver_outputs(instance.name, message, payload):
                    self._splice(instance.name, span, item)
                if self._streams.too_large:
                    self._end_too_large()
            case LoadReport():
                self.fleet.report(message)
                self._observer.messages_refused(message.instance, message.refused)
                self._turns.grant_turns()
            case CallDone() | ListedRequests() | Fenced() | OrderDone():
                self._questions.answer(message.call_id, message, payload)
            case Migrated():
                self._migrated(message, payload)
            case PauseAhead():
                request = self._table.runs.get(message.request_id)
                if request is not None and request.owner == instance.name:
                    pause_s, stretch_s = message.pause_ms / 1e3, message.stretch_ms / 1e3
                    self._streams.spread(request.request_id, instance.index, pause_s, stretch_s)
            case Overrun():
                instance.drop(f"instance {instance.name} had more to say than was read here")
            case Resolve():
                self._tasks.start(self._resolve(instance.name, message))
            case _:
                log.warning("instance %s sent %s", instance.name, type(message).__name__)
                self.refused(PeerError(f"{type(message).__name__} isn't for a front end"))

    def on_lost(self, instance: InstanceConnection, reason: str) -> None:
        self.fleet.forget(instance)
        log.warning("connection to instance %s: %s", instance.name, reason)
        reason = f"instance {instance.name} is lost"
        self._questions.lost(instance.name, reason)
        self.sessions.lost(instance.name)
        self._ownership.lost(instance.name, reason)

    def _splice(self, instance: str, span: OutputSpan, item: OutputItem) -> None:
        """Take an output that isn't just what comes next in its stream."""
        if span.epoch < 0:
            return  # aborted there before it came out: nobody's
        request = self._table.runs.get(span.request_id)
        if request is None:
            self._ownership.stop_unknown_output(instance, span, item.finished)
            return
        for action in self._streams.splice(request, instance, span, item):
            self._ownership.act(request, action)

    def _end_unpaid(self, outputs: Sequence[Output], allowance: TokenAllowance[Output]) -> None:
        """A client that would get nothing before the last token gets what is paid for."""
        runs = [self._table.runs.get(span.request_id) for _, span, _ in outputs]
        requests = list({one.request_id: one for one in runs if one is not None}.values())
        paid = bool(allowance.output) and not allowance.away
        whole = [one for one in requests if one.whole and paid]
        self._streams.finish(whole)
        self._ownership.abort(whole)
        rest = [one for one in requests if one not in whole]
        self._ownership.give_up(rest, allowance.refused, "retry" if allowance.away else "quota")

    def _migrated(self, message: Migrated, payload: list[memoryview]) -> None:
        """Take the report of a migration, by hand or by policy, of any front end's request."""
        report, request = message.report, self._table.runs.get(message.report.request_id)
        if report.reason not in _NEVER_BEGAN:
            if self._traces is not None:
                self._traces.migrated(report)
            if request is not None:
                report = replace(report, request_id=request.request_id)
            self.reports.append(report)
            self.reported += 1
            if message.front in ("", self._name):
                self._observer.migrated(report, None if request is None else request.priority)
        self.sessions.take_report(report)
        self._questions.answer(message.call_id, message, payload)
        if request is None:
            return
        if report.state == "aborted":
            self._streams.end_spread(request.request_id)
        if report.state == "committed":
            self._ownership.moved(request, report.destination, report.epoch, message.epoch)
        if report.reason == "orphaned":
            self._ownership.run_again([request], report.detail)

    async def _resolve(self, source: str, question: Resolve) -> None:
        """Answer a source whose Commit got no answer: whether it shall free its copy.

        The same question gets the same answer, however often it is asked.
        """
        owner = self._ownership.owner(question)
        if owner is None:
            key = (question.request_id, question.epoch)
            if key not in self._fences:
                self._fences[key] = task = asyncio.create_task(self._fence(question))
                task.add_done_callback(lambda _: self._fences.pop(key))
            committed = await asyncio.shield(self._fences[key])
            owner = self._ownership.decide(question, committed)
        self._ownership.send_quietly(source, Resolved(question.mid, owner != "source"))

    async def _fence(self, question: Resolve) -> bool:
        """Forbid the destination to commit; whether it has committed."""
        destination = question.destination
        if not self.fleet.is_healthy(destination):
            # What it would say can't matter: from now on none of its tokens does.
            log.warning("request %s stays: %s is not fit", question.request_id, destination)
            return False
        try:
            answer, _ = await self._questions.call_instance(
                destination,
                lambda call_id: Fence(call_id, question.request_id, question.epoch),
                Fenced,
                self._fence_timeout_s,
                "Fence",
            )
        except (CallTimeout, InstanceLost, PeerError) as error:
            log.warning("request %s stays where it is: %s", question.request_id, error)
            return False
        return answer.committed

    # -- what goes wrong

    def refused(self, error: PeerError) -> None:
        """Count a message that this front end can't take."""
        self._refusals.count(error)
        self._observer.messages_refused(self._name, self._refusals.counts())

    def messages_refused(self, process: str, counts: Mapping[str, int]) -> None:
        """Record the messages that a process has refused since its start, by reason."""
        self._observer.messages_refused(process, counts)

    async def _watch(self) -> None:
        """Look again and again for silent instances, and for tokens that never come."""
        while True:
            await asyncio.sleep(self.fleet.tick_s)
            self._look()

    def _look(self) -> None:
        """Look at everything. A part that fails is logged and keeps no other part back: else one
        request that a part can't deal with would be in the way of all others."""
        for part in (
            self.fleet.tick,
            self._run_overdue_again,
            self._give_up_unread,
            self._end_too_large,
            self._ownership.tick,
            self._turns.grant_turns,
        ):
            try:
                part()
            except Exception:
                log.exception("a look at the instances failed")

    def _run_overdue_again(self) -> None:
        long_ago = self._clock() - HOLD_S
        overdue = [one for one in self._table if one.splicer.waits_since(long_ago)]
        self._ownership.run_again(overdue, "tokens of its last owner were lost")

    def _is_fresh(self, request_id: str) -> bool:
        request = self._table.live.get(request_id)
        return request is not None and request.first_at is None

    def _give_up_unread(self) -> None:
        most = self._config.http.max_unread
        if not most:
            return
        unread = [one for one in self._table if one.call and one.call.unread(one) > most]
        reason = f"its client has not read for more than {most} tokens (--max-unread)"
        self._ownership.give_up(unread, reason, "final")
        for _ in unread:
            self._observer.unread()

    def _end_too_large(self) -> None:
        """Calls of whose answers more is kept than may be end with an error."""
        live: defaultdict[HttpCall, list[LiveRequest]] = defaultdict(list)
        for one in self._table:
            if one.call is not None:
                live[one.call].append(one)
        self._streams.too_large.clear()
        for call, requests in live.items():
            if call.has_too_much(requests):
                self._ownership.give_up(requests, answer_room.sentence(), "refused")
