"""Carries the planned faults out, and undoes each after its time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench import report
from bench.chaos.cast import Cast, connections, sever
from bench.chaos.hooks import ARMED, FIRED, NOW
from bench.chaos.place import Place
from bench.chaos.plan import AGENT, PROCESSES, Fault
from kvmig.process.supervisor import HEARTBEAT_TIMEOUT_S, LOOKS
from kvmig_tools.served import Served

LATE_S = 0.3
"""What a slow message is late by: some answers then come after their time-out."""
JUMPS_S = (86_400.0, -86_400.0, 3_600.0, -10.0)
SQUEEZED_BYTES = 1 << 20
"""Address space that a process with no more memory may still take."""
POLL_S = 0.05
ENOUGH = 2
"""Instances, or nothing can be moved, and no state of the handshake be reached."""
CALM_S = 60.0
IMPATIENT = 5
"""One fault in so many doesn't wait, so that sometimes no instance is left."""
UNREACHED_S = 30.0
"""A state of the handshake that nothing enters for so long is disarmed."""


@dataclass
class Done:
    """A fault as it happened. began_s: since the load began; pid: 0 where it hit none."""

    fault: Fault
    began_s: float
    pid: int = 0
    note: str = ""

    def row(self) -> dict[str, Any]:
        """For the report."""
        return {**asdict(self.fault), "began_s": round(self.began_s, 2), "pid": self.pid,
                "note": self.note}  # fmt: skip


