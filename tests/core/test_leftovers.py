"""Shared memory of processes that were killed."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvmig.core.shm_cleanup import FOLDER, of_group, remove, shared_by

MAPS = """
import mmap, sys, time
kept = []
for name in sys.argv[1:]:
    with open(name, "w+b") as file:
        file.truncate(4096)
        kept.append(mmap.mmap(file.fileno(), 4096))
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def names() -> Iterator[list[Path]]:
    """One as vLLM's queues have it, and one as instances share it."""
    tag = secrets.token_hex(8)
    paths = [FOLDER / f"psm_{tag}", FOLDER / f"kvmig-test-{tag}"]
    yield paths
    for path in paths:
        with suppress(FileNotFoundError):
            path.unlink()


def start(paths: list[Path], code: str = MAPS) -> subprocess.Popen[str]:
    """A process that maps new files of these names, with a group of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, paths)],
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)


def test_what_a_killed_process_had_mapped_is_removed(names: list[Path]) -> None:
    process = start(names)
    files = shared_by(of_group(process.pid))
    kill(process)
    queue, staging = names
    assert files == {queue: queue.stat().st_ino}

    remove(files)

    assert not queue.exists()
    assert staging.exists()  # a peer's, which lives


def test_a_semaphore_of_a_killed_process_is_removed() -> None:
    before = set(FOLDER.glob("sem.mp-*"))
    code = """
import multiprocessing, time
kept = multiprocessing.get_context("spawn").Lock()
print("ready", flush=True)
time.sleep(600)
"""
    process = start([], code)
    files = shared_by(of_group(process.pid))
    os.killpg(process.pid, signal.SIGKILL)  # with Python's own clean-up process
    process.communicate(timeout=30)
    (semaphore,) = files
    assert semaphore in set(FOLDER.glob("sem.mp-*")) - before

    remove(files)

    assert not semaphore.exists()


def test_a_name_that_somebody_else_uses_now_is_left_alone(names: list[Path]) -> None:
    process = start(names)
    files = shared_by(of_group(process.pid))
    kill(process)
    again = names[0].with_suffix(".new")
    again.write_bytes(b"other")
    again.rename(names[0])

    remove(files)

    assert names[0].read_bytes() == b"other"


def test_a_session_that_has_ended_shares_nothing(names: list[Path]) -> None:
    process = start(names)
    kill(process)

    assert shared_by(of_group(process.pid)) == {}
    remove({names[0].with_name("psm_never"): 1})
