"""A host's fork servers, whose processes are only made up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from kvmig.core import killed
from kvmig.launcher import fork_servers
from kvmig.launcher.fork_servers import ForkServers
from tests.support.inside import add_nursery


class Nursery:
    """A process that ends with its stdin, or never."""

    def __init__(self, *, ends: bool) -> None:
        self.pid = 7
        self.ended = asyncio.Event()
        self.killed = False
        self._ends = ends
        self.stdin = SimpleNamespace(close=self.close_stdin)

    def close_stdin(self) -> None:
        if self._ends:
            self.ended.set()

    def kill(self) -> None:
        self.killed = True

    async def wait(self) -> int:
        await self.ended.wait()
        return 0


async def test_one_that_never_ends_keeps_no_other_from_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fork_servers, "END_S", 0.01)
    monkeypatch.setattr(killed, "KILLED_S", 0.01)
    servers = ForkServers(str, dict)
    never, ends = Nursery(ends=False), Nursery(ends=True)
    add_nursery(servers, "vllm", never)
    add_nursery(servers, "toy", ends)
    await servers.close()
    assert never.killed
    assert "the fork server of vllm (process 7) is there still" in caplog.text
    assert ends.ended.is_set()
