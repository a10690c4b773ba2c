"""GPUs of the tests' own: the driver's calls and the CUDA kernels go to tests/native/fakegpu, which
refuses what the real ones would. Only the calls that tests ask about are noted here."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import shutil
import time
from collections.abc import Callable, Iterator
from ctypes import byref, c_size_t, c_uint64, c_void_p
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvmig.core.errors import KvmigError
from kvmig.core.layout import KVLayout
from kvmig.kernels import abi, build, cuda, driver, ipc, select
from kvmig.kernels.cuda import CudaLibrary
from kvmig.kernels.driver import CudaDriver
from kvmig.kernels.gpu import GpuKernels
from tests.support.poisoned import Cache

NATIVE = Path(__file__).parents[1] / "native" / "fakegpu"
VARIANTS = Path(__file__).parents[2] / "bench" / "gpu" / "variants.cu"
FLAGS = (
    *("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-pthread"),
    *("-Wall", "-Wextra", "-Wno-unknown-pragmas", "-ffp-contract=off"),
    *(f"-I{NATIVE}", f"-I{build.CSRC}", "-include", "cuda_runtime.h", "-x", "c++"),
)
HIGHEST = -5
"""The highest priority of a stream."""
GIVEN_BACK_S = 5.0
MEMORY = "/memfd:fakegpu"
HELD = ("memory", "pinned", "events", "streams", "handles", "reserved", "greens")
_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@functools.cache
def path() -> Path:
    """The library, compiled once for this user; skips the test where g++ is missing."""
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    return build.cached_library(
        build.BuildRecipe(
            "libfakegpu",
            (*build.CUDA_SOURCES, VARIANTS, NATIVE / "kernels.cpp", NATIVE / "gpu.cpp"),
            (*build.CUDA_HEADERS, *sorted(NATIVE.glob("*.h"))),
            lambda: ["g++", *FLAGS],
            ("-x", "none"),
        )
    )


@functools.cache
def library() -> ctypes.CDLL:
    """The same, loaded."""
    loaded = abi.load(path(), "cuda")
    loaded.fakegpu_pending.argtypes = [ctypes.c_void_p]
    loaded.fakegpu_sms.argtypes, loaded.fakegpu_sms.restype = [ctypes.c_void_p], ctypes.c_uint64
    return loaded


def install(patch: pytest.MonkeyPatch) -> None:
    """This process has two GPUs from now on, with a driver and kvmig's CUDA library."""
    loaded = library()
    _forget()
    patch.setattr(driver, "LIBRARY", str(path()))
    patch.setattr(cuda, "library", lambda: loaded)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """`install` until it is left; then all is given back that was taken inside."""
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        before = held()
        yield
        close_kernels()
        library().fakegpu_mend()
        deadline = time.monotonic() + GIVEN_BACK_S
        while held() != before and time.monotonic() < deadline:
            time.sleep(0.01)  # a transport's threads end by themselves
            gc.collect()
        assert held() == before
    _forget()


def close_kernels() -> None:
    """Give back what the kernels keep that production code loads."""
    for ordinal in (0, 1):
        cuda.kernels_on(ordinal).close()


def held() -> dict[str, int]:
    """What the driver has given and not got back, of both devices."""
    counts = (ctypes.c_int * len(HELD))()
    library().fakegpu_held(counts)
    return dict(zip(HELD, counts, strict=True))


def sizes() -> list[int]:
    """Of the devices' memory."""
    found = (ctypes.c_size_t * 64)()
    return sorted(found[: library().fakegpu_sizes(found, len(found))])


def memory_of(process: int) -> set[int]:
    """Memory of the machine's GPUs that a process maps, or holds a descriptor of: inode numbers."""
    maps = Path(f"/proc/{process}/maps").read_text().splitlines()
    found = {int(line.split()[4]) for line in maps if MEMORY in line}
    for one in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if MEMORY in str(one.readlink()):
                found.add(one.stat().st_ino)
    return found


def pieces_of(process: int, addresses: range) -> list[int]:
    """Memory of the machine's GPUs that a process maps there: inode numbers, by addresses."""
    found = []
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        span, *_, inode = line.split()[:5]
        if MEMORY in line and int(span.split("-")[0], 16) in addresses:
            found.append(int(inode))
    return found


def device_of(address: int) -> int:
    """Whose memory that is."""
    found = ctypes.c_int()
    ordinal = 9
    assert not library().cuPointerGetAttribute(
        ctypes.byref(found), ctypes.c_int(ordinal), ctypes.c_void_p(address)
    )
    return found.value


def fail(name: str) -> None:
    """Let the driver's function of that name fail from now on; empty: none."""
    library().fakegpu_fail(name.encode())


def _forget() -> None:
    for cached in (driver._initialised, cuda.kernels_on, select._chosen):
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()


class OlderLibrary:
    """A driver's library without one of its functions."""

    def __init__(self, library: Any, lacks: str) -> None:
        self._library = library
        self._lacks = lacks

    def __getattr__(self, name: str) -> Any:
        if name == self._lacks:
            raise AttributeError(name)
        return getattr(self._library, name)


