"""One instance's life: started, started again when it dies, drained, ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Literal, NamedTuple, Protocol

from kvmig.cli.launcher import Handle
from kvmig.cli.llumlet_link import LlumletLink
from kvmig.cli.refusal_board import RefusalBoard
from kvmig.controlplane.child import Restarts
from kvmig.controlplane.messages import Member, MemberState, OrderRefused, SetState
from kvmig.ground.config import ClusterConfig
from kvmig.ground.errors import StartupError

log = logging.getLogger(__name__)

POLL_S = 0.05
"""Between two looks at whether a draining instance is empty."""
RENEWED = "it was told to start again"
EVACUATE_S = 2.0
"""Between two calls to run again elsewhere what a drain hasn't moved by its deadline."""


class Deadline(NamedTuple):
    """Of a drain."""

    seconds: float
    ends: bool = False
    """Whether what could go on nowhere, for no other instance has its weights, ends then."""


class Surroundings(Protocol):
    """What an instance needs of its cluster."""

    refusals: RefusalBoard

    def say(self, text: str) -> None:
        """Progress, for people."""
        ...

    def changed(self) -> None:
        """Somebody's `member` has changed."""
        ...

    def left(self, instance: Instance) -> None:
        """It was to leave, and is empty or dead: take it out."""
        ...

    def others_serve(self, instance: Instance) -> bool:
        """Whether there is another one that its requests can go to."""
        ...

    def evacuate(self, instance: Instance, *, ends: bool) -> None:
        """Its deadline is over: its requests shall go on elsewhere.

        ends: those that no other instance has the weights of end with an error.
        """
        ...


