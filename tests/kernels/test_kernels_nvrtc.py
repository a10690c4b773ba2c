"""Launches through CuPy, with a CuPy of the tests' own: what reaches the kernels, and on what."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvmig.core.errors import KernelUnavailable
from kvmig.core.layout import BlockRegion
from kvmig.kernels import build, nvrtc
from kvmig.kernels.api import BlockCopy
from kvmig.kernels.gpu import GpuKernels
from tests.support.fake_gpu import FakeGpu

CTYPES = {"int64_t": np.int64, "int32_t": np.int32}
"""Of parameters; an address is 64 bits as well."""
REGIONS = (BlockRegion(4096, 64, 64),)
IDS = np.zeros(1, np.int64)
BLOCKS = BlockCopy(REGIONS, REGIONS, IDS, IDS)


class FakeCupy(ModuleType):
    """Notes launches. `broken`: compiling fails."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__("cupy")
        self.broken = broken
        self.launches: list[tuple[str, Any, Any, tuple[Any, ...], int]] = []
        self.streams: list[int] = []
        self.cuda = ModuleType("cupy.cuda")
        self.cuda.Device = self.cuda.ExternalStream = self.entered  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def entered(self, number: int) -> Iterator[None]:
        self.streams.append(number)
        yield
        self.streams.pop()

    def RawModule(self, code: str, options: tuple[str, ...], backend: str) -> FakeCupy:  # noqa: N802
        if self.broken:
            raise RuntimeError("NVRTC is out of luck")
        assert (code, options, backend) == (nvrtc.source(), nvrtc.options(), "nvrtc")
        return self

    def get_function(self, name: str) -> Any:
        def launch(grid: Any, block: Any, arguments: tuple[Any, ...]) -> None:
            self.launches.append((name, grid, block, arguments, self.streams[-1]))

        return launch


class ClearedGpu(FakeGpu):
    """A device of two SMs, which notes what is cleared."""

    def clear(self, device: int, nbytes: int, stream: int) -> None:
        self.cleared = nbytes
        super().clear(device, nbytes, stream)


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cupy, self.driver = FakeCupy(), ClearedGpu()
        self.stream = self.driver.new_stream()
        monkeypatch.setitem(sys.modules, "cupy", self.cupy)
        self.kernels = GpuKernels(nvrtc.CupyLauncher(self.driver), self.driver)


@pytest.fixture
def world(gpus: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(monkeypatch)
    yield world
    for stream in (world.stream, 0):
        world.driver.finish(stream)
    world.kernels.close()
    world.driver.destroy_stream(world.stream)


def parameters(kernel: str) -> list[Any]:
    """Types of a kernel's parameters, as its header declares them."""
    text = "".join((build.CSRC / name).read_text() for name in nvrtc.HEADERS)
    copies = re.search(r"#define KVMIG_COPIES(.*?)\n\n", text, re.DOTALL)
    assert copies
    text = text.replace("(KVMIG_COPIES)", f"({copies.group(1)})")
    declared = re.search(rf"\b{kernel}\((.*?)\)", text, re.DOTALL)
    assert declared
    return [
        np.int64 if "*" in one else CTYPES[one.replace("\\", "").split()[0]]
        for one in declared.group(1).split(",")
    ]


def launch_all(world: World, workers: int) -> None:
    on = {"stream": world.stream, "workers": workers}
    by = world.kernels
    by.copy(BLOCKS, checksums=False, **on)
    by.copy(BLOCKS, checksums=True, **on)
    by.checksum(REGIONS, IDS, **on)


def test_every_kernel_gets_what_its_header_declares(world: World) -> None:
    launch_all(world, 3)
    launched = {name: [type(one) for one in given] for name, _, _, given, _ in world.cupy.launches}
    assert launched == {name: parameters(name) for name in nvrtc.GEOMETRY}


def test_launches_are_on_the_callers_stream_with_as_many_ctas_as_it_allows(world: World) -> None:
    launch_all(world, 3)
    assert {(grid, stream) for _, grid, _, _, stream in world.cupy.launches} == {
        ((3,), world.stream)
    }


def test_as_many_ctas_as_fit_the_device_unless_the_caller_says(world: World) -> None:
    launch_all(world, 0)
    sizes = {name: (grid[0], block[0]) for name, grid, block, _, _ in world.cupy.launches}
    assert sizes["kvmig_copy_kernel"] == (4, 256)


def test_checksums_start_at_zero(world: World) -> None:
    world.kernels.checksum(REGIONS, np.zeros(5, np.int64))
    assert world.driver.cleared == 40


def test_the_tma_is_for_the_compiled_library(world: World) -> None:
    with pytest.raises(KernelUnavailable, match="need the library that nvcc builds"):
        world.kernels.copy_tma(BLOCKS, checksums=False)


def test_without_cupy_the_package_is_named(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(nvrtc, "version", lambda: 13000)
    with pytest.raises(KernelUnavailable, match="cupy-cuda13x can't be imported"):
        nvrtc.CupyLauncher(FakeGpu())


def test_kernels_that_cupy_cannot_compile_are_not_available(
    gpus: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy(broken=True))
    with pytest.raises(KernelUnavailable, match="NVRTC is out of luck"):
        nvrtc.CupyLauncher(FakeGpu())
