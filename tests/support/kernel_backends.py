"""Every implementation of the kernels that can be tested on this machine, by name.

@pytest.mark.parametrize("backend", BACKENDS)
def test_something(backend: str) -> None:
    kernels = loaded(backend)
"""

from __future__ import annotations

import functools
import os

import numpy as np
import pytest

from kvmig.core.errors import KernelUnavailable
from kvmig.kernels import select
from kvmig.kernels.api import CopyKernels
from kvmig.kernels.copy import start_copy
from kvmig.kernels.reference import ReferenceKernels
from tests.support.poisoned import Cache

BACKENDS = ["cpu", "reference"]
"""Names of `kvmig.kernels.select.MODULES` that work on memory of the host."""
if os.environ.get("TRITON_INTERPRET") == "1":  # tests/kernels/test_kernels_triton.py runs pytest so
    BACKENDS.append("triton")
WORKERS = [1, 2, 3]
ORACLE = ReferenceKernels("cpu")


def loaded(name: str) -> CopyKernels:
    """The kernels of that name; skips the test where they can't run."""
    found = _loaded(name)
    if isinstance(found, str):
        pytest.skip(found)
    return found


@functools.cache
def _loaded(name: str) -> CopyKernels | str:
    try:
        return select.load(name, "cpu")
    except KernelUnavailable as error:
        return str(error)


def check_copy(
    by: CopyKernels, source: Cache, target: Cache, source_ids: list[int], target_ids: list[int],
    *, workers: int,
) -> None:  # fmt: skip
    """A copy by these kernels: every byte of both memories, and the checksums."""
    expected, before = target.memory.copy(), source.memory.copy()
    for source_id, target_id in zip(source_ids, target_ids, strict=True):
        target.with_block(expected, target_id, source.block(source_id))
    sums = start_copy(
        by,
        *(source.layout.regions, target.layout.regions, source_ids, target_ids),
        *(source.layout.num_blocks, target.layout.num_blocks),
        workers=workers,
    ).wait()
    assert np.array_equal(target.memory, expected)
    assert np.array_equal(source.memory, before)
    ids = np.array(source_ids, np.int64)
    assert sums == ORACLE.checksum(source.layout.regions, ids).wait()
