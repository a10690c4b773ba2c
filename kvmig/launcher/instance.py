"""One instance's life: started, started again when it dies, drained, ended."""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from msgspec.structs import replace

from kvmig.controlplane.front_messages import SessionsCarried
from kvmig.controlplane.messages import (
    ClusterMember,
    ClusterMessage,
    LoadReport,
    MemberState,
    OrderRefused,
    SetState,
)
from kvmig.controlplane.session_carriage import sentence_of
from kvmig.core.api_records import DRAIN_ENDED
from kvmig.core.background import cancel_tasks
from kvmig.core.errors import StartupError, TransportError
from kvmig.launcher.launch import LlumletLaunch, LlumletLauncher
from kvmig.process.child import say
from kvmig.process.hung_process import describe_hang
from kvmig.process.supervisor import ProcessHandle, deaths_in_a_row, first_of, restart_pause
from kvmig.rpc.codec import RefusalCounter
from kvmig.rpc.zmq_sockets import RpcClient

log = logging.getLogger(__name__)

RETRY_S = 0.5
"""Pause between two attempts to connect."""
TICK_S = 1.0
SILENT_TICKS = 10
"""Ticks without a report until a llumlet is ended. Ticks, not seconds: when this process was
held up itself, reports wait for it."""
POLL_S = 0.05
"""Pause between two looks at whether a draining instance is empty."""
SETTLE_S = 0.5
"""Time for messages to arrive that were sent to an instance before it drained."""
RENEWED = "it was ordered to start again"
TURN = "starts again when its turn comes"
"""Detail of one that serves, and is to start again."""
REPORT_S = 1.0
"""Time beyond the deadline for front ends to report what they could not move of sessions."""
EVACUATE_S = 2.0
"""Time between two calls to run again elsewhere what a drain hasn't moved by its deadline."""


class DrainDeadline(NamedTuple):
    """When a drain's requests go on elsewhere by recompute."""

    seconds: float
    ends: bool = False
    """Whether requests whose weights no other instance has end then."""


class EngineStart(NamedTuple):
    """The build and the flags with which an instance's engine starts."""

    tree: str
    argv: tuple[str, ...]
    own: tuple[str, ...]
    """The flags that not all instances have."""

    @classmethod
    def from_launch(cls, launch: LlumletLaunch) -> EngineStart:
        """Build and flags of its present start."""
        return cls(launch.engine_tree, tuple(launch.engine_argv), launch.own_flags)

    def applied_to(self, launch: LlumletLaunch) -> LlumletLaunch:
        """The same instance, started so."""
        return replace(
            launch, engine_tree=self.tree, engine_argv=list(self.argv), own_flags=self.own
        )


class InstanceOwner(Protocol):
    """What an instance needs of all the others: `kvmig.launcher.cluster.InstanceManager`."""

    @property
    def refusals(self) -> RefusalCounter:
        """Counts the messages that the launcher refuses."""

    def changed(self) -> None:
        """Report the members: the instance has another state."""

    def remove_instance(self, instance: ManagedInstance) -> None:
        """Take the instance out: it is empty or dead."""

    def others_serve(self, instance: ManagedInstance) -> bool:
        """Whether there is another one that its requests can go to."""

    async def carry_sessions(self, instance: ManagedInstance, within_s: float) -> SessionsCarried:
        """Let its idle sessions go to others within that time; what went, and what didn't."""

    def evacuate(self, instance: ManagedInstance, *, ends: bool) -> None:
        """Let its requests go on elsewhere. ends: those that no other instance has the weights of
        end with an error."""


