"""Llumlets forked from one process: as if each had been started by itself."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import psutil
import pytest

from kvmig.core.errors import StartupError
from kvmig.launcher.environment import llumlet_environment
from kvmig.process.child import StartAnnouncement
from kvmig.process.fork_server import LLUMLET, ForkedProcess, ForkServerPool
from kvmig.process.supervisor import UNSEEN, ChildProcess, ProcessPort
from tests.support.inside import fork_servers_of, process_of

THREADS = 4
"""Of an instance: what it is forked from has one all the same."""
ENGINE = "toy"  # it loads in a moment
OURS = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
ENVIRONMENT = llumlet_environment(ENGINE, [], THREADS, OURS)
PATIENCE_S = 60.0


@pytest.fixture
def forks() -> Iterator[ForkServerPool]:
    made = ForkServerPool(ENGINE, ENVIRONMENT)
    yield made
    made.close()


class Waiting:
    """A fork that waits for its launch document, which never comes."""

    def __init__(self) -> None:
        self.stdin, self.told = os.pipe()
        self.announced, self.announces = os.pipe()

    async def begin(self, forks: ForkServerPool) -> ForkedProcess:
        return await forks.fork(ENVIRONMENT, self.stdin, self.announces)

    def close(self) -> None:
        for one in (self.stdin, self.told, self.announced, self.announces):
            os.close(one)


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    made = Waiting()
    yield made
    made.close()


async def code(fork: ForkedProcess) -> int:
    async with asyncio.timeout(PATIENCE_S):
        return await fork.wait()


def until_gone(process: psutil.Process) -> None:
    psutil.wait_procs([process], timeout=PATIENCE_S)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def test_a_fork_takes_its_launch_announces_and_ends(forks: ForkServerPool) -> None:
    async def spawn(stdin: int, announced: int) -> ProcessPort:
        return await forks.fork(ENVIRONMENT, stdin, announced)

    child = await ChildProcess.start(
        "instance i0", spawn, StartAnnouncement(failed="no launch of a llumlet")
    )
    with pytest.raises(StartupError, match="instance i0: no LlumletLaunch on stdin"):
        await child.ready(PATIENCE_S)
    assert await child.ended() == "exit code 1"
    await child.stop()


async def test_a_forks_death_is_told_and_the_next_one_starts(
    forks: ForkServerPool, waiting: Waiting
) -> None:
    for _ in range(2):
        fork = await waiting.begin(forks)
        deadline = time.monotonic() + PATIENCE_S
        process = psutil.Process(fork.pid)
        while LLUMLET not in " ".join(process.cmdline()):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert process.environ()["OMP_NUM_THREADS"] == str(THREADS)
        fork.kill()
        assert await code(fork) == -9
        fork.terminate()  # its id may be another's by now: nothing happens


async def test_forks_outlive_a_killed_fork_server_and_another_takes_its_place(
    forks: ForkServerPool, waiting: Waiting
) -> None:
    fork = await waiting.begin(forks)
    server = psutil.Process(fork.pid).parent()
    assert server is not None
    server.kill()
    with pytest.raises(StartupError, match="the fork server is gone"):
        await waiting.begin(forks)
    assert psutil.Process(fork.pid).is_running()

    assert forks.suits(ENVIRONMENT)
    another = await waiting.begin(forks)

    for one, end in ((fork, UNSEEN), (another, -9)):
        one.kill()
        assert await code(one) == end


async def test_a_fork_whose_fork_server_hangs_is_seen_to_end(
    forks: ForkServerPool, waiting: Waiting
) -> None:
    fork = await waiting.begin(forks)
    server = psutil.Process(fork.pid).parent()
    assert server is not None
    server.suspend()

    fork.kill()

    assert await code(fork) == UNSEEN


async def test_one_that_cannot_load_is_not_asked_again(waiting: Waiting) -> None:
    environment = {**ENVIRONMENT, "PYTHONHOME": "/no"}
    forks = ForkServerPool(ENGINE, environment)
    with pytest.raises(StartupError, match="the fork server is gone"):
        await waiting.begin(forks)

    assert not forks.suits(environment)
    forks.close()


async def test_without_its_launcher_a_fork_server_ends(
    forks: ForkServerPool, waiting: Waiting
) -> None:
    fork = await waiting.begin(forks)
    server = psutil.Process(fork.pid).parent()
    assert server is not None
    fork.kill()
    await code(fork)

    (ours,) = fork_servers_of(forks)
    asyncio.get_running_loop().remove_reader(ours._sock)
    ours._sock.close()

    until_gone(server)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That fork servers load, written a while ago."""
    file = tmp_path / "sitecustomize.py"
    file.write_text("")
    os.utime(file, (1e9, 1e9))
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", f"{tmp_path}{os.pathsep}{Path.cwd()}")
    return file


