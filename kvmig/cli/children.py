"""The launcher's child processes: started, waited for, watched, and ended without a trace."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Self

import msgspec

from kvmig.cli.launch import Announcement
from kvmig.cli.launcher import STOP_S
from kvmig.ground.errors import StartupError
from kvmig.ground.leftovers import Files, of_group, remove, shared_by


class Child:
    """A `Handle`: one process, which leads a group of its own (see `controlplane.child`)."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, announced: int) -> None:
        self.name = name
        self._process = process
        self._announced = announced
        self._shared: Files = {}
        self._over = False

    @classmethod
    async def start(
        cls,
        name: str,
        module: str,
        launch: msgspec.Struct,
        environment: Mapping[str, str],
        descriptors: Sequence[int] = (),
    ) -> Self:
        """`python -m module DESCRIPTOR` with the launch document on its stdin, kept open.

        descriptors: what else it inherits, under the same numbers.
        """
        try:
            read_end, write_end = os.pipe()
        except OSError as error:
            raise StartupError(f"{name} can't be started: {error}") from error
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                str(write_end),
                stdin=asyncio.subprocess.PIPE,
                env=dict(environment),
                pass_fds=(write_end, *descriptors),
            )
        except BaseException as error:
            os.close(read_end)
            if isinstance(error, OSError):
                raise StartupError(f"{name} can't be started: {error}") from error
            raise
        finally:
            os.close(write_end)
        assert process.stdin is not None
        if not process.stdin.is_closing():  # or it has died already, and `ready` says so
            process.stdin.write(msgspec.json.encode(launch) + b"\n")
        return cls(name, process, read_end)

    @property
    def alive(self) -> bool:
        """Whether it runs still."""
        return self._process.returncode is None

    async def ready(self, timeout_s: float) -> str:
        """Its endpoint. Raises StartupError with its own sentence, or how it ended."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(self._announced, "rb")
        )
        try:
            async with asyncio.timeout(timeout_s):
                line = await reader.readline()
                if not line:
                    code = await self._process.wait()
                    raise StartupError(f"{self.name} died while starting ({how_it_ended(code)})")
        except TimeoutError as error:
            raise StartupError(f"{self.name} was not ready within {timeout_s:g} s") from error
        finally:
            transport.close()
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
        if self._process.stdin is not None:
            self._process.stdin.close()


def how_it_ended(code: int) -> str:
    """A process's exit status for people."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