class Nemesis:
    """`run` it beside the load; `end` undoes whatever is still done.

    doomed: ports of clients whose front end was about to die: their calls may break.
    """

    def __init__(self, served: Served, place: Place, began: float) -> None:
        self.doomed: set[int] = set()
        self.done: list[Done] = []
        self._served = served
        self._place = place
        self._began = began
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, faults: list[Fault], seconds: float) -> None:
        """One after the other, as far apart as planned; several may last at once.

        Where a start takes longer than on a fast machine, the next fault is later, too: most wait
        until ENOUGH instances serve. So the last ones of the plan may not come.
        """
        before = 0.0
        for fault in faults:
            await asyncio.sleep(fault.at_s - before)
            before = fault.at_s
            if fault.number % IMPATIENT:
                await self._calm()
            if time.monotonic() > self._began + seconds:
                break
            done = Done(fault, time.monotonic() - self._began)
            self.done.append(done)
            task = asyncio.create_task(self._strike(done), name=fault.kind)
            self._tasks.add(task)
        await asyncio.gather(*self._tasks)

    async def _calm(self) -> None:
        until = time.monotonic() + CALM_S
        while time.monotonic() < until:
            try:
                rows = await asyncio.to_thread(self._served.get, "instances")
            except httpx.HTTPError:  # of a front end that has just died
                rows = []
            if sum(row["state"] == "serving" for row in rows) >= ENOUGH:
                return
            await asyncio.sleep(POLL_S)

    async def end(self) -> None:
        """Undo everything, whenever it comes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for folder in (ARMED, NOW):
            for path in (self._place.folder / folder).iterdir():
                path.unlink()
        for pid in self._place.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def _strike(self, done: Done) -> None:
        fault = done.fault
        if fault.target in (*PROCESSES, AGENT):
            await self._hit(done)
        elif "." in fault.target:
            await self._lie_in_wait(done)
        elif fault.deed == "sever":
            await self._sever(done)
        elif fault.target == "transport":
            await self._disturb(done)
        elif fault.deed == "fill":
            await self._fill(done)
        else:
            await self._jump(done)
        report.say(f"{done.began_s:7.1f} s  {fault.deed} {fault.target}"
                   f" {fault.seconds:g} s, process {done.pid or '-'} {done.note}")  # fmt: skip

    # -- processes

    async def _hit(self, done: Done) -> None:
        fault = done.fault
        pid = (await self._cast()).one(fault.target, fault.number)
        if pid is None:
            done.note = "there was none"
            return
        done.pid = pid
        with contextlib.suppress(ProcessLookupError):
            if fault.deed == "kill":
                self._kill(fault.target, pid)
            elif fault.deed == "stop":
                clients = {there for _, there in connections(pid)}
                await self._stop(pid, fault.seconds)
                if fault.target == "front-end" and await self._gone(pid):
                    self.doomed |= clients  # the launcher has ended it: it was silent too long
                    done.note = "the launcher has ended it"
            else:
                await self._squeeze(fault, pid, done)

    async def _gone(self, pid: int) -> bool:
        """Whether it has ended by now, or does within the time between two looks at it."""
        for _ in range(int(HEARTBEAT_TIMEOUT_S / LOOKS / POLL_S)):
            if not psutil.pid_exists(pid):
                return True
            await asyncio.sleep(POLL_S)
        return False

    def _kill(self, part: str, pid: int) -> None:
        """A front end is stopped before, so that its clients are known."""
        if part == "front-end":
            os.kill(pid, signal.SIGSTOP)
            self._doom(pid)
        os.kill(pid, signal.SIGKILL)

    def _doom(self, pid: int) -> None:
        self.doomed |= {there for _, there in connections(pid)}

    async def _stop(self, pid: int, seconds: float) -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def _squeeze(self, fault: Fault, pid: int, done: Done) -> None:
        """No more memory; a front end is killed then, as the kernel does."""
        process = psutil.Process(pid)
        usual = resource.prlimit(pid, resource.RLIMIT_AS)
        most = process.memory_info().vms + SQUEEZED_BYTES
        resource.prlimit(pid, resource.RLIMIT_AS, (most, usual[1]))
        until = time.monotonic() + fault.seconds
        while time.monotonic() < until and process.is_running():
            if fault.target == "front-end":
                self._doom(pid)
            await asyncio.sleep(POLL_S)
        if not process.is_running():
            done.note = "it died of it"
        elif fault.target == "front-end":
            self._kill(fault.target, pid)
        else:
            resource.prlimit(pid, resource.RLIMIT_AS, usual)

    # -- the handshake

    async def _lie_in_wait(self, done: Done) -> None:
        """For whoever enters the state next."""
        fault = done.fault
        armed = self._place.folder / ARMED / fault.target
        armed.write_text(fault.deed)
        began = time.monotonic()
        while armed.exists():
            if time.monotonic() > began + UNREACHED_S:
                with contextlib.suppress(FileNotFoundError):
                    armed.unlink()
                    done.note = "was not reached"
                    return
            await asyncio.sleep(POLL_S)
        done.began_s = time.monotonic() - self._began
        for path in (self._place.folder / FIRED).glob(f"{fault.target}.*"):
            done.pid = int(path.suffix[1:])
            path.unlink()
        if fault.deed == "stop" and done.pid:
            with contextlib.suppress(ProcessLookupError):
                await self._stop(done.pid, fault.seconds)

    # -- what is around them

    async def _sever(self, done: Done) -> None:
        cast = await self._cast()
        done.pid = cast.one("instance", done.fault.number) or 0
        count = await asyncio.to_thread(sever, done.pid, cast.everybody)
        done.note = f"{count} connections"

    async def _disturb(self, done: Done) -> None:
        with self._there(self._place.folder / NOW / done.fault.deed, str(LATE_S)):
            await asyncio.sleep(done.fault.seconds)

    async def _fill(self, done: Done) -> None:
        """An instance is killed then, too: something wants to write."""
        what = done.fault.target
        try:
            await asyncio.to_thread(self._place.fill, what, True)
            pid = (await self._cast()).one("instance", done.fault.number)
            if pid is not None:
                done.pid = pid
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(done.fault.seconds)
        finally:
            self._place.fill(what, False)

    async def _jump(self, done: Done) -> None:
        seconds = JUMPS_S[done.fault.number % len(JUMPS_S)]
        done.note = f"{seconds:+g} s"
        self._place.jump(seconds)
        try:
            await asyncio.sleep(done.fault.seconds)
        finally:
            self._place.jump(0.0)

    # -- helpers

    async def _cast(self) -> Cast:
        return await asyncio.to_thread(Cast.of, self._place)

    @staticmethod
    @contextlib.contextmanager
    def _there(path: Path, text: str) -> Any:
        path.write_text(text)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