class ManagedInstance:
    """One instance, restarted whenever it dies, until `close` or until it is given up.

    It isn't a `KeptChild`: an instance may be on another host, is given up after a failed first
    start or too many deaths, starts again as another engine and falls back, and reports its load in
    place of heartbeats. Both count deaths and pause by the same rules (`process.supervisor`).
    """

    def __init__(
        self, launch: LlumletLaunch, workers: int, launcher: LlumletLauncher, cluster: InstanceOwner
    ) -> None:
        """launch, workers: for `launcher.llumlet`, at each start of its process."""
        self.name = launch.instance
        self.state: MemberState = "starting"
        self.first_start: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the first start failed; empty if it didn't."""
        self._launch = launch
        self._workers = workers
        self._launcher = launcher
        self._config = launch.config
        self._cluster = cluster
        self._detail = ""
        self._endpoint = ""
        self._served_s = 0.0
        """How long its last process served."""
        self._link: LlumletLink | None = None
        self._wanted = SetState("serving")
        self._leaving = False
        self._renewing: asyncio.Future[str] | None = None
        """Result of its restart: empty, or why it failed."""
        self._next = EngineStart.from_launch(launch)
        """What it will be when its process has started again by order."""
        self._fallback: LlumletLaunch | None = None
        """What it was before, until it has served as what it is now."""
        self._ordered = False
        """Whether its process ends, or has ended, by order."""
        self._empty = asyncio.Event()
        """Set when its process shall end now, and start again."""
        self._deadline, self._ends = 0.0, False
        self._readers_until = 0.0
        """When its end no longer waits for other engines that are to read its blocks."""
        self._sessions_until = 0.0
        """When its process ends though idle sessions may be left."""
        self._draining: asyncio.Task[None] | None = None
        self._closing = False
        self._task = asyncio.create_task(self._run(), name=f"instance {self.name}")

    @property
    def member(self) -> ClusterMember:
        """The instance as other processes know it."""
        launch = self._launch
        return ClusterMember(
            self._config.public_name(self.name),
            self._endpoint,
            self.state,
            self._detail,
            launch.engine_tree,
            launch.unit,
            self._ordered,
            launch.node,
            shlex.join(launch.own_flags),
        )

    async def close(self) -> None:
        """End the instance at once. May be called twice, and by several callers."""
        if not self._closing:
            self._closing = True
            self._task.cancel()
            if self._draining is not None:
                self._draining.cancel()
        self._renewed("it was taken out")
        await asyncio.wait([self._task])

    @property
    def _report(self) -> LoadReport | None:
        """The last one of its present process."""
        return None if self._link is None else self._link.report

    @property
    def weights(self) -> str:
        """The identity of its weights, once its process has reported it; empty before."""
        return "" if self._report is None else self._report.weights

    def drain(self, deadline: DrainDeadline, leave: bool) -> None:
        """Let its requests go elsewhere; called again: with this deadline.

        leave: then take it out of the cluster. Raises OrderRefused.
        """
        if self.state not in ("serving", "draining"):
            raise OrderRefused("conflict", f"instance {self.name} is {self.state}")
        self._leaving = self._leaving or leave
        self._deadline, self._ends = _now() + deadline.seconds, deadline.ends
        self._sessions_until = self._deadline + REPORT_S
        self._readers_until = self._deadline
        self._want("draining", "ends when it is empty" if self._leaving else "")
        if self._draining is None or self._draining.done():
            self._draining = asyncio.create_task(self._drain(), name=f"drain of {self.name}")

    def restart(
        self,
        deadline: DrainDeadline,
        tree: str | None = None,
        argv: Sequence[str] = (),
        own: tuple[str, ...] | None = None,
    ) -> asyncio.Future[str]:
        """Move its requests away, then start it again. The result is "" once it serves, else why
        it doesn't.

        tree: folder of its next engine; None: the present one. own: its next flags, after `argv`,
        which all instances have; None: the present ones. If it can't start with these, it starts
        as it was. Raises OrderRefused.
        """
        self.drain(deadline, leave=False)
        self._next = EngineStart.from_launch(self._launch)
        if tree is not None:
            self._next = self._next._replace(tree=tree)
        if own is not None:
            self._next = self._next._replace(argv=(*argv, *own), own=own)
        self._renewed("it was ordered again")
        self._renewing = asyncio.get_running_loop().create_future()
        self._want("draining", "starts again when it is empty")
        return self._renewing

    def await_turn(self) -> None:
        """Show that it is to start again; it serves until `restart`."""
        self._set(self.state, TURN)

    def leave_turn(self) -> None:
        """Show no more that it is to start again; without effect once its turn has come."""
        if self._detail == TURN:
            self._set(self.state, "")

    def leave_last(self) -> None:
        """End the last instance once nothing runs on it; it serves until then."""
        self._leaving = True
        self._want("serving", "ends when it is empty")
        if self._draining is None or self._draining.done():
            self._draining = asyncio.create_task(self._leave_last(), name=f"end of {self.name}")

    async def let_read(self, within_s: float) -> None:
        """Wait until other engines have read the blocks that it keeps for them, at most that long.

        Nothing new comes to it. What has just ended is reported in a moment.
        """
        self._readers_until = _now() + within_s
        settled = _now() + min(within_s, SETTLE_S)
        while self._held() and _now() < settled:  # noqa: ASYNC110 - its reports are no events
            await asyncio.sleep(POLL_S)
        await self._let_read()

    def stop_drain(self) -> None:
        """End the instance's drain: it serves again. Raises OrderRefused."""
        if self._draining is None or not (self.state == "draining" or self._leaving):
            raise OrderRefused("conflict", f"instance {self.name} is {self.state}, not draining")
        self._draining.cancel()
        self._leaving = False
        self._renewed("it was ordered to serve on")
        self._want("serving", "")

    # -- its process

    async def _run(self) -> None:
        deaths, most = 0, self._config.lifecycle.max_restarts
        while True:
            try:
                how = await self._live()
            except StartupError as error:
                how = str(error)
            except Exception as error:  # else nobody would start it again, or hear of it
                log.exception("instance %s", self.name)
                how = f"its launcher failed: {error!r}"
            if self._leaving:
                self._cluster.remove_instance(self)
                return
            if how == RENEWED:
                self._become_next()
                continue
            if self._fallback is not None:  # it has never served so
                self._fall_back(how)
                continue
            if not self.first_start.done():  # it would fail in the same way again
                self._set("failed", how)
                self.first_start.set_result(how)
                return
            deaths = deaths_in_a_row(deaths, self._served_s)
            if deaths > most:
                how = f"{how}, after {most} restarts" if most else how
                say(f"instance {self.name} is given up ({how})")
                self._set("failed", how)
                self._renewed(how)
                return
            pause_s = restart_pause(deaths)
            say(f"instance {self.name} is gone ({how}), again in {pause_s:g} s")
            self._set("starting", f"it was gone ({how})")
            await asyncio.sleep(pause_s)

    def _become_next(self) -> None:
        before, then = self._launch, self._next
        engine = ""
        if then != EngineStart.from_launch(before):
            self._launch, self._fallback = then.applied_to(before), before
            flags = f", with {shlex.join(then.own) or 'no flags of its own'}"
            engine = flags if then.own != before.own_flags else f", with {_engine(then.tree)}"
        say(f"instance {self.name} starts again, as ordered{engine}")

    def _fall_back(self, how: str) -> None:
        assert self._fallback is not None
        tried, self._launch, self._fallback = self._launch, self._fallback, None
        before = self._launch
        failed = f"it can't start with {shlex.join(tried.own_flags)} ({how}), and is as before"
        if tried.engine_tree != before.engine_tree:
            now = _engine(before.engine_tree)
            failed = f"it can't be {_engine(tried.engine_tree)} ({how}), and is {now} again"
        say(f"instance {self.name}: {failed}")
        self._renewed(failed)

    async def _live(self) -> str:
        """Run the process from start to death; how it ended. Raises StartupError."""
        began, self._served_s = _now(), 0.0
        say(f"instance {self.name} starts")
        handle = await self._launcher.llumlet(self._launch, self._workers)
        link: LlumletLink | None = None
        try:
            endpoint = await handle.ready(self._config.start_timeout_s)
            say(f"instance {self.name} is ready ({_now() - began:.0f} s)")
            link = self._link = LlumletLink(
                self.name, endpoint, self._launch.secret, self._cluster.refusals
            )
            self._endpoint, ready, self._ordered = endpoint, _now(), False
            self._fallback = None
            self._want(self._wanted.state, "")
            if not self.first_start.done():
                self.first_start.set_result("")
            self._empty.clear()
            if self._wanted.state == "serving":
                self._renewed("")
            how = await first_of(handle.ended(), link.silent(handle.pid), self._to_renew())
            self._served_s = _now() - ready
            self._ordered = how == RENEWED
            return how
        finally:
            self._keep_guarantee()
            self._link, self._endpoint = None, ""
            self._set("starting", RENEWED if self._ordered else "its process is gone")
            await self._end(link, handle)

    def _keep_guarantee(self) -> None:
        """Let the next process ask of its unit what this one was ordered to ask."""
        config, shared = self._launch.config, None if self._report is None else self._report.shared
        if shared is None or shared.asked is None or config.unit is None:
            return
        unit = replace(config.unit, guarantee=shared.asked)
        self._launch = replace(self._launch, config=replace(config, unit=unit))

    async def _end(self, link: LlumletLink | None, handle: ProcessHandle) -> None:
        """End the process in any case: one that hangs would keep its memory."""

        async def end() -> None:
            if link is not None:
                await link.close()
            await handle.stop()

        ending = asyncio.create_task(end(), name=f"end of {self.name}")
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await asyncio.wait([ending])
            raise

    # -- draining

    async def _drain(self) -> None:
        first = self._carry_sessions()
        try:
            await self._empty_out(first)
        finally:
            await cancel_tasks(first)
        await self._let_read()
        # Turns that have ended here meanwhile go now; what the last report has left stays.
        last = self._carry_sessions()
        try:
            await asyncio.wait([last], timeout=max(REPORT_S, self._sessions_until - _now()))
        finally:
            await cancel_tasks(last)
        begun, ended = _carried(first), _carried(last)
        sentence = sentence_of(
            SessionsCarried(begun.moved + ended.moved, begun.bytes + ended.bytes, ended.stayed)
        )
        if sentence:
            say(f"instance {self.name}: {sentence}")
        if self._leaving:
            self._cluster.remove_instance(self)
        elif self._renewing is not None:
            self._wanted = SetState("serving")
            self._empty.set()
        else:
            self._set("draining", f"{DRAIN_ENDED}; {sentence}" if sentence else DRAIN_ENDED)

    def _carry_sessions(self) -> asyncio.Task[SessionsCarried]:
        within_s = max(0.0, self._sessions_until - REPORT_S - _now())
        carrying = self._cluster.carry_sessions(self, within_s)
        return asyncio.create_task(carrying, name=f"sessions of {self.name}")

    async def _empty_out(self, carrying: asyncio.Task[SessionsCarried]) -> None:
        """Wait until nothing runs on it, and its idle sessions have gone, as far as they could."""
        said = False
        while not (self._may_rest() and (carrying.done() or _now() >= self._sessions_until)):
            late = _now() >= self._deadline and self._says("draining")
            if late and self._cluster.others_serve(self):
                if not said:
                    left = "or ends with an error" if self._ends else "or stays until it ends"
                    say(
                        f"instance {self.name}: what is left goes on elsewhere by recompute, {left}"
                        " where no other instance has its weights"
                    )
                said = True
                self._cluster.evacuate(self, ends=self._ends)
                self._deadline = _now() + EVACUATE_S
            await asyncio.sleep(POLL_S)

    async def _leave_last(self) -> None:
        """Drain the only instance, for which no other can take what comes: only when it is empty,
        and it serves again where something came meanwhile."""
        while True:
            while self._held() != 0:  # noqa: ASYNC110 - its reports are no events
                await asyncio.sleep(POLL_S)
            self._readers_until = _now() + self._config.lifecycle.drain_deadline_s
            await self._let_read()
            self._want("draining", "ends when it is empty")
            while not self._says("draining"):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            await asyncio.sleep(SETTLE_S)
            if self._held() == 0:
                await self._let_read()  # of what came since it was empty
                self._cluster.remove_instance(self)
                return
            self._want("serving", "ends when it is empty")

    async def _let_read(self) -> None:
        """Wait for other engines that are to read its blocks; its end would fail their reads."""
        if not self._unread:
            return
        whose = f"KV blocks of {self._unread} ended requests"
        waits = f"waits until other engines have read {whose}"
        say(f"instance {self.name} {waits}, {max(0.0, self._readers_until - _now()):.0f} s at most")
        self._set(self.state, waits)
        while self._unread and _now() < self._readers_until:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        if self._unread:
            say(f"instance {self.name}: {self._unread} of them were not read in time")

    @property
    def _unread(self) -> int:
        """Ended requests whose blocks other engines are to read, as last reported."""
        return 0 if self._report is None else self._report.load.unread

    async def _to_renew(self) -> str:
        await self._empty.wait()
        return RENEWED

    def _renewed(self, failed: str) -> None:
        """End a restart that is under way, if one is; failed: why, or empty."""
        if self._renewing is not None and not self._renewing.done():
            self._renewing.set_result(failed)
        self._renewing = None

    def _may_rest(self) -> bool:
        """Whether nothing is left on it, and nothing will come."""
        return self._says("draining") and self._held() == 0 and self._cluster.others_serve(self)

    def _held(self) -> int | None:
        """Requests and migrations on it, as last reported; None: nothing was.

        A migration counts until front ends know how it ended: they would take a request that has
        gone, and has no token there yet, for lost with this instance, and run it again.
        """
        report = self._report
        if report is None:
            return None
        load, moving = report.load, report.migrations_in + report.migrations_out
        return load.running + load.waiting + moving + report.untold

    def _says(self, state: str) -> bool:
        """Whether the llumlet reports that state itself: until then dispatch still sends requests
        there."""
        return self._report is not None and self._report.state == state

    def _want(self, state: Literal["serving", "draining"], detail: str) -> None:
        self._wanted = SetState(state)
        if self._link is not None:
            self._link.set_state(self._wanted)
        self._set(state, detail)

    def _set(self, state: MemberState, detail: str) -> None:
        self.state, self._detail = state, detail
        self._cluster.changed()


