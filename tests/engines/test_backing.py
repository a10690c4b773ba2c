"""Pages of a KV cache, given back and taken again: in this process, and on the tests' GPUs."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence

import pytest

from kvmig.core.errors import KvmigError, UnsupportedLayout
from kvmig.core.layout import BlockRegion
from kvmig.engines.backing import MadviseBacking, VmmBacking, group_of, spans
from kvmig.kernels.copy import address_of
from kvmig.kernels.driver import CudaDriver
from kvmig.kernels.vmm import AddressRange
from tests.support import fake_gpu

PAGE = mmap.PAGESIZE
LAYERS, BLOCKS = 3, 16


def regions(base: int, block: int, blocks: int = BLOCKS) -> tuple[BlockRegion, ...]:
    return tuple(BlockRegion(base + one * blocks * block, block, block) for one in range(LAYERS))


def test_the_memory_of_blocks_is_told_in_as_few_spans_as_there_are() -> None:
    found = list(spans(regions(0, 100)[:2], 2, [3, 1, 2, 6]))
    assert found == [(200, 600), (1200, 200), (1800, 600), (2800, 200)]


@pytest.mark.parametrize(("block", "group"), [(PAGE, 1), (4 * PAGE, 1), (PAGE // 4, 4), (1024, 4)])
def test_blocks_that_share_a_page_are_a_group(block: int, group: int) -> None:
    assert group_of(regions(0, block), BLOCKS, PAGE) == group


@pytest.mark.parametrize(("base", "block"), [(8, PAGE), (0, 24), (PAGE, 3 * 128)])
def test_blocks_that_fill_no_pages_cannot_be_given_back(base: int, block: int) -> None:
    with pytest.raises(UnsupportedLayout, match="don't fill pages of 4096 bytes"):
        group_of(regions(base, block), BLOCKS, PAGE)


class Host:
    def __init__(self, block: int) -> None:
        self.block = block
        self.memory = mmap.mmap(-1, LAYERS * BLOCKS * block, flags=mmap.MAP_PRIVATE | 0x20)
        self.view = memoryview(self.memory)
        self.base = address_of(self.view)
        self.backing = MadviseBacking(regions(self.base, block), BLOCKS)

    def resident(self) -> int:
        """Pages."""
        pages = (ctypes.c_ubyte * (len(self.view) // PAGE))()
        size = ctypes.c_size_t(len(self.view))
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(self.base), size, pages) == 0
        return sum(page & 1 for page in pages)

    def of(self, block: int) -> set[int]:
        """The bytes of a block."""
        first = [(layer * BLOCKS + block) * self.block for layer in range(LAYERS)]
        return {byte for one in first for byte in self.view[one : one + self.block]}

    def close(self) -> None:
        self.view.release()
        self.memory.close()


@pytest.fixture(params=[2 * PAGE, PAGE // 4], ids=["alone", "in groups"])
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    made = Host(request.param)
    yield made
    made.close()


def test_given_pages_leave_this_process_and_the_others_stay_as_they_are(host: Host) -> None:
    assert host.resident() == 0
    host.view[:] = b"\7" * len(host.view)
    whole = host.resident()
    size = host.backing.group
    gone = [1, 3]
    host.backing.give_pages(gone)
    assert host.resident() * PAGE == whole * PAGE - len(gone) * host.backing.group_bytes
    for block in range(BLOCKS):
        assert host.of(block) == ({0} if block // size in gone else {7})
    host.backing.take_pages(gone)
    host.view[:] = b"\1" * len(host.view)
    assert host.resident() == whole


# -- a GPU


@pytest.fixture
def gpu() -> Iterator[CudaDriver]:
    with fake_gpu.installed():
        yield CudaDriver()


def on(addresses: AddressRange) -> VmmBacking:
    return VmmBacking(addresses, regions(addresses.address, addresses.page), BLOCKS)


def test_a_gpus_pages_come_and_go_behind_the_same_addresses(gpu: CudaDriver) -> None:
    before = fake_gpu.held()
    addresses = AddressRange(gpu, LAYERS * BLOCKS * 10)
    addresses.close()
    addresses = AddressRange(gpu, LAYERS * BLOCKS * addresses.page)
    backing = on(addresses)
    assert fake_gpu.held()["memory"] == before["memory"]
    backing.take_pages([0, 1, 5])
    assert fake_gpu.held()["memory"] == before["memory"] + 3 * LAYERS
    at = addresses.address + 5 * addresses.page
    gpu.write(at, b"here")
    backing.give_pages([1])
    assert fake_gpu.held()["memory"] == before["memory"] + 2 * LAYERS
    assert gpu.read(at, 4) == b"here"
    backing.take_pages([1, 5])
    assert gpu.read(at, 4) == b"here"
    assert not any(gpu.read(addresses.address + addresses.page, addresses.page)), "as vLLM wants it"
    gpu.write(addresses.address + addresses.page, b"anew")
    backing.give_pages([0, 1, 2, 5])
    assert fake_gpu.held()["memory"] == before["memory"]
    addresses.close()
    assert fake_gpu.held() == before


def test_an_access_to_a_page_that_is_not_there_is_refused(gpu: CudaDriver) -> None:
    addresses = AddressRange(gpu, LAYERS * BLOCKS)
    with pytest.raises(KvmigError):
        gpu.write(addresses.address, b"none")
    addresses.close()


def test_one_page_of_memory_may_be_behind_all_addresses(gpu: CudaDriver) -> None:
    addresses = AddressRange(gpu, LAYERS * BLOCKS << 20)
    first, last = addresses.pages[0], addresses.pages[-1]
    addresses.cover()
    (one,) = fake_gpu.memory_of(os.getpid())
    assert not any(gpu.read(last, addresses.page))
    gpu.write(last, b"anything")
    assert gpu.read(first, 8) == b"anything"
    addresses.drop(addresses.pages)
    assert not fake_gpu.memory_of(os.getpid())
    addresses.put([last])
    assert fake_gpu.memory_of(os.getpid()) != {one}
    assert not any(gpu.read(last, addresses.page))
    with pytest.raises(KvmigError):
        gpu.write(first, b"none")
    addresses.close()


def test_a_gpu_without_memory_leaves_none_of_what_was_asked_for(
    gpu: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fake_gpu.held()
    page = AddressRange(gpu, 1)
    addresses = AddressRange(gpu, LAYERS * BLOCKS * page.page)
    page.close()
    backing, real, left = on(addresses), addresses.map_pages, [2]

    def mapped(pages: Sequence[int]) -> None:
        left[0] -= 1
        if left[0] < 0:
            fake_gpu.fail("cuMemCreate")
        real(pages)

    monkeypatch.setattr(addresses, "map_pages", mapped)
    with pytest.raises(KvmigError, match="cuMemCreate"):
        backing.take_pages([0])
    assert not addresses.there
    addresses.close()
    fake_gpu.library().fakegpu_mend()
    assert fake_gpu.held() == before
