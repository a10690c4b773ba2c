"""NCCL of the tests' own (tests/native/fakenccl), between the tests' own GPUs."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmig.kernels import build, nccl
from tests.support import fake_gpu

SOURCE = Path(__file__).parents[1] / "native" / "fakenccl" / "nccl.cpp"
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra")


@functools.cache
def path() -> Path:
    """The library, compiled once for this user; skips the test where g++ is missing."""
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    recipe = build.BuildRecipe("libfakenccl", (SOURCE,), (), lambda: ["g++", *FLAGS], ("-ldl",))
    return build.cached_library(recipe)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """This process has NCCL until it is left; its GPUs are fake_gpu's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl, "LIBRARY", str(path()))
        patch.setenv("FAKENCCL_DRIVER", str(fake_gpu.path()))
        nccl.library.cache_clear()
        yield
    nccl.library.cache_clear()