async def test_a_fork_server_stays_whose_libraries_are_on_disk_as_it_has_loaded_them(
    library: Path, forks: ForkServerPool, waiting: Waiting
) -> None:
    old = await waiting.begin(forks)
    forks.renew("")
    new = await waiting.begin(forks)

    assert psutil.Process(old.pid).parent() == psutil.Process(new.pid).parent()
    for one in (old, new):
        one.kill()
        assert await code(one) == -9


@pytest.mark.parametrize("change", [Path.touch, Path.unlink])
async def test_one_whose_libraries_have_changed_gives_way_and_ends_with_its_last_fork(
    library: Path, forks: ForkServerPool, waiting: Waiting, change: Callable[[Path], None]
) -> None:
    old = await waiting.begin(forks)
    change(library)
    forks.renew("")
    new = await waiting.begin(forks)

    servers = [psutil.Process(one.pid).parent() for one in (old, new)]
    assert None not in servers
    assert servers[0] != servers[1]
    old.kill()
    assert await code(old) == -9
    until_gone(cast("psutil.Process", servers[0]))
    new.kill()
    assert await code(new) == -9


async def test_who_waits_for_a_renewal_finds_the_next_fork_server_loaded(
    library: Path, forks: ForkServerPool, waiting: Waiting
) -> None:
    (old,) = fork_servers_of(forks)
    fork = await waiting.begin(forks)
    os.utime(library, (4e9, 4e9))
    forks.renew("")
    await forks.loaded()

    new = fork_servers_of(forks)[-1]
    assert new is not old
    assert new.worked
    fork.kill()
    assert await code(fork) == -9


async def test_who_waits_for_one_that_ends_waits_no_more(forks: ForkServerPool) -> None:
    (server,) = fork_servers_of(forks)
    loading = asyncio.create_task(forks.loaded())
    await asyncio.sleep(0)
    process = process_of(server)
    assert process is not None
    process.kill()
    await loading
    assert server.gone


async def test_one_that_can_not_tell_gives_way(
    library: Path, forks: ForkServerPool, waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = await waiting.begin(forks)
    server = psutil.Process(old.pid).parent()
    assert server is not None
    monkeypatch.setattr("kvmig.process.fork_server.LOADED", "time")  # a module without main
    forks.renew("")
    new = await waiting.begin(forks)

    assert psutil.Process(new.pid).parent() != server
    for one in (old, new):
        one.kill()
        assert await code(one) == -9


async def test_what_is_being_forked_when_it_is_renewed_comes_from_the_old_one(
    library: Path, forks: ForkServerPool, waiting: Waiting
) -> None:
    coming = asyncio.create_task(waiting.begin(forks))
    await asyncio.sleep(0)  # it is ordered, and the fork server still loads
    os.utime(library, (4e9, 4e9))  # so it may have loaded either
    forks.renew("")

    old = await coming

    server = psutil.Process(old.pid).parent()
    assert server is not None
    old.kill()
    assert await code(old) == -9
    await asyncio.to_thread(until_gone, server)  # the renewal goes on meanwhile


def test_only_what_libraries_read_late_may_differ(forks: ForkServerPool) -> None:
    assert forks.suits({**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "3"})
    assert not forks.suits({**ENVIRONMENT, "OMP_NUM_THREADS": "2"})
    assert not forks.suits({**ENVIRONMENT, "LD_PRELOAD": "libtcmalloc.so"})
