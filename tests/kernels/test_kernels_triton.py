"""Triton's kernels: interpreted on the CPU, compiled for GPUs that aren't here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from kvmig.core.errors import KernelUnavailable, KvmigError
from kvmig.core.layout import BlockRegion
from kvmig.kernels.api import BlockCopy
from kvmig.kernels.triton_kernels import TritonKernels
from kvmig.kernels.triton_launch import QueuedWork, TritonLauncher, alignment, power_of_two
from tests.support.triton_recorder import Recorder, recording

INTERPRETED = bool(triton.knobs.runtime.interpret)
SHARED = ("test_kernels_copy.py",)
"""Tests that every implementation passes."""
ADDRESS = 1 << 40
THREADS = 8 * 32

pytestmark = pytest.mark.skipif(INTERPRETED, reason="needs Triton's compiler")


# -- interpreted


@pytest.mark.long
def test_the_interpreted_kernels_pass_the_tests_of_every_implementation() -> None:
    """In a process of its own: Triton decides on import whether it interprets."""
    folder = Path(__file__).parent
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-k", "triton", "-p", "no:cacheprovider"),
            *(str(folder / name) for name in SHARED),
        ],
        cwd=folder.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"[1-9] passed", done.stdout), done.stdout
    assert "skipped" not in done.stdout


ORDER = """
import numpy as np
from triton.runtime.interpreter import interpreter_builder as builder
from kvmig.core.layout import BlockRegion
from kvmig.kernels.api import BlockCopy
from kvmig.kernels.triton_kernels import TritonKernels

source, target = np.arange(6 * 4096, dtype=np.uint8), np.zeros(6 * 4096, np.uint8)
begin, seen, load = source.ctypes.data, [], builder.create_masked_load

