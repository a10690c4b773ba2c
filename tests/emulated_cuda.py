"""The CUDA kernels on the CPU: csrc/*.cu compiled by g++ over tests/native/cuda_emulation, and a
device whose memory is the host's, so that all of the GPU's path runs but the GPU."""

from __future__ import annotations

import ctypes
import functools
import shutil
from pathlib import Path

import pytest

from kvmig.ground.errors import KvmigError
from kvmig.kernels import abi, build
from kvmig.kernels.cuda import Library
from kvmig.kernels.gpu import GpuKernels

EMULATION = Path(__file__).parent / "native" / "cuda_emulation"
FLAGS = (
    *("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing"),
    *("-Wall", "-Wextra", "-Wno-unknown-pragmas", "-ffp-contract=off"),
    *(f"-I{EMULATION}", f"-I{build.CSRC}", "-include", "cuda_runtime.h", "-x", "c++"),
)


class HostDevice:
    """A `gpu.Device` in host memory. `late`: how often an event is asked for before it happens;
    `fails`: the name of the call that does."""

    def __init__(self, late: int = 0) -> None:
        self.late = late
        self.fails = ""
        self.buffers: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.events: dict[int, int] = {}
        self.allocated = 0

    def enter(self) -> None:
        self._call("enter")

    def allocate(self, nbytes: int) -> int:
        self._call("allocate")
        return self._new(nbytes)

    def allocate_pinned(self, nbytes: int) -> int:
        self._call("allocate_pinned")
        return self._new(nbytes)

    def free(self, address: int) -> None:
        del self.buffers[address]

    def free_pinned(self, address: int) -> None:
        del self.buffers[address]

    def upload(self, device: int, pinned: int, nbytes: int, stream: int) -> None:
        self._call("upload")
        ctypes.memmove(device, pinned, nbytes)

    def download(self, pinned: int, device: int, nbytes: int, stream: int) -> None:
        self._call("download")
        ctypes.memmove(pinned, device, nbytes)

    def new_event(self) -> int:
        self._call("new_event")
        self.allocated += 1
        self.events[self.allocated] = 0
        return self.allocated

    def record(self, event: int, stream: int) -> None:
        self._call("record")
        self.events[event] = self.late

    def happened(self, event: int) -> bool:
        self._call("happened")
        self.events[event] -= 1
        return self.events[event] < 0

    def destroy_event(self, event: int) -> None:
        del self.events[event]

    def _call(self, name: str) -> None:
        if self.fails == name:
            raise KvmigError(f"{name}: out of luck")

    def _new(self, nbytes: int) -> int:
        buffer = ctypes.create_string_buffer(nbytes)
        address = ctypes.addressof(buffer)
        self.buffers[address] = buffer
        return address


class Emulated(GpuKernels):
    """Their memory is the host's."""

    device = "cpu"


@functools.cache
def library() -> ctypes.CDLL:
    """Compiled once for this user; skips the test where g++ is missing."""
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    return abi.load(build.cached_library(recipe()), "cuda")


def recipe() -> build.Recipe:
    sources = (*build.CUDA_SOURCES, EMULATION / "emulation.cpp", EMULATION / "driver.cpp")
    headers = (*build.CUDA_HEADERS, *sorted(EMULATION.glob("*.h")))
    return build.Recipe(
        "libkvmig_emulated", sources, headers, lambda: ["g++", *FLAGS], ("-x", "none")
    )


def kernels(device: HostDevice | None = None) -> GpuKernels:
    """Skips the test where g++ is missing."""
    return Emulated(Library(library()), device or HostDevice())
