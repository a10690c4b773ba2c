"""Sharing memory and the copy engine: csrc/memory.cu and engine.cu, over a driver on the host."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvmig.ground.errors import KernelUnavailable, KvmigError
from kvmig.kernels import cuda, ipc
from tests import emulated_cuda
from tests.poisoned import make_cache

FAILURE, WITHOUT = "KVMIG_EMULATED_FAILURE", "KVMIG_EMULATED_WITHOUT"
SIZE = 2 << 20


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """CUDA's, in place of the compiled one."""
    loaded = emulated_cuda.library()
    loaded.emulated_malloc.restype = loaded.emulated_map.restype = ctypes.c_void_p
    monkeypatch.setattr(cuda, "library", lambda: loaded)
    monkeypatch.setattr(ipc, "library", lambda: loaded)
    monkeypatch.delenv(FAILURE, raising=False)
    return loaded


@pytest.fixture
def mapped(library: ctypes.CDLL) -> Iterator[int]:
    """The address of a VMM mapping. After the test, all that was taken is back."""
    address = int(library.emulated_map(ctypes.c_size_t(SIZE)))
    before = held(library)
    yield address
    assert held(library) == before


def held(library: ctypes.CDLL) -> tuple[int, int]:
    """Handles and mappings of the driver, and descriptors of the process."""
    return int(library.emulated_held()), len(list(Path("/proc/self/fd").iterdir()))


def test_an_allocation_is_named_with_the_place_in_it(library: ctypes.CDLL) -> None:
    base = int(library.emulated_malloc(ctypes.c_size_t(4096)))
    exported = ipc.export_ipc(base + 512)
    assert (len(exported.handle), exported.offset) == (ipc.HANDLE_BYTES, 512)
    opened = ipc.import_ipc(exported)
    assert opened == base
    ipc.close_ipc(opened)


def test_a_handle_that_means_nothing_is_an_error() -> None:
    with pytest.raises(KvmigError, match="CUDA error 1"):
        ipc.import_ipc(ipc.IpcHandle(bytes(ipc.HANDLE_BYTES), 0))


def test_a_mapping_is_the_same_memory_at_both_addresses(mapped: int) -> None:
    exported = ipc.export_vmm(mapped + 4096)
    assert (exported.size, exported.offset) == (SIZE, 4096)
    base = ipc.import_vmm(exported.descriptor, exported.size)
    os.close(exported.descriptor)
    ctypes.memmove(base + exported.offset, b"same", 4)
    assert ctypes.string_at(mapped + 4096, 4) == b"same"
    ipc.close_vmm(base, exported.size)


@pytest.mark.parametrize(
    "step",
    [
        "cuMemRetainAllocationHandle",
        "cuPointerGetAttribute",
        "cuMemExportToShareableHandle",
        "cuMemRelease",
    ],
)
def test_an_export_that_fails_keeps_nothing(
    mapped: int, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setenv(FAILURE, step)
    with pytest.raises(KvmigError, match="CUDA error 1"):
        ipc.export_vmm(mapped)


@pytest.mark.parametrize(
    "step", ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemRelease"]
)
def test_an_import_that_fails_keeps_nothing(
    mapped: int, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    exported = ipc.export_vmm(mapped)
    monkeypatch.setenv(FAILURE, step)
    with pytest.raises(KvmigError, match="CUDA error 1"):
        ipc.import_vmm(exported.descriptor, exported.size)
    os.close(exported.descriptor)


def test_a_descriptor_that_is_closed_is_an_error(mapped: int) -> None:
    exported = ipc.export_vmm(mapped)
    os.close(exported.descriptor)
    with pytest.raises(KvmigError, match="CUDA error 1"):
        ipc.import_vmm(exported.descriptor, exported.size)


@pytest.mark.parametrize(("descriptor", "size"), [(-1, SIZE), (0, 0)])
def test_what_cannot_be_a_mapping_is_refused(descriptor: int, size: int) -> None:
    with pytest.raises(ValueError, match="refused"):
        ipc.import_vmm(descriptor, size)


def test_a_driver_that_is_too_old_is_named_so(mapped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WITHOUT, "cuMemRetainAllocationHandle")
    with pytest.raises(KernelUnavailable, match="can't do this"):
        ipc.export_vmm(mapped)


# -- the copy engine


def test_the_copy_engine_copies_every_run() -> None:
    source, target = (make_cache(seed, [48, 0, 7], [0, 8, 1], 4) for seed in (1, 2))
    expected = target.memory.copy()
    for source_id, target_id in ((3, 0), (3, 2), (1, 1)):
        target.with_block(expected, target_id, source.block(source_id))
    ids = np.array([3, 3, 1], np.int64), np.array([0, 2, 1], np.int64)
    cuda.copy_engine(source.layout.regions, target.layout.regions, *ids, stream=1)
    assert np.array_equal(target.memory, expected)


def test_a_driver_without_batched_copies_is_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WITHOUT, "cuMemcpyBatchAsync")
    source = make_cache(1, [16], [0], 2)
    ids = np.array([0], np.int64), np.array([1], np.int64)
    with pytest.raises(KernelUnavailable, match="can't do this"):
        cuda.copy_engine(source.layout.regions, source.layout.regions, *ids, stream=1)


def test_an_error_of_the_copy_engine_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILURE, "cuMemcpyBatchAsync")
    source = make_cache(1, [16], [0], 2)
    ids = np.array([0], np.int64), np.array([1], np.int64)
    with pytest.raises(KvmigError, match="CUDA error 1"):
        cuda.copy_engine(source.layout.regions, source.layout.regions, *ids, stream=1)
