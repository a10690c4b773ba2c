"""The parent's side of a child process: how it is started, watched, restarted and ended.

The child's side is `kvmig.process.child`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, Self

import msgspec

from kvmig.core.errors import ConfigError, StartupError
from kvmig.core.killed import await_killed
from kvmig.core.shm_cleanup import Files, of_group, remove, shared_by
from kvmig.process.child import StartAnnouncement
from kvmig.process.hung_process import describe_hang

STOP_S = 5.0
"""Time between asking a process to end and ending it."""
UNSEEN = 1000
"""Stands for an exit code, when no process is left that saw how it ended."""
PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Pauses before the first restart in a row, the second, ...; the last one repeats."""
STABLE_S = 60.0
"""A process that has served this long starts a new row with its next death."""
HEARTBEAT_TIMEOUT_S = 10.0
"""Timeout as long as for an instance (see docs/operations.md)."""
LOOKS = 4
"""Within the timeout. One that finds no heartbeat proves little: the launcher itself may have
stood still."""


class ProcessHandle(Protocol):
    """One process that was started. `stop` it in any case, also after it has ended."""

    @property
    def pid(self) -> int:
        """The id of the process; 0: another process started it, perhaps on another machine."""
        ...

    async def ready(self, timeout_s: float) -> str:
        """Return its endpoint, once it serves; to be awaited once.

        Raises StartupError with the process's own message, or with how it ended; ConfigError
        where the process was refused what it was given to use.
        """
        ...

    async def ended(self) -> str:
        """Wait for its end; how it ended, in words. May be awaited by several at once."""
        ...

    async def stop(self, timeout_s: float = STOP_S) -> None:
        """Ask the process to end, wait, then end it and all that it started; free what it held.

        May be called twice.
        """
        ...


class ProcessPort(Protocol):
    """The part of `asyncio.subprocess.Process` that is used here."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


Spawn = Callable[[int, int], Awaitable[ProcessPort]]
"""Makes a process from its stdin and the descriptor it announces on; both stay the caller's."""


def running(
    module: str,
    environment: Mapping[str, str],
    descriptors: Sequence[int] = (),
    title: str = "",
) -> Spawn:
    """Spawn `python -m module [TITLE] DESCRIPTOR`, which inherits `descriptors` under the same
    numbers. title: for people who read `ps`.
    """

    async def spawn(stdin: int, announced: int) -> ProcessPort:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *filter(None, (title,)), str(announced),
            stdin=stdin, env=dict(environment), pass_fds=(announced, *descriptors),
        )  # fmt: skip

    return spawn


