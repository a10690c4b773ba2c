"""Addresses of a GPU's memory behind which pages come and go, by the driver's virtual memory.

All functions raise KvmigError with the driver's words.
"""

from __future__ import annotations

from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

from kvmig.kernels import ipc
from kvmig.kernels.driver import Driver


class Addresses:
    """`size` bytes of addresses from `address` on, of which pages of `page` bytes may be there."""

    def __init__(self, driver: Driver, nbytes: int) -> None:
        """As many bytes, or a little more; none of them has memory."""
        self._driver = driver
        self._wanted = ipc.properties(driver)
        grain = c_size_t()
        driver.call("cuMemGetAllocationGranularity", byref(grain), byref(self._wanted), c_int(0))
        self.page = grain.value
        self.size = -(-nbytes // self.page) * self.page
        address, nothing = c_void_p(), c_uint64(0)
        length, anywhere = c_size_t(self.size), (c_size_t(0), c_void_p(0), nothing)
        driver.call("cuMemAddressReserve", byref(address), length, *anywhere)
        self.address = int(address.value or 0)
        self.there: set[int] = set()
        """Addresses of the pages that have memory."""

    def put(self, page: int) -> None:
        """Have memory behind the page at this address, and let the device use it."""
        if page in self.there:
            return
        handle, size = c_uint64(), c_size_t(self.page)
        nothing = c_uint64(0)
        self._driver.call("cuMemCreate", byref(handle), size, byref(self._wanted), nothing)
        try:
            self._driver.call("cuMemMap", c_void_p(page), size, c_size_t(0), handle, nothing)
        finally:
            self._driver.call("cuMemRelease", handle)  # a mapping keeps the memory
        self.there.add(page)
        ipc.let(self._driver, ipc.Mapping(page, self.page))

    def drop(self, page: int) -> None:
        """Give the memory behind it back. The device must have done what it was told there."""
        if page in self.there:
            self._driver.call_outside("cuMemUnmap", c_void_p(page), c_size_t(self.page))
            self.there.remove(page)

    def close(self) -> None:
        """Give all back, on whatever thread; nobody may use the addresses any more."""
        for page in sorted(self.there):
            self.drop(page)
        there = c_void_p(self.address), c_size_t(self.size)
        self._driver.call_outside("cuMemAddressFree", *there)
