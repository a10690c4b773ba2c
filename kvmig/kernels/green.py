"""Streams whose work keeps to some of a GPU's SMs: green contexts of NVIDIA's driver (CUDA 12.5).

Such a stream has the memory, the modules and the events of the device's primary context, which
stays the calling thread's: its SMs are all that differs. Work that is captured there into a graph
keeps to them on any stream that the graph is launched on (CUDA Programming Guide, 4.6).

All functions raise KvmigError with the driver's words.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int, c_ubyte, c_uint, c_void_p

from kvmig.core.errors import KvmigError
from kvmig.kernels.driver import CudaDriver

_SMS, _DEFAULT_STREAM, _NON_BLOCKING = 1, 1, 1
"""CU_DEV_RESOURCE_TYPE_SM, CU_GREEN_CTX_DEFAULT_STREAM, CU_STREAM_NON_BLOCKING."""
_MPS_ENABLED = 133


class SmResource(ctypes.Structure):
    """CUdevResource, of SMs; filled by the driver alone."""

    _fields_ = (
        ("kind", c_int),
        ("inside", c_ubyte * 92),
        ("sms", c_uint),
        ("rest", c_ubyte * 36),
        ("next", c_void_p),
    )


def under_mps(driver: CudaDriver) -> bool:
    """Whether other processes' work runs along with this one's on the device, by a daemon of
    MPS."""
    return bool(driver.attribute(_MPS_ENABLED))


def smallest_groups(driver: CudaDriver) -> list[SmResource]:
    """The device's SMs in groups as small as it has them, all of one size: 8 SMs on sm_90, 4 on
    sm_80. A few SMs may be in none."""
    whole, count = SmResource(), c_uint()
    driver.call("cuDeviceGetDevResource", _device(driver), byref(whole), c_int(_SMS))
    least = c_uint(0), c_uint(1)  # no flags; one SM, which the driver rounds up
    split = "cuDevSmResourceSplitByCount"
    driver.call(split, None, byref(count), byref(whole), None, *least)
    groups = (SmResource * count.value)()
    driver.call(split, groups, byref(count), byref(whole), None, *least)
    return list(groups)[: count.value]


class GreenStream:
    """A stream whose work takes these groups of SMs, of one call of `smallest_groups`."""

    def __init__(self, driver: CudaDriver, groups: Sequence[SmResource]) -> None:
        self.sms = sum(group.sms for group in groups)
        self._driver = driver
        described, self._context, stream = c_void_p(), c_void_p(), c_void_p()
        array = (SmResource * len(groups))(*groups)
        driver.call("cuDevResourceGenerateDesc", byref(described), array, c_uint(len(groups)))
        flags = c_uint(_DEFAULT_STREAM)
        driver.call("cuGreenCtxCreate", byref(self._context), described, _device(driver), flags)
        try:
            how = c_uint(_NON_BLOCKING), c_int(0)
            driver.call("cuGreenCtxStreamCreate", byref(stream), self._context, *how)
        except KvmigError:
            driver.call("cuGreenCtxDestroy", self._context)
            raise
        self.handle = int(stream.value or 0)

    def close(self) -> None:
        """Wait for its work, and give its SMs back; no graph that was captured there may run."""
        self._driver.finish(self.handle)
        self._driver.destroy_stream(self.handle)
        self._driver.call("cuGreenCtxDestroy", self._context)


def _device(driver: CudaDriver) -> c_int:
    found = c_int()
    driver.call("cuDeviceGet", byref(found), c_int(driver.ordinal))
    return found
