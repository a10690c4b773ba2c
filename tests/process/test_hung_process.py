"""What a parent learns of a child that hangs, shown on real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvmig.process.hung_process import DOINGS, describe_hang

PATIENCE_S = 60.0
PRINTS = "from kvmig.process.hung_process import print_stacks_when_asked as it\nit()\n"
READY = "print('ready', flush=True)\n"
WAITS = f"def wait_for_ever():\n    import time\n    {READY}    time.sleep(600)\n"
COMPUTES = f"def compute_for_ever():\n    {READY}    while True:\n        pass\n"


@contextmanager
def child(program: str, log: Path) -> Iterator[subprocess.Popen[str]]:
    """One that has begun to hang, as far as its parent can know."""
    words = [sys.executable, "-c", program]
    with (
        log.open("w") as errors,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def until_state(pid: int, letters: str) -> None:
    """Wait until the kernel says one of these letters of it."""
    deadline = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in letters:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("body", "letter", "function"),
    [(WAITS, "S", "wait_for_ever"), (COMPUTES, "R", "compute_for_ever")],
    ids=["waits", "computes"],
)
async def test_a_child_that_hangs_prints_where_it_is(
    tmp_path: Path, body: str, letter: str, function: str
) -> None:
    with child(f"{PRINTS}{body}{function}()", tmp_path / "log") as process:
        until_state(process.pid, letter)
        how = await describe_hang(process.pid, "no heartbeat for 10 s")
        deadline = time.monotonic() + PATIENCE_S
        while f"in {function}" not in (tmp_path / "log").read_text():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert process.poll() is None, "it is its parent that ends it"
    assert how == f"no heartbeat for 10 s; {DOINGS[letter]}"


async def test_a_child_that_prints_no_stacks_is_not_ended_by_the_question(tmp_path: Path) -> None:
    with child(f"{WAITS}wait_for_ever()", tmp_path / "log") as process:
        until_state(process.pid, "S")
        assert await describe_hang(process.pid, "silent") == "silent; it waits"
        assert process.poll() is None


async def test_a_stopped_child_is_said_to_be_stopped(tmp_path: Path) -> None:
    with child(f"{PRINTS}{WAITS}wait_for_ever()", tmp_path / "log") as process:
        os.kill(process.pid, signal.SIGSTOP)
        until_state(process.pid, "T")
        assert await describe_hang(process.pid, "silent") == "silent; it is stopped"


async def test_of_a_process_that_is_gone_only_the_reason_is_left(tmp_path: Path) -> None:
    with child(READY, tmp_path / "log") as process:
        process.wait(PATIENCE_S)
    assert await describe_hang(process.pid, "silent") == "silent"
