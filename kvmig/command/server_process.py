"""One process of a user's server, under its guard (`kvmig.command.guard`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Self

from kvmig.command.guard import KILLED
from kvmig.core.errors import StartupError
from kvmig.core.killed import await_killed
from kvmig.process.hidden_words import start_of
from kvmig.process.supervisor import how_it_ended, line_from

GUARD = "kvmig.command.guard"
STOP_S = 10.0
"""Time between asking a server to end and ending it."""
REPORT_S = 30.0
"""Timeout of the guard's report."""
GRACE_S = 15.0
"""Time for the guard itself, beyond that."""


class ServerProcess:
    """`start` it; `stop` it in any case, also after it has ended."""

    def __init__(self, guard: asyncio.subprocess.Process, lifeline: int, pid: int) -> None:
        """lifeline: our end of the guard's stdin. pid: of the server itself."""
        self.pid = pid
        self._guard = guard
        self._lifeline = lifeline

    @classmethod
    async def start(cls, words: Sequence[str], environment: Mapping[str, str]) -> Self:
        """Raises StartupError for a program that can't be started."""
        stdin, lifeline = os.pipe()
        report, reports = os.pipe()
        try:
            try:
                start = start_of(GUARD, (f"{STOP_S:g}", str(reports), *words), environment)
                guard = await asyncio.create_subprocess_exec(
                    *start.command,
                    stdin=stdin, env=dict(start.environment), pass_fds=(reports,),
                )  # fmt: skip
            finally:
                os.close(stdin)
                os.close(reports)
        except BaseException as error:
            os.close(lifeline)
            os.close(report)
            if isinstance(error, OSError):
                raise StartupError(f"{words[0]} can't be started: {error}") from error
            raise
        made = cls(guard, lifeline, 0)
        try:
            async with asyncio.timeout(REPORT_S):
                line = (await line_from(report)).decode(errors="replace").strip()
            if not line.isdecimal():
                raise StartupError(line.removeprefix("!") or "its guard has died")
        except TimeoutError as error:
            await made.stop()
            raise StartupError(f"its guard said nothing for {REPORT_S:g} s") from error
        except BaseException:
            await made.stop()
            raise
        made.pid = int(line)
        return made

    async def ended(self) -> str:
        """Wait for the server's end; how it ended, in words."""
        code = await self._guard.wait()
        return how_it_ended(KILLED - code if code > KILLED else code)

    async def stop(self) -> None:
        """Ask the process to end, wait, then end it and all that it has started."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        try:
            async with asyncio.timeout(STOP_S + GRACE_S):
                await self._guard.wait()
        except TimeoutError:
            pass  # it had its time
        finally:
            if self._guard.returncode is None:
                self._guard.kill()
            code = await await_killed(self._guard, "the guard of a server")
            if self.pid and (code is None or code < 0):  # it was killed, and could end nothing
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
