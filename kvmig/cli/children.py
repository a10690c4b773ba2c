"""The launcher's child processes: started, waited for, watched, and ended without a trace."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, Self

import msgspec

from kvmig.cli.forks import UNSEEN
from kvmig.cli.launch import Announcement
from kvmig.cli.launcher import STOP_S
from kvmig.ground.errors import StartupError
from kvmig.ground.leftovers import Files, of_group, remove, shared_by


class Process(Protocol):
    """The part of `asyncio.subprocess.Process` that is used here."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


Spawn = Callable[[int, int], Awaitable[Process]]
"""Makes a process from its stdin and the descriptor it announces on; both stay the caller's."""


def running(module: str, environment: Mapping[str, str], descriptors: Sequence[int] = ()) -> Spawn:
    """`python -m module DESCRIPTOR`; it inherits `descriptors` under the same numbers."""

    async def spawn(stdin: int, announced: int) -> Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, str(announced),
            stdin=stdin, env=dict(environment), pass_fds=(announced, *descriptors),
        )  # fmt: skip

    return spawn


async def line_from(descriptor: int) -> bytes:
    """The first line that comes through a pipe, which is then closed; empty: it had ended before.

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


class Child:
    """A `Handle`: one process, which leads a group of its own (see `controlplane.child`)."""

    def __init__(self, name: str, process: Process, told: int, announced: int) -> None:
        """told: the end that we write of its stdin. announced: where we read its announcement."""
        self.name = name
        self._process = process
        self._told = told
        self._announced = announced
        self._shared: Files = {}
        self._over = False

    @classmethod
    async def start(cls, name: str, spawn: Spawn, launch: msgspec.Struct) -> Self:
        """The launch document goes to its stdin, which is kept open. Raises StartupError."""
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
        """Its endpoint. Raises StartupError with its own sentence, or how it ended."""
        try:
            async with asyncio.timeout(timeout_s):
                line = await line_from(self._announced)
                if not line:
                    code = await self._process.wait()
                    raise StartupError(f"{self.name} died while starting ({how_it_ended(code)})")
        except TimeoutError as error:
            raise StartupError(f"{self.name} was not ready within {timeout_s:g} s") from error
        answer = msgspec.json.decode(line, type=Announcement)
        if answer.failed:
            raise StartupError(f"{self.name}: {answer.failed}")
        self._shared = shared_by(of_group(self._process.pid))
        return answer.endpoint

    async def ended(self) -> str:
        """Wait for its end; how it ended, in words."""
        return how_it_ended(await self._process.wait())

    def terminate(self) -> None:
        """Ask it to end; it may take its time, see `ended`."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    async def stop(self, timeout_s: float = STOP_S) -> None:
        """Ask it to end, then end it and all that it started; when cancelled, at once."""
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
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()  # it may have hardly begun, and lead no group yet
        await self._process.wait()
        remove(self._shared)
        self._over = True
        os.close(self._told)


def how_it_ended(code: int) -> str:
    """A process's exit status for people."""
    if code == UNSEEN:
        return "nobody saw how"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
