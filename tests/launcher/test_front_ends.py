"""Front ends in processes of their own: those that die or hang are started again."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmig.core.config import ClusterConfig, LifecycleConfig
from kvmig.launcher import front_ends
from kvmig.launcher.front_ends import FrontEnds, FrontLaunch
from kvmig.process import kept_child
from kvmig.process.supervisor import running

PATIENCE_S = 60.0
STUB = """
import json, os, pathlib, sys, time
launch = json.loads(sys.stdin.readline())
life = pathlib.Path(__file__).with_name("life").read_text()
os.setpgid(0, 0)
if life == "never ready":
    os.write(int(sys.argv[1]), b'{"failed": "no such model"}' + bytes([10]))
    sys.exit(1)
os.write(int(sys.argv[1]), b'{"endpoint": "shared"}' + bytes([10]))
if life == "dies":
    sys.exit(3)
while life != "hangs":
    os.write(launch["heartbeat"], b".")
    time.sleep(0.05)
time.sleep(600)
"""


class Site:
    """A front end's program that lives as `life` says, and what the launcher says of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.said: list[str] = []
        self._news = asyncio.Event()
        (folder / "stub.py").write_text(STUB)

    def life(self, how: str) -> None:
        (self._folder / "life").write_text(how)

    def say(self, text: str) -> None:
        self.said.append(text)
        self._news.set()

    async def until(self, text: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not any(text in line for line in self.said):
                self._news.clear()
                await self._news.wait()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(front_ends, "running", lambda _, *rest: running("stub", *rest))
    monkeypatch.setattr(kept_child, "say", made.say)
    monkeypatch.setattr(kept_child, "HEARTBEAT_TIMEOUT_S", 1.0)
    return made


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def make(sock: socket.socket) -> FrontEnds:
    config = ClusterConfig(lifecycle=LifecycleConfig(front_ends=1))
    launch = FrontLaunch(name="", launcher="", secret=b"s", config=config, engine_argv=[])
    return FrontEnds(launch, sock)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("life", "reason"), [("hangs", "no heartbeat for 1 s; it waits"), ("dies", "exit code 3")]
)
async def test_one_that_hangs_or_dies_is_started_again(
    site: Site, sock: socket.socket, life: str, reason: str
) -> None:
    before = descriptors()
    site.life(life)
    fronts = make(sock)
    await fronts.start()
    site.life("well")

    await site.until("front end 0 is ready")

    assert site.said[0] == f"front end 0 is gone ({reason}), it starts again in 0.5 s"
    await asyncio.sleep(2.0)
    assert len(site.said) == 2, "and lives"
    await fronts.close()
    assert descriptors() <= before + 1, "a watcher of children stays"


async def test_one_that_cannot_start_again_is_tried_again(site: Site, sock: socket.socket) -> None:
    site.life("dies")
    fronts = make(sock)
    await fronts.start()
    site.life("never ready")
    await site.until("front end 0 is gone (front end 0: no such model)")
    site.life("well")

    await site.until("front end 0 is ready")

    await fronts.close()


NOBODY_LISTENS = """
import asyncio, os, socket, sys
from kvmig.frontend import process_main
from kvmig.launcher.front_ends import FrontLaunch
from kvmig.core.config import ClusterConfig

class Started:
    def __init__(self, *_): pass
    async def start(self): pass
    async def ended(self): await asyncio.Event().wait()
    async def drain(self, at_once): print("drained", at_once.is_set())
    async def close(self): print("closed")

process_main.FrontEnd = Started
process_main.kind_of = lambda _: type("Kind", (), {"parse": lambda *_: None})
_, heartbeat = os.pipe()
launch = FrontLaunch(
    name="f", launcher="", secret=b"s", config=ClusterConfig(), engine_argv=[],
    listening=socket.socket().detach(), heartbeat=heartbeat,
)
asyncio.run(process_main.run(launch, int(sys.argv[1])))
"""


def test_one_that_is_ready_when_nobody_waits_for_it_any_more_ends_in_silence() -> None:
    heard, announced = os.pipe()
    os.close(heard)
    done = subprocess.run(
        [sys.executable, "-c", NOBODY_LISTENS, str(announced)],
        input="", pass_fds=(announced,), capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    os.close(announced)
    assert (done.returncode, done.stdout, done.stderr) == (0, "drained True\nclosed\n", "")
