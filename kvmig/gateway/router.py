"""The heart of the front end: which instance runs a request, and whose tokens its client gets."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence

from kvmig.controlplane.messages import (
    CallDone,
    Discard,
    Fenced,
    LoadReport,
    Migrated,
    Outputs,
    Overrun,
    PauseAhead,
    Requests,
    Resolve,
    Resolved,
    Submit,
)
from kvmig.controlplane.policy import policy_of
from kvmig.gateway.arbiter import FENCE_TIMEOUT_S, Arbiter
from kvmig.gateway.caller import current_caller
from kvmig.gateway.calls import Calls
from kvmig.gateway.endings import Endings
from kvmig.gateway.errors import UnknownRequest
from kvmig.gateway.fleet import Fleet
from kvmig.gateway.foreign import find_foreign, foreign_requests
from kvmig.gateway.inventory import InstanceRow, RequestRow, request_rows
from kvmig.gateway.links import Link
from kvmig.gateway.migrations import Migrations
from kvmig.gateway.ports import Decode, Observer, Sink, Unobserved
from kvmig.gateway.questions import Questions
from kvmig.gateway.readers import Readers
from kvmig.gateway.recovery import Recovery
from kvmig.gateway.request_id import current_call
from kvmig.gateway.requests import Entry, RequestTable, call_of
from kvmig.gateway.splice import Action, Broken, Splicer, Stale, Switched
from kvmig.gateway.spreading import Spreading
from kvmig.gateway.strays import Strays
from kvmig.gateway.streams import Streams
from kvmig.ground.clock import Clock, monotonic
from kvmig.ground.config import ClusterConfig
from kvmig.ground.errors import PeerError
from kvmig.kvtransfer.messages import Message
from kvmig.kvtransfer.report import MigrationReport
from kvmig.kvtransfer.wire import Frame, Refusals

HOLD_S = 10.0
"""Longest wait for an old owner's tokens while the new one's are there."""
TICK_S = 0.2
"""Between two looks for what nobody tells of."""

log = logging.getLogger(__name__)


class Router:
    """Engine-agnostic. Make, use and close it inside one running event loop.

    Requests run again elsewhere when their instance is lost or ails, see `Recovery`.
    """

    def __init__(
        self,
        name: str,
        secret: bytes,
        config: ClusterConfig,
        sink: Sink,
        decode: Decode,
        *,
        observer: Observer | None = None,
        clock: Clock = monotonic,
        lost_after_s: float = 10.0,
        fence_timeout_s: float = FENCE_TIMEOUT_S,
    ) -> None:
        self._name = name
        self._observer = observer or Unobserved()
        self._clock = clock
        self._table = RequestTable()
        self.readers = Readers(config.http.max_unread)
        self._calls = Calls()
        silent_after_s = config.faults.silent_after_s
        tick_s = min(TICK_S, silent_after_s / 4)
        self._fleet = Fleet(
            name,
            secret,
            policy_of(config.scheduler),
            clock,
            silent_after_s,
            lost_after_s,
            tick_s,
            self,
        )
        self._spreading = Spreading(sink, clock)
        self._endings = Endings(self._table, self._fleet, self._spreading)
        self._strays = Strays(self._endings.tell)
        self._recovery = Recovery(
            self._table,
            self._fleet,
            self._endings,
            self._observer,
            clock,
            config.faults,
            config.scheduler.inexact_moves,
        )
        self._questions = Questions(self._calls, self._fleet)
        self._arbiter = Arbiter(
            self._table, self._calls, self._fleet.send, self._fleet.fit, fence_timeout_s
        )
        self._migrations = Migrations(
            self._table, self._calls, self._fleet, self._observer, config.scheduler.migration, name
        )
        self._streams = Streams(
            self._table,
            self._spreading,
            decode,
            self._fleet.index,
            self._act,
            self._strays.stop,
            self._observer,
            self._fleet.arithmetic,
        )
        self._refusals = Refusals()
        self._tasks: set[asyncio.Task[None]] = set()
        self._start(self._watch(tick_s))

    async def close(self) -> None:
        """Disconnect from all; nothing is delivered any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._spreading.close()
        await self._arbiter.close()
        await self._fleet.close()

    # -- instances

    async def add_instance(
        self, instance: str, endpoint: str, timeout_s: float = 30.0, index: int | None = None
    ) -> bytes:
        """Connect; returns the engine's description (`Welcome.engine`).

        index: its engine index; None: the number of instances added before, or that of an
        earlier one of its name. Raises InstanceLost, and ValueError if there is one of that
        name.
        """
        return await self._fleet.add(instance, endpoint, timeout_s, index)

    async def remove_instance(self, instance: str, *, crashed: bool = False) -> None:
        """Disconnect for good; requests that it still runs run again elsewhere.

        crashed: its process has died, maybe of one of them. Unknown ones are ignored.
        """
        if await self._fleet.remove(instance):
            reason = f"instance {instance} {'has died' if crashed else 'was removed'}"
            self._calls.lost(instance, reason)
            self._recovery.removed(instance, reason, crashed=crashed)

    def silence_s(self) -> dict[str, float]:
        """For how long each connected instance has said nothing, in seconds."""
        return self._fleet.silence_s()

    def vacant(self) -> bool:
        """Whether no instance is connected, so that new requests can't be taken."""
        return not self._fleet.alive

    def waiting(self, priority: int) -> int:
        """Requests in instances' queues, of any front end, that aren't after this priority."""
        return self._fleet.waiting(priority)

    def evacuate(self, instance: str, *, ends: bool = False) -> None:
        """What still runs there shall go on elsewhere, by recompute.

        ends: what no other instance has the weights of ends with an error.
        """
        self._recovery.evacuate(instance, ends=ends)

    def prefer(self, weights: str) -> None:
        """New requests had better begin under these; empty: no matter which."""
        self._fleet.preferred = weights

    def instances(self) -> list[InstanceRow]:
        """All instances as last heard of, in the order in which they were added."""
        return self._fleet.rows()

    def engine_indexes(self) -> dict[int, str]:
        """Instance by engine index, those that are gone included."""
        return self._fleet.engine_indexes()

    async def call(
        self,
        method: str,
        payload: Sequence[Frame] = (),
        instances: Sequence[str] | None = None,
        timeout_s: float = 60.0,
    ) -> dict[str, list[memoryview]]:
        """Run an engine method on `instances` (default: all that are connected), at once.

        Raises CallFailed, CallTimeout, InstanceLost.
        """
        names = self._fleet.alive if instances is None else instances
        return await self._questions.run(names, method, payload, timeout_s)

    # -- requests

    async def submit(
        self,
        request_id: str,
        external_id: str,
        prompt_tokens: int,
        priority: int,
        payload: Sequence[Frame],
    ) -> str:
        """Send a new request to the instance that the policy picks, and return its id.

        The payload is kept as long as the request lives. Raises NoInstance.
        """
        instance = self._fleet.dispatch(prompt_tokens, priority, Submit(request_id), payload)
        self._table.add(
            Entry(
                request_id=request_id,
                external_id=external_id,
                call_id=current_call.get() or call_of(external_id),
                splicer=Splicer(instance),
                prompt_tokens=prompt_tokens,
                priority=priority,
                payload=payload,
                arrived=self._clock(),
                caller=current_caller.get(),
            )
        )
        return instance

    async def abort(self, request_ids: Sequence[str], complete: bool = False) -> None:
        """These are not wanted any more. Unknown ids are ignored.

        complete: their clients have all that they wanted, up to a stop string.
        """
        entries = [self._table.entries[one] for one in request_ids if one in self._table.entries]
        for entry in entries:
            if complete:
                self._streams.ended(entry)
            else:
                self._table.remove(entry.request_id)
            self._spreading.end(entry.request_id)
        self._endings.abort(entries)

    def give_up(self, reason: str) -> None:
        """End all live requests: each client gets an error."""
        self._endings.give_up(list(self._table), reason)

    def live(self) -> list[str]:
        """Ids of all requests that have not ended."""
        return list(self._table.entries)

    async def requests(self) -> list[RequestRow]:
        """All live requests: ours in order of arrival, then those of other front ends.

        Instances that don't answer are left out.
        """
        told = await self._questions.requests()
        ours = request_rows(self._table, {name: one.requests for name, one in told.items()})
        return [*ours, *(one.row for one in foreign_requests(told, self._name))]

    async def migrate(
        self,
        request_id: str,
        destination: str,
        timeout_s: float = 120.0,
        *,
        inexact: bool = False,
    ) -> MigrationReport:
        """Move a request, named by its own id or its call's, and wait for the report.

        inexact: also to an instance where its tokens may differ. Raises what
        `kvmig.gateway.errors` names when it can't start.
        """
        try:
            return await self._migrations.migrate(request_id, destination, timeout_s, inexact)
        except UnknownRequest:
            told = foreign_requests(await self._questions.requests(), self._name)
            found = find_foreign(told, request_id)
            if found is None:
                raise
            return await self._migrations.migrate_foreign(found, destination, timeout_s, inexact)

    @property
    def reports(self) -> deque[MigrationReport]:
        """The last 1000 migrations, whoever asked for them, oldest first."""
        return self._migrations.reports

    # -- what comes over the links

    def on_message(self, link: Link, message: Message, payload: list[memoryview]) -> None:
        """See `Listener`."""
        self._fleet.heard(link.instance)
        match message:
            case Outputs():
                if not payload:
                    raise PeerError(f"{link.instance} sent outputs without items", "unusable")
                self._streams.take(link.instance, message, payload, self._clock())
            case LoadReport():
                self._fleet.report(message)
                self.messages_refused(message.instance, message.refused)
            case CallDone() | Requests() | Fenced():
                self._calls.answer(message.call_id, message, payload)
            case Migrated():
                self._migrated(message, payload)
            case PauseAhead():
                self._spread(link.instance, message)
            case Overrun():
                link.drop(f"instance {link.instance} had more to say than was read here")
            case Resolve():
                self._start(self._resolve(link.instance, message))
            case _:
                log.warning("instance %s sent %s", link.instance, type(message).__name__)
                self.refused(PeerError(f"{type(message).__name__} isn't for a front end"))

    def on_refused(self, link: Link, error: PeerError) -> None:
        """See `Listener`."""
        self.refused(error)

    def refused(self, error: PeerError) -> None:
        """Count a message that this front end can't take, whoever sent it."""
        self._refusals.count(error)
        self.messages_refused(self._name, self._refusals.told())

    def messages_refused(self, process: str, counts: Mapping[str, int]) -> None:
        """So many a process has refused since its start, by reason."""
        self._observer.messages_refused(process, counts)

    def on_lost(self, link: Link, reason: str) -> None:
        """See `Listener`."""
        self._fleet.forget(link.instance)
        log.warning("connection to instance %s: %s", link.instance, reason)
        reason = f"instance {link.instance} is lost"
        self._calls.lost(link.instance, reason)
        self._recovery.lost(link.instance, reason)

    def _migrated(self, message: Migrated, payload: list[memoryview]) -> None:
        entry = self._migrations.ended(message)
        self._calls.answer(message.call_id, message, payload)
        report = message.report
        if entry is not None and report.state == "aborted":
            self._spreading.end(entry.request_id)
        if entry is not None and report.state == "committed":
            self._recovery.moved(entry, report.destination, report.epoch, message.epoch)
        if entry is not None and report.reason == "orphaned":
            self._recovery.run_again([entry], report.detail)

    def _spread(self, source: str, pause: PauseAhead) -> None:
        entry = self._table.runs.get(pause.request_id)
        if entry is not None and entry.owner == source:
            index = self._fleet.index(source)
            pause_s, stretch_s = pause.pause_ms / 1e3, pause.stretch_ms / 1e3
            self._spreading.begin(entry.request_id, index, pause_s, stretch_s)

    async def _resolve(self, source: str, question: Resolve) -> None:
        moved = await self._arbiter.moved(question)
        self._endings.tell(source, Resolved(question.mid, moved))

    def _act(self, entry: Entry, action: Action) -> None:
        match action:
            case Stale(instance, epoch):
                if self._endings.tell(instance, Discard(entry.run_id, epoch)):
                    entry.splicer.told(action)
            case Switched(_, _, epoch, gap_s):
                entry.reached(epoch)
                self._observer.switched(gap_s)
            case Broken(reason):
                self._recovery.run_again([entry], reason)

    # -- small things

    @property
    def block_tokens(self) -> int:
        """Tokens a KV block, as load reports count; whoever knows it sets it."""
        return self._fleet.block_tokens

    @block_tokens.setter
    def block_tokens(self, tokens: int) -> None:
        self._fleet.block_tokens = tokens

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_coro(), exc_info=error)

    async def _watch(self, period_s: float) -> None:
        """Find out what nobody tells: silent instances, and tokens that never come."""
        while True:
            await asyncio.sleep(period_s)
            try:
                self._look()
            except Exception:  # without it no silent instance would ever be found
                log.exception("a look at the instances failed")

    def _look(self) -> None:
        self._fleet.tick()
        long_ago = self._clock() - HOLD_S
        overdue = [one for one in self._table if one.splicer.waits_since(long_ago)]
        self._recovery.run_again(overdue, "tokens of its last owner were lost")
        self._give_up_unread()
        self._recovery.tick()

    def _give_up_unread(self) -> None:
        unread = self.readers.overdue(self._table.entries)
        if unread:
            most = self.readers.max_unread
            reason = f"its client has not read for more than {most} tokens (--max-unread)"
            self._endings.give_up(unread, reason, retry=False)
            for _ in unread:
                self._observer.unread()