def _carried(carrying: asyncio.Task[SessionsCarried]) -> SessionsCarried:
    """The report of sessions that were to move; an empty one if none has come."""
    if carrying.cancelled():
        return SessionsCarried()
    if (error := carrying.exception()) is not None:
        log.error("%s could not be moved", carrying.get_name(), exc_info=error)
        return SessionsCarried()
    return carrying.result()


def _engine(tree: str) -> str:
    return f"the engine in {tree}" if tree else "the installed engine"


def _now() -> float:
    return asyncio.get_running_loop().time()


class LlumletLink:
    """The launcher's connection to a llumlet; make it inside a running event loop, `close` it.

    report: the last load report that came.
    """

    def __init__(
        self, instance: str, endpoint: str, secret: bytes, refusals: RefusalCounter
    ) -> None:
        """refusals: counts what is refused."""
        self.report: LoadReport | None = None
        self._instance = instance
        self._endpoint = endpoint
        self._secret = secret
        self._refusals = refusals
        self._client: RpcClient | None = None
        self._state: SetState | None = None
        self._silent_ticks = 0
        self._task = asyncio.create_task(self._run(), name=f"link to {instance}")

    def set_state(self, state: SetState) -> None:
        """Send the llumlet its state, again after every new connection."""
        self._state = state
        self._send_state()

    async def silent(self, pid: int) -> str:
        """Wait until it has reported nothing for long; returns the reason, and what `pid` does."""
        while self._silent_ticks < SILENT_TICKS:
            await asyncio.sleep(TICK_S)
            self._silent_ticks += 1
        reason = f"no report for {SILENT_TICKS * TICK_S:g} s"
        return await describe_hang(pid, reason)

    async def close(self) -> None:
        """Disconnect."""
        await cancel_tasks(self._task)

    async def _run(self) -> None:
        while True:
            client = RpcClient(
                self._endpoint,
                self._secret,
                "launcher",
                "launcher",
                ClusterMessage,
                refusals=self._refusals,
            )
            self._client = client
            try:
                self._send_state()
                async for message, _ in client.messages(f"instance {self._instance}"):
                    if isinstance(message, LoadReport):
                        self.report = message
                        self._silent_ticks = 0
            except TransportError as error:
                log.info("instance %s: %s", self._instance, error)
            finally:
                self._client = None
                client.close()
            await asyncio.sleep(RETRY_S)

    def _send_state(self) -> None:
        if self._client is None or self._state is None:
            return
        try:
            self._client.send(self._state)
        except TransportError as error:
            log.info("instance %s: %s", self._instance, error)  # told again when reconnected
