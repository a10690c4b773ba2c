"""A server under its guard: nothing of it is left, however it ends or who dies before it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from kvmig.command import server_process
from kvmig.command.server_process import ServerProcess
from kvmig.core.errors import StartupError
from tests.support.fleets import ended
from tests.support.waiting import until

SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]
FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
apart = subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
)
open(sys.argv[1], "w").write(f"{child.pid} {apart.pid}")
if sys.argv[2] == "leave":
    sys.exit(3)
time.sleep(600)
"""


async def family(folder: Path, what: str) -> tuple[ServerProcess, list[int]]:
    """A server with a child of its group, and one of a session of its own."""
    file = folder / "pids"
    made = await ServerProcess.start(
        [sys.executable, "-c", FAMILY, str(file), what], dict(os.environ)
    )
    await until(lambda: file.exists() and len(file.read_text().split()) == 2)
    return made, [int(one) for one in file.read_text().split()]


async def test_a_server_that_is_stopped_takes_all_that_it_has_started_with_it(
    tmp_path: Path,
) -> None:
    made, pids = await family(tmp_path, "stay")
    await made.stop()
    assert all(map(ended, [made.pid, *pids]))


async def test_what_a_server_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    made, pids = await family(tmp_path, "leave")
    assert await made.ended() == "exit code 3"
    assert all(map(ended, pids))
    await made.stop()


async def test_a_server_ends_with_a_deployment_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import asyncio, os\n"
        "from kvmig.command.server_process import ServerProcess\n"
        "async def main():\n"
        f"    made = await ServerProcess.start({SLEEPS!r}, dict(os.environ))\n"
        "    print(made.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    pid = int(await process.stdout.readline())
    process.kill()
    await process.wait()
    await until(lambda: ended(pid))


async def test_a_server_ends_with_its_guard(tmp_path: Path) -> None:
    made, pids = await family(tmp_path, "stay")
    guard = psutil.Process(made.pid).ppid()
    os.kill(guard, signal.SIGKILL)
    assert await made.ended() == "killed by SIGKILL"
    await made.stop()
    await until(lambda: ended(made.pid) and ended(pids[0]))
    os.kill(pids[1], signal.SIGKILL)  # it had a session of its own, and nobody knows it any more


async def test_a_server_that_does_not_end_when_it_is_asked_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_process, "STOP_S", 0.2)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    made = await ServerProcess.start([sys.executable, "-c", deaf], dict(os.environ))
    await asyncio.sleep(0.3)  # it has to hear nothing first
    await made.stop()
    assert ended(made.pid)


async def test_how_a_server_was_killed_is_said_of_itself() -> None:
    made = await ServerProcess.start(SLEEPS, dict(os.environ))
    os.kill(made.pid, signal.SIGKILL)
    assert await made.ended() == "killed by SIGKILL"
    await made.stop()


async def test_a_program_that_cannot_be_started_is_named() -> None:
    with pytest.raises(StartupError) as error:
        await ServerProcess.start(["/no/such/program"], dict(os.environ))
    assert "/no/such/program can't be started: No such file or directory" in str(error.value)
