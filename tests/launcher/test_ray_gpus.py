"""The process that holds a unit's GPU ends itself once nobody wants it any more, without Ray."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.fake_devices import GIB, FakeMachine, devices

pytestmark = pytest.mark.long

NODE = "0123456789abcdef0123"
ROOT = str(Path(__file__).parents[2])
LEASE_S = 1.5
PATIENCE_S = 30.0
HOLD = """
import sys, time
from kvmig.launcher.ray_gpus import HeldGpu
held = HeldGpu(sys.argv[1], float(sys.argv[2]))
while sys.stdin.readline():
    print(held.uuid(), flush=True)
time.sleep(600)
"""
MEMBER = """
import sys, time
from kvmig.launcher.ray_gpus import use_gpu
use_gpu(sys.argv[1], sys.argv[2])
print("entered", flush=True)
time.sleep(600)
"""


@contextmanager
def running(code: str, *words: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": ROOT, **more}
    with subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """It holds the first of two GPUs. folder: of the node's sockets, and of the GPUs."""
    machine = FakeMachine(folder)
    machine.install(devices(2, 8 * GIB))
    path = os.pathsep.join([ROOT, machine.environment["PYTHONPATH"]])
    own = {**machine.environment, "PYTHONPATH": path}
    with running(HOLD, NODE, str(LEASE_S), TMPDIR=str(folder), **own) as process:
        yield process


def ask(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    print(file=process.stdin, flush=True)
    return process.stdout.readline().strip()


def test_a_holder_stays_while_it_is_asked_and_ends_a_lease_after_the_last_question(
    tmp_path: Path,
) -> None:
    with holder(tmp_path) as process:
        until = time.monotonic() + 2 * LEASE_S
        while time.monotonic() < until:
            assert ask(process) == devices(2)[0].uuid
            time.sleep(0.02)
        asked = time.monotonic()
        assert process.wait(PATIENCE_S) == 0
        assert time.monotonic() - asked > LEASE_S / 2, "the last question counted"


def test_a_holder_without_questions_stays_until_no_process_uses_its_gpu(
    tmp_path: Path,
) -> None:
    with running(MEMBER, NODE, devices(2)[0].uuid, TMPDIR=str(tmp_path)) as member:
        assert member.stdout is not None
        assert member.stdout.readline() == "entered\n"
        with holder(tmp_path) as process:
            ask(process)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(2 * LEASE_S)
            member.kill()
            assert process.wait(PATIENCE_S) == 0
