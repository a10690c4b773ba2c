"""Addresses of a GPU's memory behind which pages come and go, by the driver's virtual memory.

All functions raise KvmigError with the driver's words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

from kvmig.core.errors import KvmigError
from kvmig.kernels import ipc
from kvmig.kernels.driver import CudaDriver


def page_bytes(driver: CudaDriver) -> int:
    """Size of the smallest page that can be mapped and unmapped."""
    grain, wanted = c_size_t(), ipc.properties(driver)
    driver.call("cuMemGetAllocationGranularity", byref(grain), byref(wanted), c_int(0))
    return grain.value


class AddressRange:
    """`size` bytes of addresses from `address` on, of which pages of `page` bytes may be there."""

    def __init__(self, driver: CudaDriver, nbytes: int) -> None:
        """Reserve addresses of that many bytes, or a little more; none of them has memory."""
        self.driver = driver
        self._wanted = ipc.properties(driver)
        self.page = page_bytes(driver)
        self.size = -(-nbytes // self.page) * self.page
        address, nothing = c_void_p(), c_uint64(0)
        length, anywhere = c_size_t(self.size), (c_size_t(0), c_void_p(0), nothing)
        driver.call("cuMemAddressReserve", byref(address), length, *anywhere)
        self.address = int(address.value or 0)
        self.there: set[int] = set()
        """Addresses of the pages that have memory, of their own or for now."""

    @property
    def pages(self) -> range:
        """Addresses of all pages."""
        return range(self.address, self.address + self.size, self.page)

    def cover(self) -> None:
        """Have one page of zeros behind all that have none: any may be written, and none keeps
        what is."""
        there = [page for page in self.pages if page not in self.there]
        self.map_pages(there)
        self._clear(there[:1])

    def put(self, pages: Iterable[int]) -> None:
        """Have zeros behind each page at these addresses, which the device may use. Where the
        device has no memory left, none of them is there."""
        came: list[int] = []
        try:
            for page in pages:
                if page not in self.there:
                    self.map_pages([page])
                    came.append(page)
            self._clear(came)
        except KvmigError:
            self.drop(came)
            raise

    def drop(self, pages: Iterable[int]) -> None:
        """Give the memory behind them back. The device must have done all its work there."""
        for page in self.there.intersection(pages):
            self.driver.call_outside("cuMemUnmap", c_void_p(page), c_size_t(self.page))
            self.there.remove(page)

    def close(self) -> None:
        """Give all back, on any thread; the addresses may not be used any more."""
        self.drop(self.pages)
        there = c_void_p(self.address), c_size_t(self.size)
        self.driver.call_outside("cuMemAddressFree", *there)

    def map_pages(self, pages: Sequence[int]) -> None:
        """Have one new page of memory behind all of these, or behind none."""
        handle, size = c_uint64(), c_size_t(self.page)
        nothing, came = c_uint64(0), list[int]()
        self.driver.call("cuMemCreate", byref(handle), size, byref(self._wanted), nothing)
        try:
            for page in pages:
                self.driver.call("cuMemMap", c_void_p(page), size, c_size_t(0), handle, nothing)
                self.there.add(page)
                came.append(page)
                ipc.let(self.driver, ipc.DeviceMapping(page, self.page))
        except KvmigError:
            self.drop(came)
            raise
        finally:
            self.driver.call("cuMemRelease", handle)  # a mapping keeps the memory

    def _clear(self, pages: Sequence[int]) -> None:
        """vLLM wants zeros where nothing was written: attention weighs what it masks by 0, and
        0 times what another process has left there may be no number."""
        stream = self.driver.new_stream()
        try:
            for page in pages:
                self.driver.clear(page, self.page, stream)
            self.driver.finish(stream)
        finally:
            self.driver.destroy_stream(stream)
