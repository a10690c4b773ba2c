"""Every implementation of the kernels that can be tested on this machine, by name.

@pytest.mark.parametrize("backend", BACKENDS)
def test_something(backend: str) -> None:
    kernels = loaded(backend)
"""

from __future__ import annotations

import functools
import os

import pytest

from kvmig.ground.errors import KernelUnavailable
from kvmig.kernels import select
from kvmig.kernels.face import Kernels
from kvmig.kernels.reference import Reference

BACKENDS = ["cpu", "reference"]
"""Names of `kvmig.kernels.select.MODULES` that work on memory of the host."""
if os.environ.get("TRITON_INTERPRET") == "1":  # tests/test_kernels_triton.py runs pytest so
    BACKENDS.append("triton")
WORKERS = [1, 2, 3]
ORACLE = Reference("cpu")


def loaded(name: str) -> Kernels:
    """The kernels of that name; skips the test where they can't run."""
    found = _loaded(name)
    if isinstance(found, str):
        pytest.skip(found)
    return found


@functools.cache
def _loaded(name: str) -> Kernels | str:
    try:
        return select.load(name, "cpu")
    except KernelUnavailable as error:
        return str(error)
