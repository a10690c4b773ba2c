"""The driver's calls, against a driver of the tests' own that takes what the real one would."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvmig.ground.errors import KernelUnavailable, KvmigError
from kvmig.kernels import driver
from kvmig.kernels.cuda import Library
from kvmig.kernels.driver import Driver
from kvmig.kernels.gpu import GpuKernels
from tests import emulated_cuda
from tests.kernel_backends import ORACLE
from tests.poisoned import make_cache

FAILURE, NO_GPU = "KVMIG_EMULATED_FAILURE", "KVMIG_EMULATED_NO_GPU"


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = emulated_cuda.EMULATION / "libcuda.cpp"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True, timeout=120)
    return library


@pytest.fixture(autouse=True)
def own_driver(libcuda: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(driver, "LIBRARY", str(libcuda))
    driver._initialised.cache_clear()
    yield
    driver._initialised.cache_clear()


def test_blocks_are_copied_through_all_of_the_gpus_path() -> None:
    library = Library(emulated_cuda.library())
    device = Driver()
    kernels = GpuKernels(library, device)
    stream = device.new_stream(priority=-5)
    source, target = (make_cache(seed, [48, 4096], [0, 16], 4) for seed in (1, 2))
    ids = np.array([1, 2], np.int64), np.array([3, 0], np.int64)
    ends = source.layout.regions, target.layout.regions
    call = kernels.copy(*ends, *ids, checksums=True, stream=stream)
    assert not call.done()
    assert call.wait() == ORACLE.checksum(source.layout.regions, ids[0]).wait()
    assert target.block(3) == source.block(1)
    kernels.close()
    device.destroy_stream(stream)


def test_the_end_of_a_call_may_be_awaited_by_another_thread() -> None:
    device, outcomes = Driver(), list[bool]()
    device.enter()
    event = device.new_event()
    device.record(event, 0)

    def ask() -> None:
        outcomes.extend(device.happened(event) for _ in range(3))
        device.destroy_event(event)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(10)
    assert outcomes == [False, False, True]


def test_the_device_says_what_it_is() -> None:
    device = Driver()
    assert driver.version() == 13000
    assert (device.capability, device.multiprocessors) == ((9, 0), 132)
    assert device.stream_priorities() == (0, -5)
    assert driver.current_device() == 0


def test_memory_is_cleared_and_given_back() -> None:
    device = Driver()
    address = device.allocate(16)
    ctypes.memset(address, 1, 16)
    device.clear(address, 15, 0)
    assert ctypes.string_at(address, 16) == bytes(15) + b"\x01"
    device.free(address)
    with pytest.raises(KvmigError, match=r"cuMemFree_v2: invalid argument \(CUDA error 1\)"):
        device.free(address)


def test_memory_of_the_host_is_pinned_where_it_is() -> None:
    device, memory = Driver(), ctypes.create_string_buffer(64)
    address = ctypes.addressof(memory)
    device.pin(address, 64, read_only=False)
    with pytest.raises(KvmigError, match="cuMemHostRegister_v2"):
        device.pin(address, 64, read_only=True)
    device.unpin(address)
    device.pin(address, 64, read_only=True)
    device.unpin(address)
    with pytest.raises(KvmigError, match="cuMemHostUnregister"):
        device.unpin(address)


def test_a_stream_waits_for_an_event_of_another() -> None:
    device = Driver()
    first, second, event = device.new_stream(), device.new_stream(), device.new_event()
    device.record(event, first)
    device.wait(second, event)
    with pytest.raises(KvmigError, match="cuStreamWaitEvent: invalid argument"):
        device.wait(second, event + 8)
    device.destroy_event(event)
    device.destroy_stream(first)
    device.destroy_stream(second)


def test_a_call_that_fails_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Driver()
    monkeypatch.setenv(FAILURE, "cuMemHostAlloc")
    with pytest.raises(KvmigError, match="cuMemHostAlloc: invalid argument"):
        device.allocate_pinned(8)


def test_a_device_that_is_not_there_cannot_be_used() -> None:
    with pytest.raises(KernelUnavailable, match="GPU 7 can't be used: cuDeviceGet"):
        Driver(7)


def test_a_driver_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NO_GPU, "1")
    with pytest.raises(KernelUnavailable, match=r"no NVIDIA GPU can be used: no CUDA-capable"):
        Driver()


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libcuda-that-is-nowhere.so.1")
    with pytest.raises(KernelUnavailable, match="no NVIDIA driver: libcuda-that-is-nowhere"):
        driver.version()
