"""Weights that are read into the page cache while a model starts."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from kvmig.core.errors import ConfigError
from kvmig.core.storage_reads import StorageReads
from kvmig.fleet.managed_model import DeploymentRecord
from kvmig.fleet.orders import Program, StartDeployment
from kvmig.fleet.read_ahead import WeightsReader, read_weights, weights_folder
from tests.support.hung_files import HungFile


@pytest.fixture
async def reader() -> AsyncIterator[WeightsReader]:
    made = WeightsReader(lambda: 1 << 30)
    yield made
    await made.close()


def make_files(folder: Path, **sizes: int) -> None:
    for name, size in sizes.items():
        (folder / name.replace("_", ".")).write_bytes(bytes(size))


async def test_whole_files_with_weights_are_read_as_far_as_memory_goes(tmp_path: Path) -> None:
    make_files(tmp_path, a_safetensors=5000, b_safetensors=6000, c_safetensors=1, d_json=100)
    ends = threading.Event()
    assert read_weights(tmp_path, 20_000, ends) == 11_001
    assert read_weights(tmp_path, 10_999, ends) == 5000
    assert read_weights(tmp_path, 10, ends) == 0
    ends.set()
    assert read_weights(tmp_path, 20_000, ends) == 0


async def test_a_model_that_is_a_file_is_read(reader: WeightsReader, tmp_path: Path) -> None:
    make_files(tmp_path, a_gguf=5000)
    assert await reader.begin(str(tmp_path / "a.gguf")) == 5000


async def test_several_models_are_read_one_after_the_other(
    reader: WeightsReader, tmp_path: Path
) -> None:
    make_files(tmp_path, a_safetensors=5000)
    found = await asyncio.gather(*(reader.begin(str(tmp_path)) for _ in range(3)))
    assert found == [5000] * 3


@pytest.mark.parametrize("broken", ["folder", "memory"])
async def test_what_can_not_be_read_is_left_to_the_start(broken: str, tmp_path: Path) -> None:
    def available() -> int:
        if broken == "memory":
            raise ConfigError("no /proc/meminfo")
        return 1 << 30

    reader = WeightsReader(available)
    assert await reader.begin(str(tmp_path / "none")) == 0
    await reader.close()


async def test_weights_are_in_the_page_cache_after_it(
    reader: WeightsReader, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(os.urandom(8 << 20))
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    if held_pages(descriptor) > 100:
        os.close(descriptor)
        pytest.skip("this file system keeps its pages")
    assert await reader.begin(str(tmp_path)) == 8 << 20
    assert held_pages(descriptor) == (8 << 20) // mmap.PAGESIZE
    os.close(descriptor)


def held_pages(descriptor: int) -> int:
    """Pages of a file in the page cache."""
    size = os.fstat(descriptor).st_size
    with mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        held = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        assert mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), held) == 0
        del first
    return sum(one & 1 for one in held)


def start(note: object, program: Program = "serve", engine: str = "vllm") -> StartDeployment:
    return StartDeployment("d", engine, (), msgspec.json.encode(note).decode(), "log", program)


def test_the_folder_is_that_of_a_model_on_this_host() -> None:
    here = DeploymentRecord("m", "a", 1, "socket", folder="/models/a")
    there = DeploymentRecord("m", "a", 1, "socket", folder="/models/a", nodes={"i0": "node"})
    assert weights_folder(start(here)) == "/models/a"
    assert weights_folder(start(there)) == ""
    assert weights_folder(start(here, engine="toy")) == ""
    assert weights_folder(start({}, "unit")) == ""


async def test_weights_whose_storage_hangs_are_given_up_and_the_next_ones_are_read(
    tmp_path: Path,
) -> None:
    far, near = tmp_path / "far", tmp_path / "near"
    for folder in (far, near):
        folder.mkdir()
    hung = HungFile(far / "a.safetensors")
    make_files(near, a_safetensors=5000)
    reader = WeightsReader(lambda: 1 << 30, StorageReads(silent_s=0.3))
    try:
        coming = [reader.begin(str(one)) for one in (far, near)]
        assert await asyncio.gather(*coming) == [0, 5000]
    finally:
        hung.release()
        await reader.close()
