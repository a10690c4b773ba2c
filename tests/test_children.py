"""A child process of the launcher's that doesn't want to end."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import uvloop

from kvmig.cli.processes import Announcement, Child, running

BUSY_S = 3.0
"""Where descriptors are closed twice, two of five such runs lose one."""
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(int(sys.argv[1]), b'{"endpoint": "here"}\\n')
time.sleep(600)
"""


async def test_a_stop_that_is_cancelled_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    child = await Child.start("child", running("stubborn", environment), Announcement())
    assert await child.ready(60.0) == "here"
    stopping = asyncio.create_task(child.stop(600.0))
    await asyncio.sleep(0.1)
    stopping.cancel()
    async with asyncio.timeout(60):
        assert await child.ended() == "killed by SIGKILL"
        await asyncio.gather(stopping, return_exceptions=True)


class Told:
    """A process that has announced itself and lives on."""

    pid = os.getpid()
    returncode = None

    async def wait(self) -> int:
        raise NotImplementedError

    def terminate(self) -> None: ...
    def kill(self) -> None: ...


async def announced() -> None:
    """One child that becomes ready."""

    async def spawn(stdin: int, announces: int) -> Told:
        os.write(announces, b'{"endpoint": "here"}\n')
        return Told()

    child = await Child.start("child", spawn, Announcement())
    assert await child.ready(60.0) == "here"
    os.close(child._told)


def test_no_descriptor_of_another_thread_is_closed_when_a_child_is_ready() -> None:
    """libzmq's threads open some at any moment; without one it ends the process."""
    over, lost = threading.Event(), threading.Event()

    def open_and_close() -> None:
        while not over.is_set():
            descriptor = os.open(os.devnull, os.O_RDONLY)
            try:
                os.fstat(descriptor)
            except OSError:
                lost.set()
            else:
                os.close(descriptor)

    async def start_many() -> None:
        end = time.monotonic() + BUSY_S
        while time.monotonic() < end and not lost.is_set():
            await announced()

    usual = sys.getswitchinterval()
    sys.setswitchinterval(0.0001)
    threads = [threading.Thread(target=open_and_close) for _ in range(3)]
    for one in threads:
        one.start()
    try:
        uvloop.run(start_many())
    finally:
        over.set()
        for one in threads:
            one.join()
        sys.setswitchinterval(usual)
    assert not lost.is_set()