def noted(pointers, *rest):
    at = int(pointers.data.ravel()[0]) - begin
    if 0 <= at < source.nbytes:
        seen.append(at // 4096)
    return load(pointers, *rest)

builder.create_masked_load = noted
ids = np.arange(6)
regions = [[BlockRegion(one.ctypes.data, 4096, 4096)] for one in (source, target)]
TritonKernels("cpu").copy(BlockCopy(*regions, ids, ids), checksums=False, workers=2).wait()
assert (source == target).all()
print(seen)
"""


def test_a_program_copies_blocks_that_are_neighbours() -> None:
    """Programs are interpreted one after the other: two have three blocks each."""
    done = subprocess.run(
        [sys.executable, "-c", ORDER],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[0, 1, 2, 3, 4, 5]"


# -- compiled


@pytest.fixture
def recorders(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[TritonKernels, dict[str, Recorder]]]:
    folder = tmp_path_factory.getbasetemp() / "triton"
    with monkeypatch.context() as patched:
        patched.setenv("TRITON_CACHE_DIR", str(folder))
        yield recording(patched)


def gather(kernels: TritonKernels, run: int, checksums: bool = True, workers: int = 0) -> None:
    """Two layers' blocks of `run` bytes into a fused buffer."""
    paged = [BlockRegion(ADDRESS + layer * run * 100, run, run) for layer in range(2)]
    buffer = [BlockRegion(2 * ADDRESS + layer * run, 2 * run, run) for layer in range(2)]
    ids = np.arange(5)
    blocks = BlockCopy(paged, buffer, ids, ids)
    kernels.copy(blocks, checksums=checksums, workers=workers)


def vector_accesses(assembly: dict[str, Any]) -> tuple[int, int]:
    """128-bit loads and stores of global memory in the SASS, which spills nothing."""
    sass = assembly["sass"]
    assert not re.search(r"\b(LDL|STL)\b", sass), "registers are spilled"
    return len(re.findall(r"\bLDG\.E\.128", sass)), len(re.findall(r"\bSTG\.E\.128", sass))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("checksums", [True, False])
def test_a_copy_has_eight_vectors_a_thread_under_way(
    recorders: tuple[TritonKernels, dict[str, Recorder]], capability: int, checksums: bool
) -> None:
    kernels, recorded = recorders
    gather(kernels, 18_432, checksums)
    assembly = recorded["copy_kernel"].compiled(capability)
    assert vector_accesses(assembly) == (8, 8)
    assert len(re.findall(r"ld\.global\.v2\.b64", assembly["ptx"])) == 8
    assert len(re.findall(r"st\.global\.v2\.b64", assembly["ptx"])) == 8


@pytest.mark.parametrize("run", [8 * 1001, 4 * 1001, 2 * 1001, 1001])
def test_a_copy_at_any_alignment_compiles_without_spills(
    recorders: tuple[TritonKernels, dict[str, Recorder]], run: int
) -> None:
    kernels, recorded = recorders
    gather(kernels, run)
    assert vector_accesses(recorded["copy_kernel"].compiled(90)) == (0, 0)


@pytest.mark.parametrize("capability", [80, 90])
def test_a_checksum_loads_vectors_and_stores_nothing(
    recorders: tuple[TritonKernels, dict[str, Recorder]], capability: int
) -> None:
    kernels, recorded = recorders
    kernels.checksum([BlockRegion(ADDRESS, 32 << 10, 32 << 10)], np.arange(3))
    assert vector_accesses(recorded["copy_kernel"].compiled(capability)) == (8, 0)


# -- launched


def test_workers_cap_the_grid_and_no_cta_is_idle(
    recorders: tuple[TritonKernels, dict[str, Recorder]],
) -> None:
    kernels, recorded = recorders
    for workers, expected in ((4, 4), (100, 5 * 2 * 2)):
        gather(kernels, 64 << 10, workers=workers)
        assert recorded["copy_kernel"].grid == (expected,)


def test_without_a_gpu_or_the_interpreter_triton_is_unavailable() -> None:
    with pytest.raises(KernelUnavailable, match="only under TRITON_INTERPRET=1"):
        TritonKernels("cpu")
    if not torch.cuda.is_available():
        with pytest.raises(KernelUnavailable, match="no GPU"):
            TritonKernels("cuda")


def test_the_interpreter_is_not_taken_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    with pytest.raises(KernelUnavailable, match="keeps Triton off the GPU"):
        TritonKernels("cuda")


@given(st.lists(st.integers(1, 1 << 48), max_size=5))
def test_the_alignment_divides_everything_and_no_larger_one_does(numbers: list[int]) -> None:
    aligned = alignment(numbers)
    assert aligned in (1, 2, 4, 8, 16)
    assert not any(number % aligned for number in numbers)
    assert aligned == 16 or any(number % (2 * aligned) for number in numbers)


@given(st.integers(0, 1 << 30))
def test_the_power_of_two_is_the_smallest(number: int) -> None:
    power = power_of_two(number)
    assert power.bit_count() == 1
    assert power >= number
    assert power == 1 or power // 2 < number


class FakeEvent:
    """A CUDA event that comes after so many queries, or fails."""

    def __init__(self, queries: float, failure: str = "") -> None:
        self._queries = queries
        self._failure = failure

    def query(self) -> bool:
        if self._failure:
            raise RuntimeError(self._failure)
        self._queries -= 1
        return self._queries < 0


def queued(event: FakeEvent, *sums: int) -> QueuedWork:
    return QueuedWork(event, torch.tensor(sums, dtype=torch.int64))  # type: ignore[arg-type]


def test_queued_work_is_waited_for_and_gives_unsigned_sums_again_and_again() -> None:
    pending = queued(FakeEvent(2), 5, -1)
    assert not pending.done()
    assert pending.wait() == pending.wait() == [5, 2**64 - 1]


def test_work_that_is_not_done_in_time_is_an_error() -> None:
    with pytest.raises(TimeoutError, match="not done after 0 s"):
        queued(FakeEvent(float("inf"))).wait(timeout_s=0)


def test_a_failed_kernel_is_an_error_of_ours() -> None:
    with pytest.raises(KvmigError, match="illegal memory access"):
        queued(FakeEvent(0, "illegal memory access")).wait()


def test_tables_lie_one_after_the_other() -> None:
    launcher = TritonLauncher(torch.device("cpu"))
    table = launcher.upload(np.array([[1, 2], [3, 4]]), np.array([5]))
    assert table.tolist() == [1, 2, 3, 4, 5]