class ChildProcess:
    """A `ProcessHandle`: one process, which leads a group of its own (see `process.child`)."""

    def __init__(self, name: str, process: ProcessPort, stdin: int, announced: int) -> None:
        """stdin: the end of its stdin that this process writes. announced: the descriptor from
        which this process reads its announcement."""
        self.name = name
        self._process = process
        self._told = stdin
        self._announced = announced
        self._shared: Files = {}
        self._over = False
        self.kv_bytes = 0
        """Bytes of the KV cache of each worker of its engine, once it is ready; 0: not known."""

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @classmethod
    async def start(cls, name: str, spawn: Spawn, launch: msgspec.Struct) -> Self:
        """Write the launch document to its stdin, which is kept open. Raises StartupError."""
        pipes: list[int] = []
        try:
            stdin, told = os.pipe()
            pipes += stdin, told
            announced, announces = os.pipe()
            pipes += announced, announces
            process = await spawn(stdin, announces)
        except BaseException as error:
            for one in pipes:
                os.close(one)
            if isinstance(error, OSError):
                raise StartupError(f"{name} can't be started: {error}") from error
            raise
        os.close(stdin)
        os.close(announces)
        with contextlib.suppress(BrokenPipeError):  # it has died already, and `ready` says so
            os.write(told, msgspec.json.encode(launch) + b"\n")
        return cls(name, process, told, announced)

    @property
    def alive(self) -> bool:
        """Whether it runs still."""
        return self._process.returncode is None

    async def ready(self, timeout_s: float) -> str:
        """See `ProcessHandle`."""
        try:
            async with asyncio.timeout(timeout_s):
                line = await line_from(self._announced)
                if not line:
                    code = await self._process.wait()
                    raise StartupError(f"{self.name} died while starting ({how_it_ended(code)})")
        except TimeoutError as error:
            raise StartupError(f"{self.name} was not ready within {timeout_s:g} s") from error
        answer = msgspec.json.decode(line, type=StartAnnouncement)
        if answer.failed:
            kind = ConfigError if answer.refused else StartupError
            raise kind(f"{self.name}: {answer.failed}")
        self._shared = shared_by(of_group(self._process.pid))
        self.kv_bytes = answer.kv_bytes
        return answer.endpoint

    async def ended(self) -> str:
        """See `ProcessHandle`."""
        return how_it_ended(await self._process.wait())

    def terminate(self) -> None:
        """Ask the process to end; it may take its time, see `ended`."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    async def stop(self, timeout_s: float = STOP_S) -> None:
        """Ask the process to end, then end it and all that it started; when cancelled, at once."""
        if self._over:  # its id may be another process's by now
            return
        self._shared |= shared_by(of_group(self._process.pid))
        try:
            self.terminate()
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            pass  # it had its time
        finally:
            await self._kill()

    async def _kill(self) -> None:
        if self._over:  # another stop came first: its id and descriptor may be another's
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()  # it may have hardly begun, and lead no group yet
        await await_killed(self._process, self.name)
        if self._over:  # the other stop came during the wait
            return
        self._over = True
        remove(self._shared)
        os.close(self._told)


async def line_from(descriptor: int) -> bytes:
    """Read the first line of a pipe, then close it; empty: the pipe had ended before.

    Not by `connect_read_pipe`: uvloop closes a pipe's descriptor twice, and another thread may
    have opened one of the same number in between. libzmq ends the process when it loses one.
    """
    loop = asyncio.get_running_loop()
    came = bytearray()
    ended: asyncio.Future[None] = loop.create_future()

    def read() -> None:
        part = os.read(descriptor, 65536)
        came.extend(part)
        if (not part or b"\n" in part) and not ended.done():
            ended.set_result(None)

    loop.add_reader(descriptor, read)
    try:
        await ended
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return bytes(came) if b"\n" in came else b""


def how_it_ended(code: int) -> str:
    """Say a process's exit status for people."""
    if code == UNSEEN:
        return "its exit code is not known"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


async def end_by_stdin(process: asyncio.subprocess.Process, within_s: float, name: str) -> None:
    """Close the stdin of a process, which ends it; kill it if that takes too long. name: for the
    log, where it is there even then."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(within_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await await_killed(process, name)


async def first_of(*waits: Awaitable[str]) -> str:
    """Return what the first to end says; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()


def deaths_in_a_row(before: int, served_s: float) -> int:
    """Count one more death. served_s: from its readiness to this death."""
    return 1 if served_s >= STABLE_S else before + 1


def restart_pause(deaths: int) -> float:
    """Seconds until a process starts again that has died so often in a row.

    Example: dead after 1 s of serving: again in 0.5 s; after 3 s: again in 1 s. Had it served for
    a minute in between, it would be again in 0.5 s.
    """
    return PAUSES_S[min(deaths, len(PAUSES_S)) - 1]


# -- heartbeats of a child whom nobody asks anything: a front end, a scheduler, a deployment


class HeartbeatPipe:
    """The launcher's end, to be closed: a byte in a pipe a second shows that a child's loop turns.

    A front end that hangs would keep its clients without end. `descriptor` is for it to inherit.
    """

    def __init__(self) -> None:
        self._heard, self.descriptor = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    async def fail(self, timeout_s: float) -> None:
        """Return when no heartbeat came for that long."""
        looks = LOOKS
        while looks:
            await asyncio.sleep(timeout_s / LOOKS)
            looks = LOOKS if self._came() else looks - 1

    async def begun(self) -> None:
        """Return when the first one has come."""
        loop = asyncio.get_running_loop()
        came = asyncio.Event()
        loop.add_reader(self._heard, came.set)
        try:
            await came.wait()
        finally:
            loop.remove_reader(self._heard)

    def _came(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            return bool(os.read(self._heard, 4096))
        return False

    def close(self) -> None:
        """Close both ends; a child that has inherited one keeps it."""
        os.close(self._heard)
        os.close(self.descriptor)


async def hangs(
    heartbeats: HeartbeatPipe, pid: int, timeout_s: float, *, from_first: bool = False
) -> str:
    """Wait until none comes for that long; returns the reason, and what process `pid` does.

    from_first: none is missed before the first.
    """
    if from_first:
        await heartbeats.begun()
    await heartbeats.fail(timeout_s)
    return await describe_hang(pid, f"no heartbeat for {timeout_s:g} s")
