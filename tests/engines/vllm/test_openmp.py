"""Threads that OpenMP keeps for a thread that has computed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvmig.engines.vllm.kind import preloaded

COMPUTES_ON_TWO_THREADS = """
import os, time, torch
from kvmig.engines.vllm.openmp import let_team_go

def threads():
    return len(os.listdir("/proc/self/task"))

def compute():
    torch.exp(torch.ones(1 << 22))

torch.set_num_threads(2)
before = threads()
compute()
with_team = threads()
let_team_go()
deadline = time.monotonic() + 30
while threads() > before and time.monotonic() < deadline:
    time.sleep(0.01)
without = threads()
compute()
print(with_team - before, without - before, threads() - before)
"""


@pytest.mark.engine
def test_the_team_of_a_thread_goes_and_comes_again_when_it_computes() -> None:
    environment = {**os.environ, "LD_PRELOAD": preloaded()}
    done = subprocess.run(
        [sys.executable, "-c", COMPUTES_ON_TWO_THREADS],
        env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["1", "0", "1"]


@pytest.mark.engine
def test_without_an_openmp_library_nothing_happens() -> None:
    program = "from kvmig.engines.vllm.openmp import let_team_go; let_team_go(); print('alive')"
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "alive"