class FakeGpu(CudaDriver):
    """One of the two devices. Use it while the library is `installed`."""

    def __init__(self, device: int = 0) -> None:
        super().__init__(device)
        self.pins = 0
        self.moved: list[tuple[str, int, int]] = []
        """Copies that were queued: upload or download, the host's address, bytes."""
        self._kept: list[object] = []

    def upload(self, device: int, pinned: int, nbytes: int, stream: int) -> None:
        self.moved.append(("upload", pinned, nbytes))
        super().upload(device, pinned, nbytes, stream)

    def download(self, pinned: int, device: int, nbytes: int, stream: int) -> None:
        self.moved.append(("download", pinned, nbytes))
        super().download(pinned, device, nbytes, stream)

    def pin(self, address: int, nbytes: int, read_only: bool) -> None:
        super().pin(address, nbytes, read_only)
        self.pins += 1

    # -- what only tests do

    def lose(self, function: str) -> None:
        """Have an older driver, which lacks a function."""
        self._library = OlderLibrary(self._library, function)  # type: ignore[assignment]

    def stick(self, stuck: bool = True) -> None:
        """Nothing that is queued happens, until it is taken back."""
        library().fakegpu_stick(stuck)

    def queue(self, stream: int, work: Callable[[], object]) -> None:
        """A piece of the stream's work in Python."""
        function = _HostFunction(lambda _: work() and None)
        self._kept.append(function)
        self.call("cuLaunchHostFunc", ctypes.c_void_p(stream), function, None)

    def pending(self, stream: int) -> int:
        """What is queued and not done."""
        return int(library().fakegpu_pending(stream))

    def sms(self, stream: int) -> set[int]:
        """Those that work on the stream gets."""
        bits = int(library().fakegpu_sms(stream))
        return {number for number in range(64) if bits >> number & 1}

    def priority(self, stream: int) -> int:
        found = ctypes.c_int()
        self.call("cuStreamGetPriority", ctypes.c_void_p(stream), ctypes.byref(found))
        return found.value


class Launches(CudaLibrary):
    """The CUDA kernels; launches are noted."""

    def __init__(self) -> None:
        super().__init__(library())
        self.fails_after = -1
        """Launches until one fails; negative: none does."""
        self.workers: list[int] = []
        self.on: list[int] = []
        """Streams of the launches, one each."""
        self.by_tma = 0

    def copy(self, *arguments: int) -> None:
        self._note(*arguments)
        super().copy(*arguments)

    def copy_tma(self, *arguments: int) -> None:
        if any(arguments):  # else it is asked for only
            self._note(*arguments)
            self.by_tma += 1
        super().copy_tma(*arguments)

    def _note(self, *arguments: int) -> None:
        if self.fails_after == 0:
            raise KvmigError("launch: out of luck")
        self.fails_after -= 1
        *_, stream, workers = arguments
        self.workers.append(workers)
        self.on.append(stream)


class FakeKernels(GpuKernels):
    """On a device of the tests' own."""

    def __init__(self, gpu: CudaDriver) -> None:
        self.launches = Launches()
        super().__init__(self.launches, gpu)


class DeviceCache:
    """A cache as `poisoned` makes it, in a device's memory."""

    def __init__(self, gpu: FakeGpu, cache: Cache) -> None:
        self._gpu, self._cache = gpu, cache
        self.nbytes = cache.memory.nbytes
        self.address = gpu.allocate(self.nbytes)
        gpu.write(self.address, cache.memory.tobytes())

    @property
    def layout(self) -> KVLayout:
        shift = self.address - self._cache.memory.ctypes.data
        regions = (replace(one, base=one.base + shift) for one in self._cache.layout.regions)
        return replace(self._cache.layout, regions=tuple(regions), gpu=self._gpu.ordinal)

    def expected(self, blocks: dict[int, bytes]) -> NDArray[np.uint8]:
        """All of its memory, with these blocks where they are written."""
        memory = self._cache.memory.copy()
        for number, fused in blocks.items():
            self._cache.with_block(memory, number, fused)
        return memory

    def memory(self) -> NDArray[np.uint8]:
        """As it is now."""
        return np.frombuffer(self._gpu.read(self.address, self.nbytes), np.uint8)

    def free(self) -> None:
        self._gpu.free(self.address)


HANDLE_BYTES = 20 << 20
"""One piece of a segment's physical memory."""


@contextlib.contextmanager
def segment(gpu: FakeGpu, handles: int) -> Iterator[int]:
    """Neighbouring addresses over several pieces of physical memory, as torch's allocator makes
    them (expandable segments)."""
    with contextlib.ExitStack() as held:
        size, address, access = c_size_t(HANDLE_BYTES), c_void_p(), ipc._Access()
        access.location, access.flags = ipc._Location(1, gpu.ordinal), 3
        wanted = ipc._Properties(type=1, location=access.location)
        whole, nothing = c_size_t(handles * HANDLE_BYTES), c_uint64(0)
        anywhere = c_size_t(0), c_void_p(0), nothing
        gpu.call("cuMemAddressReserve", byref(address), whole, *anywhere)
        held.callback(gpu.call, "cuMemAddressFree", address, whole)
        for number in range(handles):
            handle, here = c_uint64(), c_void_p((address.value or 0) + number * HANDLE_BYTES)
            gpu.call("cuMemCreate", byref(handle), size, byref(wanted), nothing)
            gpu.call("cuMemMap", here, size, c_size_t(0), handle, nothing)
            gpu.call("cuMemRelease", handle)
            held.callback(gpu.call, "cuMemUnmap", here, size)
            gpu.call("cuMemSetAccess", here, size, byref(access), c_size_t(1))
        yield int(address.value or 0)
