"""What a process of kvmig's prints, how it is ended, and when it starts again."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvloop

from kvmig.process import supervisor
from kvmig.process.child import StartAnnouncement
from kvmig.process.supervisor import (
    PAUSES_S,
    STABLE_S,
    ChildProcess,
    ProcessPort,
    deaths_in_a_row,
    restart_pause,
    running,
)


def run(script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, "-c", script],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_kvmigs_warnings_are_shown_and_of_libraries_only_errors() -> None:
    done = run(
        "import logging\n"
        "from kvmig.process.child import quiet\n"
        "quiet('i7')\n"
        "logging.getLogger('library').warning('hush')\n"
        "logging.getLogger('library').error('loud')\n"
        "logging.getLogger('kvmig.some.part').warning('ours')\n"
    )

    assert [line.split(" ", 2)[2] for line in done.stderr.splitlines()] == [
        "i7 ERROR loud",
        "i7 WARNING ours",
    ]


WARN = (
    "import warnings\n"
    "from kvmig.process.child import quiet\n"
    "quiet('i7')\n"
    "warnings.warn('some day', FutureWarning)\n"
)


def test_warnings_of_coming_changes_are_shown_to_who_asks_only() -> None:
    assert run(WARN).stderr == ""
    assert "some day" in run(WARN, "-W", "always").stderr


def test_no_garbage_is_collected_while_a_process_loads_and_what_it_loaded_is_never_walked() -> None:
    done = run(
        "import gc\n"
        "from kvmig.process.child import begin_loading, end_loading\n"
        "begin_loading()\n"
        "print(gc.isenabled())\n"
        "loaded = [[] for _ in range(100_000)]\n"
        "end_loading()\n"
        "print(gc.isenabled(), gc.get_freeze_count() > 100_000)\n"
    )

    assert done.stdout.split() == ["False", "True", "True"]


def test_a_process_that_ends_collects_no_garbage_whoever_calls_for_it() -> None:
    done = run(
        "import gc, weakref\n"
        "from kvmig.process.child import end_collecting\n"
        "class Garbage: pass\n"
        "def made():\n"
        "    one = Garbage()\n"
        "    one.itself = one\n"
        "    return weakref.ref(one)\n"
        "before = made()\n"
        "gc.collect()\n"
        "after = made()\n"
        "end_collecting()\n"
        "gc.collect()\n"
        "print(before() is None, after() is None, gc.isenabled())\n"
    )

    assert done.stdout.split() == ["True", "False", "False"]


def test_a_process_leaves_with_its_status_and_all_that_it_printed() -> None:
    done = run(
        "import atexit\n"
        "from kvmig.process.child import leave\n"
        "atexit.register(print, 'torn down')\n"
        "print('said', end='')\n"
        "leave(3)\n"
    )

    assert (done.returncode, done.stdout) == (3, "said")


def test_output_that_nobody_can_take_stops_nobody() -> None:
    script = (
        "from kvmig.process.child import leave, say\n"
        "for n in range(1000):\n"
        "    say('a line of progress')\n"
        "leave(3)\n"
    )
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, stdout=full, stderr=full, timeout=60, check=False)
    assert done.returncode == 3


def test_a_line_is_one_write_so_that_those_of_several_processes_stay_lines() -> None:
    done = run(
        "import sys\n"
        "from kvmig.process.child import say\n"
        "class Writes(list):\n"
        "    def write(self, text):\n"
        "        self.extend([text] if text else [])\n"
        "    def flush(self): ...\n"
        "sys.stderr = Writes()\n"
        "say('it starts')\n"
        "print(list(sys.stderr))\n"
    )

    assert done.stdout == "['kvmig: it starts\\n']\n"


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
    child = await ChildProcess.start("child", running("stubborn", environment), StartAnnouncement())
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

    child = await ChildProcess.start("child", spawn, StartAnnouncement())
    assert await child.ready(60.0) == "here"
    os.close(child._told)


async def test_two_stops_at_once_close_the_childs_stdin_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second one would close what another thread has opened meanwhile."""
    closed = list[int]()

    async def spawn(stdin: int, announced: int) -> ProcessPort:
        return await asyncio.create_subprocess_exec("sleep", "600", stdin=stdin, process_group=0)

    child = await ChildProcess.start("child", spawn, StartAnnouncement())

    def close(descriptor: int) -> None:
        closed.append(descriptor)
        os.close(descriptor)

    monkeypatch.setattr(supervisor, "os", SimpleNamespace(**{**vars(os), "close": close}))
    await asyncio.gather(child.stop(), child.stop())
    assert len(closed) == 1


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


def test_the_pauses_grow_and_the_last_one_repeats() -> None:
    assert [restart_pause(deaths) for deaths in range(1, 8)] == [*PAUSES_S, *PAUSES_S[-1:] * 2]


def test_who_has_served_for_long_starts_a_new_row() -> None:
    assert deaths_in_a_row(2, STABLE_S - 1) == 3
    assert deaths_in_a_row(2, STABLE_S) == 1
