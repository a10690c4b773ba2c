"""Races in the TMA kernel's ring, by ThreadSanitizer on a CPU (native/ring_threads.cpp).

compute-sanitizer's racecheck reports accesses to the ring on a GPU, where it sees neither the
TMA's arrivals at a barrier nor what a wait for them orders.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvmig.kernels.build import CSRC

NATIVE = Path(__file__).parents[1] / "native"
FLAGS = ("-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread", "-Wno-unknown-pragmas")
WAIT = "if (kSums && loaded >= kStages) barrier_wait(&stage.summed, ring.parity(loaded - kStages));"
"""What orders a stage's next load, and its description, behind the warps that sum it."""
READ = "bulk_wait_read<kDraining>();"
"""What orders it behind the store that reads it."""
FILLED = "barrier_wait(&stage.filled, ring.parity(i));"
"""What orders the warps that sum a stage behind its load."""


def ran(folder: Path, without: str = "") -> subprocess.CompletedProcess[str]:
    """The program, of sources in which one line is missing."""
    if not shutil.which("g++") or not shutil.which("setarch"):
        pytest.skip("g++ or setarch is not installed")
    for path in (*CSRC.glob("*.cuh"), *CSRC.glob("*.h")):
        text = path.read_text()
        if without and path.name == "copy_tma.cuh":
            assert without in text
            text = text.replace(without, ";")
        (folder / path.name).write_text(text)
    program = folder / "ring"
    sources = f"-I{folder}", f"-I{NATIVE / 'fakegpu'}", str(NATIVE / "ring_threads.cpp")
    done = subprocess.run(
        ["g++", *FLAGS, *sources, "-o", str(program)],
        check=False, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    if "cannot find -ltsan" in done.stderr or "libtsan" in done.stderr:
        pytest.skip("g++ has no ThreadSanitizer here")
    assert not done.returncode, done.stderr
    # Without random addresses: the sanitizer needs its own.
    return subprocess.run(
        ["setarch", "-R", str(program)], check=False, capture_output=True, text=True, timeout=240,
        env=os.environ | {"TSAN_OPTIONS": "halt_on_error=1 exitcode=66"},
    )  # fmt: skip


@pytest.mark.long
def test_the_rings_barriers_order_every_access(tmp_path: Path) -> None:
    done = ran(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "as it was\n", "")


@pytest.mark.long
@pytest.mark.parametrize("line", [WAIT, READ, FILLED])
def test_a_wait_that_is_missing_is_a_race(tmp_path: Path, line: str) -> None:
    done = ran(tmp_path, without=line)
    assert done.returncode == 66
    assert "WARNING: ThreadSanitizer: data race" in done.stderr
