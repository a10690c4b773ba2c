"""A fetcher as its server has it: a process of its own, which ends with the server."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec

from kvmig.core.killed import await_killed
from kvmig.process.supervisor import how_it_ended
from kvmig.sources.file_list import SourceFailure
from kvmig.sources.messages import FetchLaunch, FetchReport, report_of

MODULE = "kvmig.sources.fetcher"
SILENCE_S = 60.0
"""A fetcher that reports nothing for this time hangs, and is killed."""


class FetcherChild:
    """`begin` it, follow its reports, then `end` it."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def begin(cls, launch: FetchLaunch, log: Path) -> FetcherChild:
        """log: where what it prints is appended. Raises OSError."""
        out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", MODULE, stdin=PIPE, stdout=PIPE, stderr=out
            )
        finally:
            os.close(out)
        child = cls(process)
        child._write(msgspec.json.encode(launch) + b"\n")
        return child

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def allow(self) -> None:
        """Let the fetcher fetch what it has listed: the disk has room."""
        self._write(b"\n")

    async def reports(self, silence_s: float = SILENCE_S) -> AsyncGenerator[FetchReport, None]:
        """Follow the reports until it ends. Raises SourceFailure where it hangs, or died."""
        assert self._process.stdout is not None
        while True:
            try:
                async with asyncio.timeout(silence_s):
                    line = await self._process.stdout.readline()
                    code = 0 if line else await self._process.wait()
            except TimeoutError as error:
                raise SourceFailure(f"its fetcher said nothing for {silence_s:g} s") from error
            if not line:
                raise SourceFailure(f"its fetcher ended ({how_it_ended(code)})")
            yield report_of(line)

    async def end(self) -> None:
        """End the fetcher now; what it has fetched stays. One that its disk blocks is logged."""
        if self._process.returncode is None:
            self._process.kill()
        await await_killed(self._process, "a fetcher of models' files")

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