class Instance:
    """Runs from its making to `close`, or until it is given up."""

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[Handle]],
        secret: bytes,
        config: ClusterConfig,
        around: Surroundings,
    ) -> None:
        """start: of its process, each time anew; may raise StartupError."""
        self.name = name
        self.state: MemberState = "starting"
        self.first_start: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the first start failed; empty if it didn't."""
        self._start = start
        self._secret = secret
        self._config = config
        self._around = around
        self._detail = ""
        self._endpoint = ""
        self._served_s = 0.0
        """The process before."""
        self._link: LlumletLink | None = None
        self._wanted = SetState("serving")
        self._leaving = False
        self._renewing: asyncio.Future[str] | None = None
        """Who waits for a process of its own that is new; empty, or why there is none."""
        self._empty = asyncio.Event()
        """Its process shall end now, and start again."""
        self._deadline, self._ends = 0.0, False
        self._draining: asyncio.Task[None] | None = None
        self._closing = False
        self._task = asyncio.create_task(self._run(), name=f"instance {name}")

    @property
    def member(self) -> Member:
        """What others are told of it."""
        return Member(self.name, self._endpoint, self.state, self._detail)

    async def close(self) -> None:
        """End it at once. May be called twice, and by several."""
        if not self._closing:
            self._closing = True
            self._task.cancel()
            if self._draining is not None:
                self._draining.cancel()
        self._renewed("it was taken out")
        await asyncio.wait([self._task])

    @property
    def weights(self) -> str:
        """Identity of those that its process has told of; empty before."""
        report = None if self._link is None else self._link.report
        return "" if report is None else report.weights

    def drain(self, deadline: Deadline, leave: bool) -> None:
        """Let its requests go elsewhere; called again: with this deadline.

        leave: then take it out of the cluster. Raises OrderRefused.
        """
        if self.state not in ("serving", "draining"):
            raise OrderRefused("conflict", f"instance {self.name} is {self.state}")
        self._leaving = self._leaving or leave
        self._deadline, self._ends = _now() + deadline.seconds, deadline.ends
        self._want("draining", "ends when it is empty" if self._leaving else "")
        if self._draining is None or self._draining.done():
            self._draining = asyncio.create_task(self._drain(), name=f"drain of {self.name}")

    def restart(self, deadline: Deadline) -> asyncio.Future[str]:
        """Let its requests go elsewhere, then start it again; "" once it serves, or why not.

        Raises OrderRefused.
        """
        self.drain(deadline, leave=False)
        self._renewed("it was told so again")
        self._renewing = asyncio.get_running_loop().create_future()
        self._want("draining", "starts again when it is empty")
        return self._renewing

    def stop_drain(self) -> None:
        """Let it serve again. Raises OrderRefused."""
        if self.state != "draining" or self._draining is None:
            raise OrderRefused("conflict", f"instance {self.name} is {self.state}, not draining")
        self._draining.cancel()
        self._leaving = False
        self._renewed("it was told to serve on")
        self._want("serving", "")

    # -- its process

    async def _run(self) -> None:
        restarts = Restarts(self._config.lifecycle.max_restarts)
        while True:
            try:
                how = await self._live()
            except StartupError as error:
                how = str(error)
            except Exception as error:  # else nobody would start it again, or hear of it
                log.exception("instance %s", self.name)
                how = f"its launcher failed: {error!r}"
            if self._leaving:
                self._around.left(self)
                return
            if how == RENEWED:
                self._around.say(f"instance {self.name} starts again, as it was told")
                continue
            if not self.first_start.done():  # it would fail in the same way again
                self._set("failed", how)
                self.first_start.set_result(how)
                return
            pause_s = restarts.died(self._served_s)
            if pause_s is None:
                again = self._config.lifecycle.max_restarts
                how = f"{how}, after {again} restarts" if again else how
                self._around.say(f"instance {self.name} is given up ({how})")
                self._set("failed", how)
                self._renewed(how)
                return
            self._around.say(f"instance {self.name} is gone ({how}), again in {pause_s:g} s")
            self._set("starting", f"it was gone ({how})")
            await asyncio.sleep(pause_s)

    async def _live(self) -> str:
        """From start to death; how it ended. Raises StartupError."""
        began, self._served_s = _now(), 0.0
        self._around.say(f"instance {self.name} starts")
        handle = await self._start()
        link: LlumletLink | None = None
        try:
            endpoint = await handle.ready(self._config.start_timeout_s)
            self._around.say(f"instance {self.name} is ready ({_now() - began:.0f} s)")
            link = self._link = LlumletLink(
                self.name, endpoint, self._secret, self._around.refusals.own
            )
            self._endpoint, ready = endpoint, _now()
            self._want(self._wanted.state, "")
            if not self.first_start.done():
                self.first_start.set_result("")
            self._empty.clear()
            if self._wanted.state == "serving":
                self._renewed("")
            how = await first_of(handle.ended(), link.silent(), self._to_renew())
            self._served_s = _now() - ready
            return how
        finally:
            self._link, self._endpoint = None, ""
            self._set("starting", "its process is gone")
            await self._end(link, handle)

    async def _end(self, link: LlumletLink | None, handle: Handle) -> None:
        """To the end, whatever comes meanwhile: a process that hangs would keep its memory."""

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
        said = False
        while not self._may_rest():
            late = _now() >= self._deadline and self._says("draining")
            if late and self._around.others_serve(self):
                if not said:
                    left = "or ends with an error" if self._ends else "or stays until it ends"
                    self._around.say(
                        f"instance {self.name}: what is left goes on elsewhere by recompute, {left}"
                        " where no other instance has its weights"
                    )
                said = True
                self._around.evacuate(self, ends=self._ends)
                self._deadline = _now() + EVACUATE_S
            await asyncio.sleep(POLL_S)
        if self._leaving:
            self._around.left(self)
        elif self._renewing is not None:
            self._wanted = SetState("serving")
            self._empty.set()
        else:
            self._set("draining", "it is empty")

    async def _to_renew(self) -> str:
        await self._empty.wait()
        return RENEWED

    def _renewed(self, failed: str) -> None:
        """Tell who waits for it, if somebody does."""
        if self._renewing is not None and not self._renewing.done():
            self._renewing.set_result(failed)
        self._renewing = None

    def _may_rest(self) -> bool:
        """Whether nothing is left on it, and nothing will come."""
        report = None if self._link is None else self._link.report
        if report is None or report.state != "draining":
            return False
        load = report.load
        held = load.running + load.waiting + report.migrations_in + report.migrations_out
        return held == 0 and self._around.others_serve(self)

    def _says(self, state: str) -> bool:
        """Whether the llumlet says so itself: until then dispatch still sends requests there."""
        report = None if self._link is None else self._link.report
        return report is not None and report.state == state

    def _want(self, state: Literal["serving", "draining"], detail: str) -> None:
        self._wanted = SetState(state)
        if self._link is not None:
            self._link.set_state(self._wanted)
        self._set(state, detail)

    def _set(self, state: MemberState, detail: str) -> None:
        self.state, self._detail = state, detail
        self._around.changed()


async def first_of(*waits: Awaitable[str]) -> str:
    """What the first to end says; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()


def _now() -> float:
    return asyncio.get_running_loop().time()
