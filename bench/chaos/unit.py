"""The unit that all instances share KV cache in, whose agent is killed again and again.

`Unit` starts an agent wherever the last one has ended, as systemd would, and looks at what it
leases all the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from msgspec.structs import replace

from bench import report
from bench.chaos.place import Place
from kvmig.core.errors import TransportError
from kvmig.sharing.messages import MemberShare
from kvmig.sharing.unit_state import fetch_unit

ARENA = 80 << 20
"""Bytes. Three instances would like more: 600 blocks of 64 KiB each, as without a unit."""
FIRST_BYTES = 128 << 10
"""Of the block that an engine has before its first lease."""
LOOK_S = 0.05
ANSWER_S = 0.5
"""For an agent to answer; a stopped one doesn't."""
TARGETS: dict[str, report.Target] = {
    "unit agents that ended": {"min": 1},
    "unit agents that never came back": {"max": 0},
    "unit back after, longest s": {"max": 2.0},
    "unit leased over its arena, bytes": {"max": 3 * FIRST_BYTES},
}


@dataclass
class Away:
    """One end of the agent. began: when it was seen, LOOK_S later at most, by a steady clock;
    members: processes that it had; back_s: until all of them that run were connected to the next
    one; negative: they never were before that ended, too."""

    began: float
    members: list[int]
    back_s: float = -1.0


def whole(members: Iterable[int], shares: Iterable[MemberShare]) -> bool:
    """Whether all members that run are connected. One that a fault has stopped can't be."""
    connected = {one.process for one in shares if one.connected}
    return all(pid in connected or not _runs(pid) for pid in members)


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


@dataclass
class Unit:
    """Use it as a context, around the server, and `watched` around the load."""

    place: Place
    ends: list[Away] = field(default_factory=list)
    looks: int = 0
    most_leased: int = 0
    """Bytes, of all members together, at any look."""
    at_most: list[MemberShare] = field(default_factory=list)
    """The members then."""
    _process: subprocess.Popen[bytes] | None = None
    _members: list[int] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """Where the agent listens."""
        return self.place.folder / "unit"

    @property
    def flags(self) -> list[str]:
        """kvmig.serve's."""
        return [f"--unit={self.path}", "--max-model-len=4096", "--reclaim-patience=0.5"]

    def _start(self) -> None:
        words = (str(self.path), f"--memory={ARENA}B", "--end-with-stdin")
        self._process = subprocess.Popen(
            [*self.place.enter, sys.executable, "-m", "kvmig.sharing", *words],
            env={**os.environ, **self.place.environment},
            stdin=subprocess.PIPE,
        )

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Start agents and look at what they lease, inside the block."""
        looking = asyncio.create_task(self._run())
        try:
            yield
        finally:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking

    async def _run(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        assert self._process is not None
        if self._process.poll() is not None:
            self.ends.append(Away(time.monotonic(), self._members))
            self._close()
            self._start()
        try:
            shares = (await fetch_unit(str(self.path), ANSWER_S)).shares
        except TransportError:  # it is killed, stopped, or starts
            return
        self.looks += 1
        leased = sum(one.lease for one in shares)
        if leased > self.most_leased:
            self.most_leased = leased
            # A result names models, no folders.
            self.at_most = [replace(one, model=Path(one.model).name) for one in shares]
        self._members = [one.process for one in shares]
        if self.ends and self.ends[-1].back_s < 0 and whole(self.ends[-1].members, shares):
            self.ends[-1].back_s = time.monotonic() - self.ends[-1].began

    def figures(self) -> dict[str, Any]:
        """Of the run."""
        back = [one.back_s for one in self.ends]
        return {
            "unit agents that ended": len(self.ends),
            "unit agents that never came back": sum(one < 0 for one in back[:-1]),
            "unit back after, longest s": round(max(back, default=0.0), 3),
            "unit looks": self.looks,
            "unit leased over its arena, bytes": max(0, self.most_leased - ARENA),
            "unit leased at most, of its arena": round(self.most_leased / ARENA, 3),
        }

    def _close(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()

    def __enter__(self) -> Unit:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
